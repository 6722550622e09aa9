"""Recorded calls as pages, pictures and files."""
