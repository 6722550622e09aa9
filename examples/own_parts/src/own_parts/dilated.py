"""A mask that is no interval."""

import torch

from clearhead.extend import Mask, Spans


class Dilated(Mask):
    """Each query sees every `step`-th key: an interval (here all of them), and a residual that thins it out."""

    def __init__(self, step):
        self.step = step

    @classmethod
    def example(cls, sizes):
        return cls(3)

    def title(self):
        return f"Dilated({self.step})"

    def lower(self, sizes):
        whole = torch.zeros(1, 1, 1, dtype=torch.int64, device=sizes.device)
        queries, keys = (torch.arange(n, device=sizes.device) for n in (sizes.queries, sizes.keys))

        def residual(batch, head, query, key):  # four slices: the part of the mask that is asked for
            return (queries[query, None] - keys[key]) % self.step == 0

        return Spans(whole, whole + sizes.keys, residual)
