"""A bias that depends on the distance alone."""

import torch

from clearhead.extend import Added, Bias


class Recency(Bias):
    """b_ij = −slope · log(1 + |i − j|), given as one number a distance: O(L) memory, on any engine."""

    def __init__(self, slope=0.5):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.tensor(slope))

    @classmethod
    def example(cls, sizes):
        return cls()

    def lower(self, sizes):
        # entry t stands for the keys t − (Lq − 1) places after their query
        apart = torch.arange(sizes.queries + sizes.keys - 1, device=sizes.device) - (sizes.queries - 1)
        return Added(relative=(-self.slope * torch.log1p(apart.abs().to(self.slope.dtype))).view(1, 1, -1))
