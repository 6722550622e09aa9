"""What heads read and write: their projections, their circuits, and what they add to a logit."""
