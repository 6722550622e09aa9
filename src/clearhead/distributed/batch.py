"""A batch of token ids, shared out over ranks, and the loss of a rank's part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.base.arrays import shown
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.output.text import outlined
from clearhead.distributed.agreement import compare
from clearhead.distributed.channel import Channel
from clearhead.distributed.layout import Layout, check_layout
from clearhead.problem.problem import refuse_distributed

IGNORED = -100  # the label of a position without a target, as in transformers
BY_POSITION = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids")


@dataclass(frozen=True, eq=False, repr=False)
class ShardedBatch:
    """One rank's part of a batch, as `shard_batch` returns it.

    `inputs`: the arguments of the call `model(**batch.inputs)`: this rank's part of each tensor of the batch, and
    `position_ids`, which count through the whole sequence. `targets` (B, l), int64: the label for each logit of this
    rank, −100 where there is none; None without labels. `tokens`: the number of labels of the whole batch, on all
    ranks.
    """

    inputs: dict[str, Tensor]
    targets: Tensor | None
    tokens: int

    def __repr__(self) -> str:
        return outlined(self)

    def loss(self, logits: Tensor) -> Tensor:
        """This rank's term of the mean loss: the sum over the ranks is the mean over all labels of the batch.

        `logits` (B, l, vocabulary): the logits of this rank. Formula: Σ cross-entropy(logits, targets) / tokens, in
        float32 at least; 0 where the batch has no label. Its gradients are terms of a sum over the ranks, too: see
        `shard_batch`.
        """
        if self.targets is None:
            raise ClearheadError("the batch has no labels: give shard_batch a batch with labels for a loss.")
        if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != self.targets.shape:
            raise ShapeError(
                f"logits is {shown(logits)}, and this rank's part of the batch has {tuple(self.targets.shape)} "
                "targets: pass those of model(**batch.inputs), (B, l, vocabulary), such as output.logits."
            )
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        targets = self.targets.flatten().to(logits.device)
        return F.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="sum") / max(self.tokens, 1)


def shard_batch(batch: Mapping[str, object], layout: Layout, *, shift: bool = True) -> ShardedBatch:
    """This rank's part of a batch of whole sequences, for a model that shares them out over ranks.

    >>> import torch, clearhead as ch
    >>> layout = ch.distributed.ZigZag(8, 2)  # of two ranks; this process counts as the first
    >>> ids = torch.arange(10, 18)[None]
    >>> part = ch.distributed.shard_batch({"input_ids": ids, "labels": ids}, layout)
    >>> part.inputs
    {'input_ids': tensor([[10, 11, 16, 17]]), 'position_ids': tensor([[0, 1, 6, 7]])}
    >>> part.targets, part.tokens
    (tensor([[  11,   12,   17, -100]]), 7)

    Every rank of the layout's group calls it with the same whole batch:

        ch.models.run_on_clearhead(model, layout=layout)
        part = ch.distributed.shard_batch(batch, layout)
        loss = part.loss(model(**part.inputs).logits)
        loss.backward()

    `batch`: `input_ids` (B, L) or `inputs_embeds` (B, L, E). It may also have: `labels` (B, L), as transformers takes
    them, not shifted, −100 where there is none; `attention_mask` (B, L), 0 for padding, on the right, on the left, or
    anywhere; `position_ids` (B or 1, L), by default 0 … L − 1, which begin again from 0 at each packed document;
    `token_type_ids`. `layout`: see `Layout`. `shift`: whether a position's logits predict the next token, as in causal
    models. Labels are then shifted before they are shared out, so that the last logit of a part has its target too.
    Pass False for models of masked tokens.
    Returns a `ShardedBatch`: `inputs`, `targets`, `tokens`, and `loss(logits)`.

    The sum of `loss` over the ranks is the mean over all labels, and a gradient of a parameter is the sum of the ranks'
    gradients: add them up (`all_reduce`). Where DDP or FSDP averages over these ranks, alone or among others, call
    `backward` on `loss * layout.ranks` instead.
    Raises a `ClearheadError` for other keys, shapes and layouts, and where the ranks have different batches.
    """
    check_layout(layout, of_processes=False)
    given = _checked(batch, layout)
    device = next(iter(given.values())).device
    if layout.members:
        channel, said = Channel(layout.group), {f"the batch's {n}": given.get(n) for n in (*BY_POSITION, "labels")}
        advice = "Every rank of the group passes the same whole batch: ranks that share a sequence read the same data."
        compare(said, channel, torch.device("cuda") if channel.on_cuda else device, advice)
    labels = given.pop("labels", None)
    if "position_ids" not in given:
        given["position_ids"] = torch.arange(layout.length, device=device)[None]
    if labels is not None and shift:
        labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return ShardedBatch(
        {name: layout.shard(tensor, 1) for name, tensor in given.items()},
        None if labels is None else layout.shard(labels, 1),
        0 if labels is None else int((labels != IGNORED).sum()),
    )


def _checked(batch: Any, layout: Layout) -> dict[str, Tensor]:
    """The tensors of a batch, by name. Raises an error for an entry that cannot be shared out."""
    named = batch if isinstance(batch, Mapping) else {}
    given = {name: value for name, value in named.items() if value is not None}
    first = [name for name in ("input_ids", "inputs_embeds") if name in given]
    if len(first) != 1 or not given.keys() <= {*BY_POSITION, "labels"}:
        raise ClearheadError(
            f"batch is a {type(batch).__name__} with {sorted(given)!r:.200}; pass a mapping with input_ids (B, L), or "
            f"inputs_embeds (B, L, E) in their place, and of the others {', '.join(BY_POSITION[2:])} and labels alone. "
            "Packed documents are marked by position_ids that begin again from 0."
        )
    rows = [*getattr(given[first[0]], "shape", ()), "B"][0]
    for name, value in given.items():
        wide, shape = name == "inputs_embeds", tuple(getattr(value, "shape", ()))
        fits = isinstance(value, Tensor) and len(shape) == 2 + wide and shape[1] == layout.length
        if not fits or not (shape[0] == rows or (name == "position_ids" and shape[0] == 1)):
            raise ShapeError(
                f"batch: {name} is {shown(value)}; expected ({rows}, {layout.length}{', E' * wide}): pass a tensor of "
                f"whole sequences, of the layout's {layout.length} positions, or make a layout of the batch's length."
            )
        if value.is_complex() or (value.is_floating_point() and not wide):
            raise ClearheadError(f"batch: {name} has dtype {value.dtype}; expected whole numbers.")
    refuse_distributed(given)
    return given
