"""One call beside the mask that was expected of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from clearhead.base.text import said
from clearhead.masks.base import Mask
from clearhead.models.attention_call import AttentionCall
from clearhead.models.audits._pairs import WorstRow


@dataclass(frozen=True, eq=False)
class AuditedCall:
    """An attention call beside the mask that was expected of it.

    `leaked` (B, H, Lq): of each query, the share of its softmax that goes to keys that `expected` does not allow.
    `hidden` (B, H, Lq): the share, of its softmax under `expected`, of keys that the call did not allow. Both are
    float32 at least, from 0 to 1, and 0 exactly where the masks agree. `queries`, bool (B, H, Lq): those that count,
    which are no padding, and to which the call or `expected` allows a key. `call`: the record. `most_leaked`,
    `most_hidden`: the query that has the largest share, and its keys; None where there is no such pair. `disjoint`:
    whether no pair is allowed by both.
    """

    call: AttentionCall
    expected: Mask
    leaked: Tensor
    hidden: Tensor
    queries: Tensor
    most_leaked: WorstRow | None
    most_hidden: WorstRow | None
    disjoint: bool

    @property
    def name(self) -> str:
        return self.call.name

    @property
    def kind(self) -> Literal["self", "cross"]:
        return self.call.kind

    @property
    def run(self) -> int:
        return self.call.run

    @property
    def backend(self) -> str:
        return self.call.backend

    @property
    def most(self) -> float:
        """The largest share, leaked or hidden, of any query that counts; NaN where one is."""
        return float(torch.maximum(*(self._most(share) for share in (self.leaked, self.hidden))))

    def _most(self, share: Tensor) -> Tensor:
        counted = share.masked_fill(~self.queries, 0.0)
        return counted.max() if counted.numel() else counted.sum()

    @property
    def heads(self) -> Mapping[str, Tensor]:
        """For each head, (H,), float64: the mean and the largest share over the queries that count."""
        count = self.queries.sum((0, 2))
        found = {}
        for name, share in (("leaked", self.leaked), ("hidden", self.hidden)):
            counted = share.double().masked_fill(~self.queries, 0.0)
            by_head = counted.transpose(0, 1).flatten(1)
            found[name] = by_head.sum(1) / count
            found[f"most {name}"] = by_head.amax(1) if by_head.shape[1] else by_head.sum(1)
        return found

    def rows(self) -> list[dict[str, Any]]:
        """A row for each head: run, module, kind, backend, queries, keys, head, and what `heads` has."""
        _, _, queries, keys = self.call.problem.sizes.shape
        same = {"run": self.run, "module": self.name, "kind": self.kind, "backend": self.backend}
        same |= {"queries": queries, "keys": keys}
        columns = {name: values.tolist() for name, values in self.heads.items()}
        count = self.call.problem.sizes.heads
        return [same | {"head": i} | {name: values[i] for name, values in columns.items()} for i in range(count)]

    def __repr__(self) -> str:
        return said(self, self._said)

    def _said(self) -> str:
        shares = ", ".join(f"{name} {float(values.mean()):.3g}" for name, values in list(self.heads.items())[::2])
        return f"AuditedCall({self.name!r}, {shares})"
