"""Running means of what a watch keeps, over a corpus."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.models.reduced import ReducedCall


class Means:
    """Means for each head of what `watch(keep=…)` finds, over any number of calls, in constant memory.

    >>> import torch, torch.nn.functional as F, clearhead as ch
    >>> class Block(torch.nn.Module):
    ...     def forward(self, x):
    ...         return F.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> block, means = Block(), ch.Means()
    >>> for length in (10, 300):
    ...     with ch.watch(block, keep=[ch.Entropy()], merge=means):
    ...         output = block(torch.rand(1, 4, length, 8))
    >>> means["Block"][0].shape, means.counts["Block"][0].tolist()
    (torch.Size([4]), [310.0, 310.0, 310.0, 310.0])

    `means[name]`: for one module the means in the order of `keep`, each (H, …), float64. Every query that sees a key
    and is no padding weighs the same, whichever text it is of; every key that is no padding in `Received`; every
    sequence in `Pool`. Of `TopK` the means of its values.
    `state_dict()` gives sums and counts: those of two runs, added key by key, are those of both together.
    Raises a `ShapeError` where a result has another shape than before, such as a `Pool` of a text shorter than it.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}
        self._counts: dict[str, list[Tensor]] = {}
        self._lock = threading.Lock()

    def add(self, call: ReducedCall) -> None:
        """Add one call."""
        sums, counts = zip(*call.sums(), strict=True)
        with self._lock:
            self._add(call.name, list(sums), list(counts))

    def _add(self, name: str, sums: list[Tensor], counts: list[Tensor]) -> None:
        before = self._sums.get(name)
        if before is None:
            self._sums[name], self._counts[name] = sums, counts
            return
        shapes, now = ([tuple(t.shape) for t in tensors] for tensors in (before, sums))
        if shapes != now:
            raise ShapeError(
                f"{name}: the results have shapes {now} for all sequences together, and had {shapes} before. Means go "
                "on over the same reductions alone; a Pool's map is smaller where a text is shorter than it."
            )
        self._sums[name] = [a + b for a, b in zip(before, sums, strict=True)]
        self._counts[name] = [a + b for a, b in zip(self._counts[name], counts, strict=True)]

    def __getitem__(self, name: str) -> tuple[Tensor, ...]:
        if name not in self._sums:
            raise ClearheadError(f"there are no means of a module {name!r}; there are those of {', '.join(self)}.")
        return tuple(s / c for s, c in zip(self._sums[name], self._counts[name], strict=True))

    def __iter__(self) -> Any:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)

    @property
    def counts(self) -> dict[str, tuple[Tensor, ...]]:
        """By module, over how many queries, keys or sequences each mean is, for each head."""
        return {name: tuple(c.reshape(len(c), -1)[:, 0] for c in counts) for name, counts in self._counts.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Sums and counts, by "name:number:sum" and "name:number:count"."""
        return {
            f"{name}:{i}:{what}": tensor.clone()
            for what, held in (("sum", self._sums), ("count", self._counts))
            for name, tensors in held.items()
            for i, tensor in enumerate(tensors)
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take these sums and counts in place of what is here."""
        sums: dict[str, list[Tensor]] = {}
        counts: dict[str, list[Tensor]] = {}
        for key in state:
            name, number, what = [*key.rsplit(":", 2), "", ""][:3]
            if what not in ("sum", "count") or not number.isdecimal():
                raise ClearheadError(f"{key!r} is no key of the state of Means.")
            into = (sums if what == "sum" else counts).setdefault(name, [])
            into.append(state[f"{name}:{len(into)}:{what}"].double())
        if {n: len(t) for n, t in sums.items()} != {n: len(t) for n, t in counts.items()}:
            raise ClearheadError("the state of Means needs a sum and a count of each result.")
        self._sums, self._counts = sums, counts

    def __repr__(self) -> str:
        return f"Means({len(self)} modules)"
