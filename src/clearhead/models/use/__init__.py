"""Tools that work on the attention calls of a model while it runs."""
