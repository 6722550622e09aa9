"""Planted faults, by which the tests themselves are tested: see `run.py`."""
