"""What is wrong or risky in a call of attention: one check a file, in `checks`."""
