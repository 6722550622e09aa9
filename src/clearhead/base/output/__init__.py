"""Text, pages, pictures and files that people read."""
