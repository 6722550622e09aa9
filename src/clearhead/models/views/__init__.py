"""Recorded calls as pages, pictures and widgets."""
