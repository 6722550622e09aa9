"""Values that are no right argument: of a wrong type, size, device or kind of number, each made of the right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


def tensor(good: Any) -> Tensor:
    return good if isinstance(good, Tensor) and good.is_floating_point() else torch.ones(2, 3)


def same(good: Any) -> Tensor:
    """The right tensor, or another one where the right argument is none."""
    return good if isinstance(good, Tensor) else torch.ones(2, 3)


FAKE = FakeTensorMode(allow_non_fake_inputs=True)


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)


def freed(good: Any) -> Tensor:
    """A tensor whose memory is gone, as `fully_shard` leaves a layer's parameters."""
    tensor = same(good).detach().clone()
    tensor.untyped_storage().resize_(0)
    return tensor


KINDS: dict[str, Callable[[Any], Any]] = {
    "None": lambda good: None,
    "str": lambda good: "x",
    "bytes": lambda good: b"x",
    "empty list": lambda good: [],
    "list": lambda good: [1.5, "x"],
    "dict": lambda good: {},
    "object": lambda good: object(),
    "class": lambda good: dict,
    "generator": lambda good: (i for i in range(3)),
    "bool": lambda good: True,
    "complex": lambda good: 1j,
    "nan": lambda good: float("nan"),
    "inf": lambda good: float("inf"),
    "negative": lambda good: -1,
    "huge": lambda good: 2**70,
    "fraction": lambda good: 2.5,
    "scalar tensor": lambda good: torch.tensor(1.5),
    "bool tensor": lambda good: torch.ones_like(same(good), dtype=torch.bool),
    "integer tensor": lambda good: torch.ones_like(same(good), dtype=torch.long),
    "complex tensor": lambda good: tensor(good).to(torch.complex64),
    "float8 tensor": lambda good: tensor(good).to(torch.float8_e4m3fn),
    "sparse tensor": lambda good: tensor(good).to_sparse(),
    "nested tensor": lambda good: nested(),
    "NaN tensor": lambda good: torch.full_like(tensor(good), torch.nan),
    "tensor of another size": lambda good: torch.ones(*tensor(good).shape[:-1], tensor(good).shape[-1] + 3),
    "tensor of more dimensions": lambda good: torch.ones(2, 1, 3, 1, 2, 1),
    "empty tensor": lambda good: torch.zeros(0),
    "meta tensor": lambda good: same(good).to("meta"),
    "fake tensor": lambda good: FAKE.from_tensor(same(good)),
    "freed tensor": freed,
    "object array": lambda good: np.array([[1, 2], [3]], dtype=object),
    "string array": lambda good: np.array(["a"]),
}

# The same for all tensors of a call at once.
TOGETHER = (
    "bool tensor",
    "integer tensor",
    "complex tensor",
    "float8 tensor",
    "sparse tensor",
    "nested tensor",
    "NaN tensor",
    "empty tensor",
    "meta tensor",
    "fake tensor",
    "freed tensor",
    "object array",
    "string array",
    "scalar tensor",
)
