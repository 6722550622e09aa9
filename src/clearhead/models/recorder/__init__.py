"""The handler that records the calls of a model while it runs."""
