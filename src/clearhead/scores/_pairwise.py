"""The normal form of scores, which engines compute."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.base.arrays import FLOATS, is_dense, shown
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.numbers import check_number
from clearhead.base.output.text import with_outline
from clearhead.scores.pair_functions import PHIS, Phi

NARROW = tuple(dtype for dtype in FLOATS if dtype != torch.float64)  # the dtypes whose numbers float32 can hold


@with_outline
class Pairwise(NamedTuple):
    """The normal form of a score: s_ij = softcap(scale · Σ_d weight_d · φ(query_id, key_jd)).

    >>> import torch, clearhead as ch
    >>> class Halved(ch.extend.Score):
    ...     def tile(self, query, key):
    ...         return query @ key.mT / 2
    ...     def lower(self, query, key):
    ...         return ch.extend.Pairwise("mul", query, key, scale=0.5)
    >>> x = torch.rand(1, 1, 5, 4)
    >>> ch.plan(x, x, x, score=Halved(), mask=ch.Causal()).engine
    'native'

    φ(a, b) is a·b (`mul`), tanh(a + b) (`tanh_add`) or (a − b)² (`sq_diff`); softcap(s) is c·tanh(s/c). A score's
    `lower` gives no softcap: the call puts it in, with its scale.
    """

    phi: Phi
    query: Tensor  # (B, H, Lq, D)
    key: Tensor  # (B, Hk, Lk, D)
    weight: Tensor | None = None  # (D,); None: ones
    scale: float = 1.0
    softcap: float | None = None

    def folded(self) -> Pairwise:
        """The same scores, the weight of a dot product multiplied into its query."""
        if self.phi != "mul" or self.weight is None:
            return self
        return self._replace(query=self.query * self.weight, weight=None)


def check_pairwise(lowered: Pairwise, query: Tensor, key: Tensor, who: str) -> Pairwise:
    """Validate the normal form that a score's `lower` gave, since the kernels rely on its sizes.

    A scale that is a tensor becomes a part of the weight, so that its gradient is carried.
    """
    if type(lowered) is Pairwise:
        phi, own_query, own_key, weight, scale, softcap = lowered
        same = own_query is query and own_key is key and weight is None
        if same and phi in PHIS and type(scale) is float and scale == 1.0 and softcap is None:
            return lowered  # plain dot products need no further check
    if not isinstance(lowered, Pairwise) or lowered.phi not in PHIS:
        got = f"Pairwise({lowered.phi!r}, …)" if isinstance(lowered, Pairwise) else f"a {type(lowered).__name__}"
        raise ClearheadError(f"{who}.lower gave {got}; expected None, or a Pairwise whose φ is one of {tuple(PHIS)}.")
    width = lowered.query.shape[-1:] if is_dense(lowered.query) else query.shape[-1:]
    expected = {"query": (*query.shape[:3], *width), "key": (*key.shape[:3], *width), "weight": tuple(width)}
    for name, shape in expected.items():
        tensor = getattr(lowered, name)
        if tensor is None and name == "weight":
            continue
        dtypes = (query.dtype,) if name != "weight" else NARROW if query.dtype != torch.float64 else FLOATS
        fits = is_dense(tensor) and tuple(tensor.shape) == shape and tensor.dtype in dtypes
        if not fits or tensor.device != query.device:
            raise ShapeError(
                f"{who}.lower gave a {name} {shown(tensor)}; expected {shape} of {dtypes[0]} on {query.device}, for "
                f"query {tuple(query.shape)} and key {tuple(key.shape)}: lower() changes the width alone."
            )
    if lowered.softcap is not None:
        raise ClearheadError(f"{who}.lower gave a softcap; a score has its own: super().__init__(softcap=...).")
    if not isinstance(lowered.scale, Tensor):
        check_number(lowered.scale, f"the scale that {who}.lower gave")
        return lowered
    weight = lowered.query.new_ones(width) if lowered.weight is None else lowered.weight
    return lowered._replace(weight=weight * lowered.scale.reshape(()).to(weight), scale=1.0)
