"""Before and after each call of a model that shares its sequences out over ranks: what it is given, and what it means.

Before a call the ranks tell each other whether theirs is right, so that one that is wrong raises on all; and then their
position ids and attention masks, from which each makes the mask of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.errors import ClearheadError, UnsupportedError
from clearhead.base.torch_private import remove_hooks
from clearhead.distributed.batch import BY_POSITION
from clearhead.distributed.channel import Channel
from clearhead.distributed.layout import Layout
from clearhead.distributed.whole import whole
from clearhead.masks.documents import Documents
from clearhead.masks.padding import Padding
from clearhead.models.ranks.backend import Running, running
from clearhead.models.ranks.positions import check as check_positions
from clearhead.models.tap.keywords import RANKS
from clearhead.models.tap.padding import parameters
from clearhead.models.tap.transformers_private import backend_of
from clearhead.problem.problem import refuse_distributed

ADVICE = "Pass model(**part.inputs), of part = clearhead.distributed.shard_batch(batch, layout)."


class Hook:
    """The hooks of one model and all models of transformers inside it, which may be called by themselves."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def attach(self, parts: list[Any]) -> None:
        for part in parts:
            part.register_forward_pre_hook(self.before, with_kwargs=True)
            part.register_forward_hook(self.after, always_call=True)

    def before(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]] | None:
        if backend_of(module.config) != RANKS:
            remove([module])
            return None
        call = running.get()
        if call is not None and call.model is not module:  # a part of the model that runs
            return None
        named = {**dict(zip(parameters(module.forward), args, strict=False)), **kwargs}
        running.set(self._call(module, named))
        if getattr(module.config, "use_cache", False):
            named["use_cache"] = False
        # Of a part of a sequence transformers would take the position ids for those of several: a mask, which is not
        # read again, keeps it from looking.
        ids = named["position_ids"]
        if named.get("attention_mask") is None:
            named["attention_mask"] = torch.ones(first(named).shape[:2], dtype=torch.bool, device=ids.device)
        return (), named

    def after(self, module: Any, args: Any, output: Any) -> None:
        call = running.get()
        if call is None or call.model is not module:
            return
        running.set(None)
        if not call.attended and output is not None:  # None: an error is under way
            raise UnsupportedError(
                f"{type(module).__name__} has computed no attention that transformers lets a backend compute, so each "
                "rank's part was read by itself: run it with run_on_clearhead(model), whole sequences on each rank."
            )

    def _call(self, module: nn.Module, named: Mapping[str, Any]) -> Running:
        """What the masks are made of; raises on every rank where one of them was called wrongly."""
        channel, error, said = Channel(self.layout.group), None, (0, 0, 0)
        try:
            ids, mask = check(type(module).__name__, named, self.layout, ADVICE)
            device, said = ids.device, (*ids.shape[:1], 0 if mask is None else 1 + mask.shape[0], 1)
        except ClearheadError as wrong:
            given = (tensor.device for tensor in named.values() if isinstance(tensor, Tensor))
            error, device = wrong, next(given, torch.device("cpu"))
        every = channel.gather(torch.tensor(said, dtype=torch.int64, device=device)).tolist()
        if error is not None:
            raise error
        _agree(every, type(module).__name__)
        positions = whole(ids.long(), self.layout, channel)
        words = None if mask is None else whole((mask != 0).to(torch.uint8), self.layout, channel).bool()
        check_positions(positions, words, self.layout, module, ADVICE)
        padding = None if words is None or bool(words.all()) else Padding(words)
        breaks = positions.diff(dim=1) != 1
        if words is not None or not bool(breaks.any()):
            return Running(module, self.layout, padding, None)
        starts = torch.cat([torch.zeros_like(breaks[:, :1]), breaks], 1)
        return Running(module, self.layout, None, Documents(starts.cumsum(1)))

    def __deepcopy__(self, memo: Any) -> Hook:
        return self  # a value: a copied model shares its sequences out as this one does

    def __reduce__(self) -> Any:
        raise ClearheadError(
            "a model with a layout cannot be pickled, since its layout holds a process group: save its state_dict(), "
            "or call clearhead.models.run_on_clearhead(model) first."
        )


def _agree(every: list[list[int]], name: str) -> None:
    """`every`: of each rank the rows of its position ids and of its attention mask, and 1 if its call was right."""
    if not all(right for _, _, right in every):
        which = ", ".join(str(rank) for rank, (_, _, right) in enumerate(every) if not right)
        raise ClearheadError(f"rank {which} of the group has called {name} wrongly, and its own error says how.")
    for at, what in enumerate(("position_ids", "attention_mask")):
        rows = [each[at] for each in every]
        if len(set(rows)) > 1:
            shown = ["none" if at and not n else f"{n - at} rows" for n in rows]
            raise ClearheadError(f"the ranks give {name} unlike {what}: {', '.join(shown)}. {ADVICE}")


def remove(parts: list[Any]) -> None:
    """Take the hooks away."""
    for part in parts:
        remove_hooks(part, lambda hook: isinstance(getattr(hook, "__self__", None), Hook))


WHY = {
    "labels": "labels are shifted before a sequence is shared out, and the loss is divided by the number of labels on "
    "all ranks: take part.loss(output.logits), of part = clearhead.distributed.shard_batch(batch, layout)",
    "past_key_values": "a cache of keys is not shared out over ranks, and so neither is generate()",
}


def check(model: str, named: Mapping[str, Any], layout: Layout, advice: str) -> tuple[Tensor, Tensor | None]:
    """This rank's position ids (rows, l) and attention mask (B, l) or None; raises for what cannot be shared out."""
    given = {name: value for name, value in named.items() if value is not None}
    refuse_distributed({name: value for name, value in given.items() if isinstance(value, Tensor)})
    if given.get("use_cache"):
        raise ClearheadError(
            f"{model} was called with use_cache=True, and runs on {layout}: {WHY['past_key_values']}. Call it with "
            "use_cache=False, or generate with a model set back by run_on_clearhead(model)."
        )
    for name, value in given.items():
        if name in WHY or (isinstance(value, Tensor) and name not in BY_POSITION):
            packed = "; packed documents are told by position_ids that begin again" if "seq_len" in name else ""
            why = WHY.get(name, f"that is not shared out over ranks{packed}")
            raise ClearheadError(f"{model} was called with {name}, and runs on {layout}: {why}.")
    main = first(given)
    if not isinstance(main, Tensor):
        raise ClearheadError(f"{model} runs on {layout}, and was called without input_ids or inputs_embeds. {advice}")
    if "position_ids" not in given:
        raise ClearheadError(
            f"{model} runs on {layout}, and was called without position_ids: it would count each rank's positions from "
            f"0. {advice}"
        )
    for name in BY_POSITION:
        if name not in given:
            continue
        value = given[name]
        rows = {1, main.shape[0]} if name == "position_ids" else {main.shape[0]}
        right = isinstance(value, Tensor) and value.ndim == 2 + (name == "inputs_embeds")
        if not right or value.shape[0] not in rows or value.shape[1] != layout.count():
            shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ClearheadError(
                f"{name} is {shown}, and rank {layout.rank} holds {layout.count()} of {layout}: pass this rank's part, "
                f"({main.shape[0]}, {layout.count()}). {advice}"
            )
    return given["position_ids"], given.get("attention_mask")


def first(named: Mapping[str, Any]) -> Any:
    """The token ids, or what stands in their place."""
    ids = named.get("input_ids")
    return named.get("inputs_embeds") if ids is None else ids
