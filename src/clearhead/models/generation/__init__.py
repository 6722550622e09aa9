"""The steps of a generation: each key kept once, and all steps as one matrix."""
