"""How a computation came about: its steps, with shapes, numbers and formulas."""
