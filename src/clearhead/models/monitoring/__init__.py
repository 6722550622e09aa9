"""Numbers of heads while a model trains."""
