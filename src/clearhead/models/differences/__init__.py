"""Two recordings beside each other: what each head attends to in one, and in the other."""
