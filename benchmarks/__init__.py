"""Ratios against what a person could use today, measured side by side in one run. Run with `make bench`."""
