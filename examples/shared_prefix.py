"""A prefix that many continuations share: its keys are attended to once, for all of them together.

Twenty continuations of a prompt of 2,000 tokens ask one query each. Their queries stand side by side as rows of one
call over the prefix; each continuation's own keys are a call of their own; the two merge exactly.

>>> import torch, clearhead as ch
>>> from shared_prefix import attend
>>> query = torch.randn(20, 8, 1, 64)                         # (continuations, heads, 1, head_dim)
>>> prefix = torch.randn(2, 8, 2000, 64)                      # its keys and values, held once
>>> own = torch.randn(2, 20, 8, 30, 64)                       # keys and values of each continuation
>>> output = attend(query, prefix, own)
>>> key, value = (torch.cat([p.expand(20, -1, -1, -1), o], 2) for p, o in zip(prefix, own))
>>> torch.allclose(output, ch.attention(query, key, value), atol=1e-6)
True
"""

import torch
from torch import Tensor

import clearhead as ch


def attend(query: Tensor, prefix: Tensor, own: Tensor) -> Tensor:
    """Attention of queries (N, H, 1, E) to a shared prefix (2, H, P, E) and to keys of their own (2, N, H, L, E)."""
    total = prefix.shape[2] + own.shape[3]
    together = query.permute(2, 1, 0, 3)  # (1, H, N, E): the continuations as queries of one sequence
    shared = ch.partial(together, prefix[0, None], prefix[1, None], keys=(0, total))
    theirs = ch.partial(query, own[0], own[1], keys=(prefix.shape[2], total))
    return shared.transpose(0, 2).merge(theirs).finish()


if __name__ == "__main__":
    torch.manual_seed(0)
    print(attend(torch.randn(20, 8, 1, 64), torch.randn(2, 8, 2000, 64), torch.randn(2, 20, 8, 30, 64)).shape)
