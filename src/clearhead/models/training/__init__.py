"""What follows the attention of a model that trains."""
