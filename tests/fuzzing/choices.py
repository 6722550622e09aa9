"""Random choices, which follow from a number."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class Choices:
    def __init__(self, number: int) -> None:
        self.rng = np.random.default_rng(number)
        self.torch = torch.Generator().manual_seed(number)

    def one(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]
