"""What `edit` changes in a model's attention: one idea a file."""
