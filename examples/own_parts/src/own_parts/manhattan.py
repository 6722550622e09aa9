"""A score with something to learn."""

import torch

from clearhead.extend import Score


class Manhattan(Score):
    """s_ij = −Σ_d w_d · |q_id − k_jd|: `tile` is all that a score needs."""

    def __init__(self, width):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(width))

    def tile(self, query, key):
        return -(query.unsqueeze(-2) - key.unsqueeze(-3)).abs() @ self.w

    @classmethod
    def example(cls):
        return cls(6), 6, 6  # a score, and the widths of the query and of the key that it takes
