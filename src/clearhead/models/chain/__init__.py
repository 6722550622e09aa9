"""Generations: the links of their calls, and their join."""
