"""The data of one attention call in the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Layer:
    """One attention call on one sequence, with all that its weights can be recomputed from.

    The weights themselves are not kept: they grow with the square of the length, the queries and
    keys do not. The weight of query i on key j is, inside the span `start[i] <= j < stop[i]`::

        exp(softcap(scale * query_i . key_j) + bias_ij - logsumexp_i)

    and 0 outside it. `softcap(s)` is `softcap * tanh(s / softcap)`, or s where there is none; a sink
    is one more term of the sum in `logsumexp`.

    Attributes:
        name: where the call was made, such as `"encoder.layer.0.attention.self"`.
        kind: `"self"` or `"cross"`.
        query: (H, Lq, D) float32, as multiplied with the keys: rotated where the model rotates.
        key: (Hk, Lk, D) float32. Hk divides H: head h uses key head `h // (H // Hk)`.
        scale: the factor on the dot product.
        softcap: bounds the scaled score, or None.
        start: (H or 1, Lq) int32, the first key each query may see.
        stop: (H or 1, Lq) int32, one past the last key each query may see.
        bias: (H or 1, Lq, Lk) float32 added after the softcap, or None; -inf is a pair not allowed.
        logsumexp: (H, Lq) float64; -inf for a query that sees nothing, whose weights are all 0.
        entropy: (H, Lq) in nats.
        received: (H, Lk), the sum of each key's weights over the queries.
        distance: (H, Lq), the mean distance in positions looked across; None for cross attention.
        thumbnail: (H, <=32, <=32), the maximum of the weights in each cell of a coarse grid.
        query_tokens: Lq strings.
        key_tokens: Lk strings.
        sinks: (H,) the sink's score of each head, or None.
        steps: name, formula and code of each step that leads to a weight, see `why.py`; the page
            shows none where it is empty. `blind_steps`: those of a query that sees nothing.

        operand_steps: (H, D) and (Hk, D), where query and key are whole multiples of these, see
            `operands.py`: they are written as such. None writes float32.
        error: how far the weights of these queries and keys are from the call's, at most; None if
            they are the call's own.

    Raises:
        ValueError: if a shape does not fit the others. The message names the field.
    """

    name: str
    kind: str
    query: Array
    key: Array
    scale: float
    softcap: float | None
    start: Array
    stop: Array
    bias: Array | None
    logsumexp: Array
    entropy: Array
    received: Array
    distance: Array | None
    thumbnail: Array
    query_tokens: list[str]
    key_tokens: list[str]
    sinks: Array | None = None
    steps: tuple[dict[str, str], ...] = ()
    blind_steps: tuple[dict[str, str], ...] = ()
    operand_steps: tuple[Array, Array] | None = None
    error: float | None = None
    label: str = ""
    role: str = ""
    measures: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("self", "cross"):
            raise ValueError(f'Layer.kind is {self.kind!r}; it must be "self" or "cross".')
        if self.query.ndim != 3 or self.key.ndim != 3:
            raise ValueError(
                "Layer.query and Layer.key must be (heads, length, features), one sequence of a "
                f"batch; got {self.query.shape} and {self.key.shape}."
            )
        heads, queries, features = self.query.shape
        key_heads, keys, _ = self.key.shape
        if min(heads, queries, features, key_heads, keys) < 1:
            raise ValueError(
                "Layer needs at least one head, query, key and feature; query is "
                f"{self.query.shape}, key is {self.key.shape}."
            )
        if heads % key_heads:
            raise ValueError(f"Layer.key has {key_heads} heads, which must divide {heads}.")
        one_or_all = (1, heads)
        self._check("key", self.key, (key_heads,), keys, features)
        self._check("start", self.start, one_or_all, queries)
        self._check("stop", self.stop, one_or_all, queries)
        self._check("bias", self.bias, one_or_all, queries, keys)
        self._check("logsumexp", self.logsumexp, (heads,), queries)
        self._check("entropy", self.entropy, (heads,), queries)
        self._check("received", self.received, (heads,), keys)
        self._check("sinks", self.sinks, (heads,))
        self._check("distance", self.distance, (heads,), queries)
        if self.thumbnail.ndim != 3 or len(self.thumbnail) != heads:
            raise ValueError(f"Layer.thumbnail must be ({heads}, rows, columns); got {self.thumbnail.shape}.")
        for field, tokens, length in (
            ("query_tokens", self.query_tokens, queries),
            ("key_tokens", self.key_tokens, keys),
        ):
            if len(tokens) != length:
                raise ValueError(f"Layer.{field} has {len(tokens)} tokens for length {length}.")

    @staticmethod
    def _check(field: str, array: Array | None, heads: tuple[int, ...], *rest: int) -> None:
        """Raise unless `array` is absent, or of one of the head counts followed by `rest`."""
        if array is None or (array.shape[1:] == rest and len(array) in heads):
            return
        allowed = " or ".join(str((h, *rest)) for h in dict.fromkeys(heads))
        raise ValueError(f"Layer.{field} must be {allowed}; got {array.shape}.")

    @property
    def heads(self) -> int:
        return int(self.query.shape[0])

    def key_head(self, head: int) -> int:
        """The key head that query head `head` uses."""
        return head // (self.heads // len(self.key))


def of_head(array: Array, head: int) -> Array:
    """Row `head` of an array whose first dimension is all heads, or 1 for every head alike."""
    row: Array = array[head if len(array) > 1 else 0]
    return np.ascontiguousarray(row)
