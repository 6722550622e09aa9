"""Models of transformers that share their sequences out over ranks: their masks and attention, and hooks around calls.

The hooks check the arguments of each call. Before a call the ranks tell each other whether their arguments are right,
so that a wrong call raises on all ranks. Then they exchange position ids and attention masks, from which each makes
the masks of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.base.errors import ClearheadError, UnsupportedError
from clearhead.base.positions import FAR
from clearhead.base.torch_state.torch_private import remove_hooks
from clearhead.distributed import Layout, attention
from clearhead.distributed.batch import BY_POSITION
from clearhead.distributed.channel import Channel
from clearhead.masks.base import Mask
from clearhead.masks.causal import Causal
from clearhead.masks.documents import Documents
from clearhead.masks.padding import Padding
from clearhead.masks.sliding_window import SlidingWindow
from clearhead.models.interception.keywords import RANKS, READ, check_keywords, dot
from clearhead.models.interception.padding import parameters
from clearhead.models.interception.transformers_private import backend_of
from clearhead.problem.problem import refuse_distributed

SHARED = frozenset({"scaling", "softcap", "s_aux", "dropout", "is_causal", "sliding_window", "position_ids"})
ADVICE = "Pass model(**part.inputs), of part = clearhead.distributed.shard_batch(batch, layout)."


@dataclass
class Running:
    """A call of a model that is under way, with the masks of the whole sequence."""

    model: nn.Module
    layout: Layout
    padding: Mask | None
    documents: Mask | None  # used only with causal masks, where transformers looks for packed documents
    attended: bool = False  # whether some layer has called `attend`


running: ContextVar[Running | None] = ContextVar("running", default=None)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    device: Any = "cpu",
    **kwargs: Any,
) -> Tensor:
    """The function of the mask interface: a tensor without numbers of its own, with the whole mask as an attribute.

    Layers are given this tensor itself, also where a checkpoint computes them again, so nothing else is remembered.
    """
    call = running.get()
    if call is None:
        raise UnsupportedError(
            "a layer ran outside of a call of the model that run_on_clearhead(…, layout=…) was given: call the model."
        )
    held = call.layout.count()
    if (q_length, kv_length, int(q_offset), int(kv_offset)) != (held, held, 0, 0):
        raise UnsupportedError(
            f"{type(call.model).__name__} has attention of {q_length} queries and {kv_length} keys, and this rank "
            f"holds {held} positions of {call.layout}: attention inside one sequence is shared out over ranks; cross "
            "attention, prefixes, and a cache's keys are not."
        )
    masks = list(rules(mask_function))
    if call.documents is not None and any(isinstance(mask, Causal) for mask in masks):
        masks.append(call.documents)
    if call.padding is not None:
        masks.append(call.padding)
    mask = None
    for each in masks:
        mask = each if mask is None else mask & each
    carrier: Any = torch.ones((), dtype=torch.bool, device=device).expand(batch_size, 1, held, held)
    carrier.clearhead_ranks = call.layout, mask
    return carrier  # type: ignore[no-any-return]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function of the attention interface: gives (B, l, H, Ev) of this rank's l positions, and no weights."""
    name = type(module).__name__
    shared: tuple[Layout, Mask | None] | None = getattr(attention_mask, "clearhead_ranks", None)
    if shared is None:
        given = None if attention_mask is None else f"{attention_mask.dtype}, shape {tuple(attention_mask.shape)}"
        raise UnsupportedError(
            f"{name} makes its mask in its own code, {given}, of this rank's positions alone, not by transformers."
        )
    if call := running.get():
        call.attended = True
    check_keywords(name, RANKS, kwargs)
    if more := sorted(word for word, given in kwargs.items() if given is not None and word in READ - SHARED):
        raise UnsupportedError(
            f"{name} gives its attention {', '.join(more)}, of this rank's positions alone, not shared out over ranks."
        )
    score, sinks, (layout, mask) = dot(scaling, kwargs.get("softcap")), kwargs.get("s_aux"), shared
    out = attention(query, key, value, layout=layout, score=score, mask=mask, sinks=sinks, dropout_p=dropout)
    return out.transpose(1, 2).contiguous(), None


HOME = "transformers.masking_utils."


def rules(function: Callable[..., Any]) -> Iterator[Mask]:
    """The masks whose intersection a `mask_function` of transformers is; none, where every pair is allowed.

    These functions take positions, and would be given positions within this rank's part. So they are not called, but
    recognised by their names and by the variables that they close over.
    """
    full = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"
    name = full.removeprefix(HOME) if full.startswith(HOME) else ""
    code = getattr(function, "__code__", None)
    names = code.co_freevars if code is not None else ()
    held = dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
    if name == "causal_mask_function":
        yield Causal()
    elif name == "and_masks.<locals>.and_mask":
        for part in held["mask_functions"]:
            yield from rules(part)
    elif name == "sliding_window_overlay.<locals>.inner_mask":
        yield SlidingWindow(before=held["sliding_window"] - 1, after=FAR)
    elif name == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
        yield SlidingWindow(before=held["sliding_window"], after=held["sliding_window"])
    elif name != "bidirectional_mask_function":
        shown = (name or full).split(".<locals>")[0]
        raise UnsupportedError(
            f"the model's mask has the rule {shown!r}, which is not known for a sequence over ranks."
        )


class Hook:
    """The hooks of a model, and of all models of transformers inside it, which may be called by themselves."""

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
        # Transformers would take the position ids of a part of a sequence for those of packed sequences, for which it
        # does not look where a mask is given. The mask is not read again.
        ids = named["position_ids"]
        if named.get("attention_mask") is None:
            named["attention_mask"] = torch.ones(first(named).shape[:2], dtype=torch.bool, device=ids.device)
        return (), named

    def after(self, module: Any, args: Any, output: Any) -> None:
        call = running.get()
        if call is None or call.model is not module:
            return
        running.set(None)
        if not call.attended and output is not None:  # None while an error is under way
            raise UnsupportedError(
                f"{type(module).__name__} computed no attention on a backend of transformers, and read each part alone."
            )

    def _call(self, module: nn.Module, named: Mapping[str, Any]) -> Running:
        """The call with its masks. Raises an error on every rank where one rank was called wrongly."""
        channel, error, said = Channel(self.layout.group), None, (0, 0, 0)
        try:
            ids, mask = check(type(module).__name__, named, self.layout)
            device, said = ids.device, (*ids.shape[:1], 0 if mask is None else 1 + mask.shape[0], 1)
        except ClearheadError as wrong:
            given = (tensor.device for tensor in named.values() if isinstance(tensor, Tensor))
            error, device = wrong, next(given, torch.device("cpu"))
        every = channel.gather(torch.tensor(said, dtype=torch.int64, device=device)).tolist()
        if error is not None:
            raise error
        _agree(every, type(module).__name__)
        positions = _whole(ids.long(), self.layout, channel)
        words = None if mask is None else _whole((mask != 0).to(torch.uint8), self.layout, channel).bool()
        _check_positions(positions, words, self.layout, module)
        padding = None if words is None or bool(words.all()) else Padding(words)
        breaks, documents = F.pad(positions.diff(dim=1) != 1, (1, 0)), None
        if words is None and bool(breaks.any()):
            documents = Documents(breaks.cumsum(1))
        return Running(module, self.layout, padding, documents)

    def __deepcopy__(self, memo: Any) -> Hook:
        return self  # a copied model shares out its sequences in the same way


def _agree(every: list[list[int]], name: str) -> None:
    """Raise an error unless all ranks were called rightly, and alike.

    `every`: for each rank the rows of its position ids, one more than the rows of its attention mask or 0, and 1 if its
    call was right.
    """
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


CACHE = "a cache of keys is not shared out over ranks; to generate, set the model back by run_on_clearhead(model)"
WHY = {
    "labels": "labels are shifted before a sequence is shared out, and the loss is divided by the number of labels on "
    "all ranks: take part.loss(output.logits), of part = clearhead.distributed.shard_batch(batch, layout)",
    "past_key_values": CACHE,
    "cache": CACHE,  # its name since transformers 5.24
    "use_cache": f"{CACHE}, else pass use_cache=False",
}


def check(model: str, named: Mapping[str, Any], layout: Layout) -> tuple[Tensor, Tensor | None]:
    """This rank's position ids (rows, l), and its attention mask (B, l) or None.

    Raises an error for arguments that cannot be shared out.
    """
    given = {name: value for name, value in named.items() if value is not None and value is not False}
    refuse_distributed({name: value for name, value in given.items() if isinstance(value, Tensor)})
    for name, value in given.items():
        if name in WHY or (isinstance(value, Tensor) and name not in BY_POSITION):
            packed = "; packed documents are marked by position_ids that begin again" if "seq_len" in name else ""
            why = WHY.get(name, f"this argument is not shared out over ranks{packed}")
            raise ClearheadError(f"{model} was called with {name}, and runs on {layout}: {why}.")
    main = first(given)
    if not isinstance(main, Tensor) or "position_ids" not in given:
        raise ClearheadError(
            f"{model} runs on {layout}, and needs input_ids or inputs_embeds, and position_ids. {ADVICE}"
        )
    for name, value in given.items():
        if name not in BY_POSITION:
            continue
        rows = {1, main.shape[0]} if name == "position_ids" else {main.shape[0]}
        right = isinstance(value, Tensor) and value.ndim == 2 + (name == "inputs_embeds")
        if not right or value.shape[0] not in rows or value.shape[1] != layout.count():
            shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ClearheadError(
                f"{name} is {shown}, and rank {layout.rank} holds {layout.count()} of {layout}: pass this rank's part, "
                f"({main.shape[0]}, {layout.count()}). {ADVICE}"
            )
    return given["position_ids"], given.get("attention_mask")


def first(named: Mapping[str, Any]) -> Any:
    """The token ids, or the embeddings that are given in their place."""
    ids = named.get("input_ids")
    return named.get("inputs_embeds") if ids is None else ids


def _whole(part: Tensor, layout: Layout, channel: Channel) -> Tensor:
    """The tensor (n, L) of the whole sequence, from the part (n, l) of each rank, of the same n and dtype.

    Every rank of the group calls it together.
    """
    counts = [layout.count(rank) for rank in range(layout.ranks)]
    every = channel.gather(F.pad(part, (0, max(counts) - part.shape[1])))
    found = part.new_empty(part.shape[0], layout.length)
    for rank, count in enumerate(counts):
        found[:, layout.positions(part.device, rank)] = every[rank, :, :count]
    return found


def _check_positions(positions: Tensor, words: Tensor | None, layout: Layout, model: Any) -> None:
    """Raise an error unless `positions` (rows, L) are position ids of whole sequences, as the model counts them.

    `words` (B, L): False for padding; None where there is none.
    """
    parts = [positions[:, layout.positions(positions.device, rank)] for rank in range(layout.ranks)]
    several = [part for part in parts if part.shape[1] > 1]
    alike = all(bool((p.diff(dim=1) == 1).all()) and torch.equal(p[:, 0], several[0][:, 0]) for p in several)
    if len(several) > 1 and alike:
        raise ClearheadError(
            f"position_ids begin at {int(several[0][0, 0])} on every rank, as if each held a sequence of its own; they "
            "are those of the whole sequence, layout.positions(), here such as "
            f"{layout.positions()[:3].tolist()}… {ADVICE}"
        )
    start = _counts_from(model)
    if bool(((positions < start) & (True if words is None else words)).any()):
        raise ClearheadError(
            f"{type(model).__name__} counts positions from {start}, after its padding's, and position_ids has "
            f"{int(positions.min())}: give shard_batch position_ids of the whole sequences, as the model's embeddings "
            "make them (create_position_ids_from_input_ids)."
        )
    longest = [int(part.max()) + 1 for part in parts]
    for kind, limit in _limits(model):
        beyond = sum(length > limit for length in longest)
        # longrope has two sets of frequencies, and dynamic frequencies follow the length
        if beyond and (kind == "dynamic" or beyond < len(parts)):
            raise ClearheadError(
                f"the rotary frequencies of {type(model).__name__} ({kind}) depend on the longest position, "
                f"in calls of more than {limit}, and the ranks have up to {[n - 1 for n in longest]!r:.80}: they would "
                "compute with different ones. Give it shorter sequences, a layout in which all ranks reach as far "
                "(ZigZag), or other rope_parameters."
            )


def _counts_from(model: Any) -> int:
    """The first position id of a sequence: one past the padding's number in models that count so; 0 in others."""
    for part in model.modules():
        if hasattr(part, "create_position_ids_from_inputs_embeds") and getattr(part, "padding_idx", None) is not None:
            return int(part.padding_idx) + 1
    return 0


def _limits(model: Any) -> Iterator[tuple[str, int]]:
    """The kinds of rotary frequencies that depend on the longest position beyond some length, with this length."""
    for part in model.modules():
        kinds = getattr(part, "rope_type", None)
        for layers, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind in ("dynamic", "longrope"):
                given = part.config.rope_parameters
                given = given if layers is None else given[layers]
                yield kind, given.get("original_max_position_embeddings") or part.config.max_position_embeddings
