"""Changes of a model's attention while it runs."""
