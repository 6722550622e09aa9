"""Keys that arrive in chunks, from a file, a network or another device: one chunk is in memory at a time.

>>> import torch, clearhead as ch
>>> from keys_in_chunks import attend
>>> query, key, value = torch.randn(1, 8, 100, 64), torch.randn(1, 8, 5000, 64), torch.randn(1, 8, 5000, 64)
>>> chunks = zip(key.split(1024, 2), value.split(1024, 2))
>>> output = attend(query, chunks, total=5000, mask=ch.Causal(), align="lower_right")
>>> torch.allclose(output, ch.attention(query, key, value, mask=ch.Causal(), align="lower_right"), atol=1e-6)
True
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import clearhead as ch


def attend(query: Tensor, chunks: Iterable[tuple[Tensor, Tensor]], total: int, **options: Any) -> Tensor:
    """Attention to `total` keys. Each chunk (key, value) has the next keys. The options are those of `ch.partial`."""
    found, first = None, 0
    for key, value in chunks:
        part = ch.partial(query, key, value, keys=(first, total), **options)
        found = part if found is None else found.merge(part)
        first += key.shape[-2]
    assert found is not None and first == total
    return found.finish()


if __name__ == "__main__":
    torch.manual_seed(0)
    every = ((torch.randn(1, 8, 1024, 64), torch.randn(1, 8, 1024, 64)) for _ in range(4))
    print(attend(torch.randn(1, 8, 100, 64), every, total=4096, mask=ch.Causal(), align="lower_right").shape)
