"""How the attention calls of a model are met."""
