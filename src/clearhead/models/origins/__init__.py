"""Which layers made the queries, keys and values of a recorded call."""
