"""What a recorded query, key, value and output were made of: found among the layers that ran, by their numbers."""
