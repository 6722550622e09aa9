"""Running means of the results of `statistics` over a corpus."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.output.text import brief, listed
from clearhead.models.recordings.reduced import ReducedCall

_lock = threading.Lock()  # of all means, since a lock of their own could not be copied


class Means:
    """Means, for each head, of the results of `clearhead.models.statistics` over any number of calls.

    >>> import torch, clearhead as ch
    >>> block, means = ch.nn.DotProductAttention(), ch.models.Means()
    >>> for x in (torch.rand(1, 4, 10, 8), torch.rand(1, 4, 300, 8)):
    ...     with ch.models.statistics(block, [ch.reductions.Entropy()], merge=means):
    ...         output = block(x, x, x, mask=ch.Causal())
    >>> means["DotProductAttention"][0].shape, means.counts["DotProductAttention"][0].tolist()
    (torch.Size([4]), [310.0, 310.0, 310.0, 310.0])

    `means[name]`: the means of one module in the order of the reductions, each (H, …), float64. Every query that sees a
    key and is no padding weighs the same, whichever text it belongs to. In `Received` every key that is seen and is no
    padding weighs the same, and in `Pool` every sequence. For `TopK` the means are those of its values. Memory does not
    grow with the number of calls.
    `state_dict()` gives sums and counts. The states of two runs, added key by key, are the state of both together.
    If the model fails during a text, the layers before the failure have been added.
    Raises a `ClearheadError` where a module's reductions or heads differ from those before, and a `ShapeError` where a
    result has another shape: a `Pool` has ⌈L / ⌈L / size⌉⌉ cells, a number that depends on the length.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}
        self._counts: dict[str, list[Tensor]] = {}
        self._of: dict[str, Any] = {}  # by module, the reductions and heads of its means, where they are known

    def add(self, call: ReducedCall) -> None:
        """Add one call."""
        self._include(call.name, [type(one).__name__ for one in call.reductions], call.heads, call.sums())

    def _include(self, name: str, kept: list[str], heads: tuple[int, ...], sums: list[tuple[Tensor, Tensor]]) -> None:
        """Add the sums and counts of a module's call. `kept`: what they are of."""
        with _lock:
            before, heads_before = self._of.setdefault(name, (kept, heads))
            if (before, heads_before) != (kept, heads):
                raise ClearheadError(
                    f"{name}: these are means of {', '.join(before)} in the heads {heads_before}; {', '.join(kept)} in "
                    f"the heads {heads} need a ch.models.Means() of their own."
                )
            self._add(name, [total for total, _ in sums], [count for _, count in sums])

    def _add(self, name: str, sums: list[Tensor], counts: list[Tensor]) -> None:
        before = self._sums.get(name)
        if before is None:
            self._sums[name], self._counts[name] = sums, counts
            return
        shapes, now = ([tuple(t.shape) for t in tensors] for tensors in (before, sums))
        if shapes != now:
            raise ShapeError(
                f"{name}: the sums have shapes {now}, and those of the calls before {shapes}. A Pool's map depends on "
                "the length of the text: take means of texts of one length, or leave it out."
            )
        self._sums[name] = [a + b for a, b in zip(before, sums, strict=True)]
        self._counts[name] = [a + b for a, b in zip(self._counts[name], counts, strict=True)]

    def include(self, state: Mapping[str, Tensor], modules: Iterable[str]) -> None:
        """Add the sums and counts of another `Means`, by its state, for these modules."""
        other = Means()
        other.load_state_dict(state)
        with _lock:
            for name in modules:
                self._add(name, other._sums[name], other._counts[name])

    def __getitem__(self, name: str) -> tuple[Tensor, ...]:
        if name not in self._sums:
            raise ClearheadError(f"there are no means of a module {name!r}; there are those of: {listed(self)}.")
        return tuple(s / c for s, c in zip(self._sums[name], self._counts[name], strict=True))

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)

    @property
    def counts(self) -> dict[str, tuple[Tensor, ...]]:
        """By module, the number of queries, keys or sequences in each mean, for each head."""
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
        """Replace all sums and counts by these. Raises a `ClearheadError` unless they are the state of a `Means`."""
        found: dict[str, dict[int, dict[str, Tensor]]] = {}
        try:
            for key, tensor in state.items():
                name, number, what = key.rsplit(":", 2)
                held = found.setdefault(name, {}).setdefault(int(number), {})
                held[what] = tensor.detach().to("cpu", torch.float64, copy=True)
            sums, counts = (
                {name: [by_number[i][what] for i in range(len(by_number))] for name, by_number in found.items()}
                for what in ("sum", "count")
            )
            for total, count in ((a, b) for name in sums for a, b in zip(sums[name], counts[name], strict=True)):
                count.expand_as(total)
        except (AttributeError, KeyError, ValueError, RuntimeError) as error:
            raise ClearheadError(
                "the state of Means has tensors 'module:number:sum' and …count of each result, alike in shape; got "
                f"{brief(state)}."
            ) from error
        self._of, self._sums, self._counts = {}, sums, counts

    def __repr__(self) -> str:
        return f"Means({len(self)} modules)"
