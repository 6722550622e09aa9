"""The calls of a recording, compared with the masks that were expected of them."""
