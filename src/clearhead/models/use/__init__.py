"""What is done with the calls of a model while it runs."""
