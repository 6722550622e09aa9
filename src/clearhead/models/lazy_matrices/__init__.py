"""A model's own attentions as lazy tensors."""
