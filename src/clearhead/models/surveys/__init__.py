"""Means of measures over many texts."""
