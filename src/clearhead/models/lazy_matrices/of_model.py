"""The source of a model's lazy weights: the problem of a call, within the model's graph where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.torch_state.contexts import without_function_modes
from clearhead.base.torch_state.torch_private import uncounted, version, whole_of
from clearhead.base.torch_state.versions import Versions
from clearhead.inspection.source import DerivedSource, Source
from clearhead.models.interception.masks import Recorded
from clearhead.problem.problem import Problem, with_value
from clearhead.problem.record import copied
from clearhead.problem.region import Region
from clearhead.problem.regions import cut
from clearhead.scores.dot import Dot

Named = Mapping[str, Tensor | None]


class OfModel(Source):
    """An attention call of a model.

    query (B, H, Lq, E), key (B, Hk, Lk, E), sinks (H,). `masks` are detached; where there are sinks, they are those of
    `Recorded.with_sinks`. `added`: the mask tensor and the position bias themselves; those with a gradient are kept.
    Tensors with a gradient stay in the graph. A tensor that is known to be written to later is copied: a cache that is
    written over, or a parameter.
    """

    def __init__(
        self, query: Tensor, key: Tensor, score: Dot, masks: Recorded, sinks: Tensor | None, added: Named
    ) -> None:
        given = {"query": query, "key": key, "sinks": sinks}
        self._tensors = {name: _kept(t) for name, t in given.items() if t is not None}
        self._added = {name: t for name, t in added.items() if t is not None and _followed(t)}
        self._score = score
        self.masks = masks
        self._reads = Versions((self._tensors | self._added).items())
        self._problem: Problem | None = None

    @property
    def learnt(self) -> list[Tensor]:
        """The tensors in the graph for which the weights have gradients."""
        return [tensor for tensor in (self._tensors | self._added).values() if tensor.requires_grad]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the weights, (B, H, Lq, Lk)."""
        query, key = self._tensors["query"], self._tensors["key"]
        return query.shape[0], query.shape[1], query.shape[2], key.shape[2]

    def without_graph(self) -> OfModel:
        """The same source, detached. It shares its tensors with this one."""
        new = object.__new__(OfModel)
        new.__dict__ = self.__dict__ | {"_added": {}, "_problem": None}
        new._tensors = {name: tensor.detach() for name, tensor in self._tensors.items()}
        return new

    def check(self) -> None:
        found = self._reads.written()
        if found is not None:
            name, tensor = found
            raise ClearheadError(
                f"the {name} of this attention call, shape {tuple(tensor.shape)}, was modified in place after it. Read "
                "its weights before: attention.dense()."
            )

    def problem(self) -> Problem:
        self.check()
        if torch.is_grad_enabled() and self.learnt:
            return self._made()  # a graph serves one backward pass
        if self._problem is None:
            with torch.inference_mode(False), torch.no_grad():  # the problem outlives the mode in which it is made
                self._problem = self._made()
        return self._problem

    def _made(self) -> Problem:
        query, key, sinks = self._tensors["query"], self._tensors["key"], self._tensors.get("sinks")
        dtype = torch.promote_types(query.dtype, key.dtype)  # under autocast the dtypes may differ
        masks = self.masks
        with without_function_modes():
            for tensor in self._added.values():
                masks = masks.with_gradient(tensor)
            return masks.problem(query.to(dtype), key.to(dtype), self._score, sinks)

    def with_value(self, value: Any) -> Problem:
        return with_value(self.problem(), value)

    def said(self) -> dict[str, Any]:
        return {"score": self._score, "mask": self.masks.mask}


class PartOfModel(DerivedSource):
    """Some sequences and heads of another source."""

    def __init__(self, whole: OfModel | PartOfModel, batch: slice, heads: slice) -> None:
        self.whole, self._region = whole, Region(batch, heads)
        super().__init__(whole, partial(cut, region=self._region))
        self.learnt: list[Tensor] = whole.learnt

    def without_graph(self) -> PartOfModel:
        return PartOfModel(self.whole.without_graph(), self._region.batch, self._region.heads)


def _kept(tensor: Tensor) -> Tensor:
    base = whole_of(tensor)
    trained = base.is_leaf and base.requires_grad
    if _followed(tensor):
        return tensor.clone() if trained else tensor
    written = uncounted(tensor) or version(tensor) > 0  # inference mode counts no writes
    part = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()  # a view would keep the rest too
    return copied(tensor) if trained or written or part else tensor.detach()


def _followed(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()
