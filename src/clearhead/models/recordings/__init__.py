"""Recorded calls of a model, or their statistics; their joins over a generation, and their files."""
