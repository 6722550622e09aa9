"""A call of attention in words: what it computes, and what is wrong with it."""
