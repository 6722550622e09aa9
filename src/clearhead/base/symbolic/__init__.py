"""Computations as expressions, with their formulas and steps."""
