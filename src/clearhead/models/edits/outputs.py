"""Edits of weights and outputs, after the softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.errors import ClearheadError
from clearhead.base.numbers import check_count, check_number
from clearhead.base.output.text import brief, listed
from clearhead.models.edits.base import Edit
from clearhead.models.edits.from_run import FromRun, Source
from clearhead.models.edits.spot import Spot
from clearhead.models.interception.choice import Heads, Layers, Positions

Kind = Literal["zero", "mean", "position mean", "resample"]


class ScaleHeads(Edit):
    """Multiplies the outputs of some heads by a number; 0 ablates them.

    >>> import torch, clearhead as ch
    >>> block, x = ch.nn.DotProductAttention(), torch.rand(1, 4, 10, 8)
    >>> with ch.edit(block, ch.edits.ScaleHeads(heads=[0, 3], factor=0.0)):
    ...     output = block(x, x, x)
    >>> output.abs().amax((0, 2, 3)).count_nonzero()
    tensor(2)

    Formula: O_i becomes `factor` · O_i, before the projection that joins the heads. `layers`, `heads`, `queries`: see
    `Edit`. Source: Michel et al. 2019, "Are Sixteen Heads Really Better than One?".
    """

    def __init__(
        self, layers: Layers = None, heads: Heads = None, factor: float = 0.0, queries: Positions = None
    ) -> None:
        super().__init__(layers, heads, queries)
        self.factor = check_number(factor, "ScaleHeads: factor")


class MapWeights(Edit):
    """Changes the weights of some heads by a function, after the softmax.

    >>> import torch, clearhead as ch
    >>> block, x = ch.nn.DotProductAttention(), torch.rand(1, 4, 10, 8)
    >>> sharper = lambda w: w**2 / (w**2).sum(-1, keepdim=True)
    >>> with ch.edit(block, ch.edits.MapWeights(sharper, heads=2)):
    ...     output = block(x, x, x, mask=ch.Causal())
    >>> w = ch.weights(x, x, mask=ch.Causal())[0, 2]
    >>> torch.allclose(output[0, 2], sharper(w) @ x[0, 2], atol=1e-6)
    True

    Formula: O = f(W) V, with the weights W of the heads and queries that are changed, and the model's own values V.
    `function`: takes W, a tensor (B, h, q, Lk), and gives another of the same shape, dtype and device; it may write to
    W. W is float32, or float64 in a float64 model. It is called once for each run of neighbouring heads; in a
    generation q counts the new tokens, and Lk all keys. Rows need not sum to 1: divide them by their sum in the
    function where they should; pages and gradients of a recorded call need it. Numbers below 0 are allowed, but `watch`
    refuses them, since a record has the logarithm of each weight.
    The mask holds: a pair that it hides has weight 0 in W, and 0 again whatever the function gives. To open such pairs,
    put a `ForceMask` before this edit. In a head with a sink, W has no column for it, and its rows sum to less than 1.
    Edits of scores come before it, other changes of weights in the order of the edits, and factors and changes of the
    output after it. Gradients flow through the function. `layers`, `heads`, `queries`: see `Edit`.
    Raises a `ShapeError` where the model calls attention if the function gives anything else than such a tensor.
    Cost: the whole matrix of the changed heads and queries, B · h · q · Lk numbers, beside those that the function
    makes; other edits need no matrix.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        layers: Layers = None,
        heads: Heads = None,
        queries: Positions = None,
    ) -> None:
        super().__init__(layers, heads, queries)
        if not callable(function):
            raise ClearheadError(
                f"MapWeights: function is {brief(function)}; expected a function of the weights (B, h, q, Lk), such as "
                "lambda w: w / w.sum(-1, keepdim=True)."
            )
        self.function = function

    def weights(self, weights: Tensor, spot: Spot) -> Tensor:
        return self.function(weights)


class Ablate(Edit):
    """The output of some heads becomes 0, their mean over texts, or what they had for another text.

    >>> import torch, clearhead as ch
    >>> block, x, others = ch.nn.DotProductAttention(), torch.rand(1, 4, 10, 8), torch.rand(5, 4, 10, 8)
    >>> with ch.watch(block, values=True) as seen:
    ...     mean = block(others, others, others).mean((0, 2))
    >>> with ch.edit(block, ch.edits.Ablate(heads=3, kind="mean", over=seen)):
    ...     output = block(x, x, x)
    >>> torch.allclose(output[0, 3, 7], mean[3], atol=1e-6)
    True

    `kind`: "zero"; "mean", the mean of the head's output over all sequences and positions of `over` that are no
    padding; "position mean", the mean over its sequences at each position, for texts of one template; or "resample",
    its output at the same positions of another sequence of `over`, drawn for each sequence by `seed`, the same for all
    heads and layers. Where `over` has as many sequences as this run, no sequence gets its own.
    `over`: a `Recording` of `watch(model, values=True)`, of one run, or one of its calls; not for "zero". `layers`,
    `heads`, `queries`: see `Edit`. Raises a `ClearheadError` where `over` has no call of a layer, or fewer positions
    than this run.
    Source: Wang et al. 2023, "Interpretability in the Wild" (means); Chan et al. 2022, "Causal Scrubbing" (resampling).
    """

    def __init__(
        self,
        layers: Layers = None,
        heads: Heads = None,
        kind: Kind = "zero",
        over: Source | None = None,
        queries: Positions = None,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(layers, heads, queries)
        if not isinstance(kind, str) or kind not in get_args(Kind):
            raise ClearheadError(f"Ablate: kind is {kind!r:.60}; expected one of {listed(get_args(Kind))}.")
        if (kind == "zero") != (over is None):
            need = "takes no recording: leave out over" if kind == "zero" else "needs a recording: over=recording"
            raise ClearheadError(f"Ablate: kind={kind!r} {need}.")
        self.kind, self.over = kind, None if over is None else FromRun(over, "Ablate")
        self.factor = 0.0 if kind == "zero" else 1.0
        self.seed = check_count(seed, 0, "Ablate: seed")
        if self.over is not None and not self.over.call_of:
            raise ClearheadError("Ablate: over is a tensor; expected a recording of watch(model, values=True).")

    def after(self, output: Tensor, spot: Spot) -> Tensor:
        if self.over is None:
            return output
        given = self.over.tensor("output", spot.site)
        own = given[:, spot.heads.start : spot.heads.stop]
        if self.kind == "resample":
            taken = self.over.taken("output", spot, own, list(spot.rows))
            return taken[self._drawn(output.shape[0], given.shape[0])].to(output.dtype)
        call = self.over.call(spot.site)
        words = None if call.padding is None else call.padding.queries
        keep = given.new_ones(given.shape[0], given.shape[2]) if words is None else words.to(given)
        sides: tuple[int, ...] = (0, 2)
        if self.kind == "position mean":
            rows = list(spot.rows)
            own, keep, sides = self.over.taken("output", spot, own, rows), keep[:, rows], (0,)
            if bool((keep.sum(0) == 0).any()):
                place = rows[int((keep.sum(0) == 0).nonzero()[0])]
                raise ClearheadError(f"Ablate: position {place} is padding in every sequence of over: it has no mean.")
        own, keep = own.to(accumulated(own.dtype)), keep[:, None, :, None].to(accumulated(own.dtype))
        mean = (own * keep).sum(sides, keepdim=True) / keep.sum(sides, keepdim=True)
        return mean.to(output.dtype).expand_as(output).clone()

    def _drawn(self, here: int, there: int) -> Tensor:
        """For each sequence of this run a sequence of the other one."""
        generator = torch.Generator("cpu").manual_seed(self.seed)
        own = here == there > 1  # then no sequence gets its own output
        drawn = torch.randint(int(own), there, (here,), generator=generator, device="cpu")
        return (drawn + torch.arange(here, device="cpu") * own) % there
