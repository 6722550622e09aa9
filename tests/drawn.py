"""Normal numbers of a seed: the same in every test, whatever was drawn before."""

from typing import Any

import torch


def draw(*shape: int, seed: int = 0, **options: Any) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **options)
