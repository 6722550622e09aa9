"""The links of a generation, and what joins them."""
