"""The positions of a call that are padding, by the attention mask that the model was given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.base.arrays import to_tensor
from clearhead.base.errors import ClearheadError
from clearhead.base.shapes import Sizes, part
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.tensor_kind import has_no_values
from clearhead.problem.fills import taken_apart
from clearhead.problem.problem import Problem
from clearhead.problem.words import Words


def parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters of `module.forward`, but for `self`."""
    method: Any = getattr(forward, "__func__", None)
    of_class = method is not None and getattr(type(forward.__self__), "forward", None) is method  # type: ignore[attr-defined]
    if of_class:
        return _of_class(inspect.unwrap(method))[1:]  # a wrapper of a watch would be kept alive, with its model
    return _names(forward)  # it was set on one module, which a cache would keep alive


def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # TorchScript's forward has no signature
        return ()


_of_class = lru_cache(maxsize=1024)(_names)


EVERY = (slice(None),) * 4
ROWS = 256  # of a mask that are looked at together


class Told(NamedTuple):
    """The words of a module's own sequence, and of the sequence that its cross attention reads: (B, L), bool."""

    own: Tensor | None = None
    source: Tensor | None = None
    mask: Tensor | None = None  # the tensor from which `own` was read: a model may pass it to every layer


def given(forward: Callable[..., Any], named: Mapping[str, Any], outer: Told) -> Told:
    """The padding that a module's inputs show, by their names; else the padding of the module around it (`outer`)."""
    mask, encoders = named.get("attention_mask"), named.get("encoder_attention_mask")
    if mask is None and encoders is None:
        return outer
    own, source, read = outer
    of_encoder = "decoder_input_ids" in named or "decoder_input_ids" in parameters(forward)  # the attention_mask
    if _is_mask(mask) and (of_encoder or mask is not read):
        if of_encoder:
            source, own, read = _words(mask), None, None
            if _is_mask(decoders := named.get("decoder_attention_mask")):
                own, read = _words(decoders), decoders
        else:
            own, read = _words(mask), mask
    if _is_mask(encoders):
        source = _words(encoders)
    return Told(own, source, read)


def given_to_torch(named: Mapping[str, Any], kind: str, outer: Told) -> Told:
    """The padding that the inputs of a module of torch.nn show, an encoder, a decoder, a layer of them or attention.

    Their masks are True, or −∞, for padding. In self attention a key that is padding is a query of padding too.
    """
    own, source, read = outer
    of_keys = named.get("key_padding_mask")
    masks = of_keys if kind == "self" else None, named.get("src_key_padding_mask"), named.get("tgt_key_padding_mask")
    mask = next((mask for mask in masks if mask is not None), None)
    if mask is not None and mask is not read:
        own, read = _words_of_torch(mask), mask
    mask = named.get("memory_key_padding_mask") if of_keys is None else of_keys
    return Told(own, source if mask is None else _words_of_torch(mask), read)


def _words_of_torch(mask: Any) -> Tensor | None:
    """A mask (B, L), or (L,) of one sequence, as words; None without padding, and for a mask that adds numbers."""
    mask = mask[None] if isinstance(mask, Tensor) and mask.ndim == 1 else mask
    if not _is_mask(mask):
        return None
    words = mask.detach() == 0
    if bool(words.all()) or not bool((words | (mask == (1 if mask.dtype == torch.bool else -torch.inf))).all()):
        return None
    return words


def _is_mask(mask: Any) -> TypeGuard[Tensor]:
    return isinstance(mask, Tensor) and mask.ndim == 2 and not mask.is_meta and not get_mode().transforms


def _words(mask: Tensor) -> Tensor | None:
    """A tokenizer's mask as bool, where every number but 0 is a word. None without padding, and for additive masks."""
    words = mask.detach() != 0
    if bool(words.all()) or bool((mask < 0).any()):
        return None
    return words if bool(words.any()) or not mask.is_floating_point() else None  # a mask of zeros alone is additive


def checked(padding: Any) -> Tensor:
    """The argument `padding` of `watch`, as bool. Raises for an argument that is no mask."""
    mask = to_tensor(padding, "padding")
    readable = mask.layout == torch.strided and not has_no_values(mask) and not mask.is_complex()
    if not readable or mask.ndim != 2 or not bool((mask.double() >= 0).all()):
        raise ClearheadError(
            f"padding has dtype {mask.dtype}, shape {tuple(mask.shape)}; expected a tokenizer's attention mask, "
            "(B, L), 1 or more for a word and 0 for padding."
        )
    return mask != 0


def of_call(
    told: Told, kind: str, problem: Problem, uniform: Tensor | None, filled: int, infers: bool = True
) -> Words | None:
    """The padding of one call, by the mask given to the model if it fits the call, else by the call's own mask.

    Cross attention without a mask sees the padding of its source. `uniform`: see `AttentionCall`. `filled`: how many
    keys are in use; behind them stand the empty slots of a static cache. `infers`: whether the call's own mask counts.
    """
    sizes = problem.sizes
    batch, _, queries, keys = sizes.shape
    if kind == "cross":
        sides = (told.own, queries), (told.source, keys)
        own, source = (None if t is None or t.shape != (batch, length) else t for t, length in sides)
        return _real(own, _unhidden(problem, uniform, kind, keys) if source is None and infers else source, sizes)
    if (problem.visible, problem.bias, uniform) == (None, None, None):
        return None  # a sequence of the same length, such as the patches of an image
    found = _of_sequence(told.own, problem, uniform)
    if infers and found is None and queries == filled:  # a few queries may not see a key of a cache for other reasons
        words = _unhidden(problem, uniform, kind, filled)
        if words is not None and not bool(words.all()):
            found = _real(words, F.pad(words, (0, keys - filled)), sizes)
    return found


def _of_sequence(own: Tensor | None, problem: Problem, uniform: Tensor | None) -> Words | None:
    """The padding of self attention by the words of the model's sequence; None where they do not fit the call.

    Self attention of a padded text has a mask itself. With a cache the queries are the last words. Keys beyond the mask
    are slots of a static cache.
    """
    sizes = problem.sizes
    batch, _, queries, keys = sizes.shape
    if own is None or own.shape[0] != batch or not queries <= own.shape[1] or own.shape[1] > keys == queries:
        return None
    if bool((own != own[:1]).any()) and _alike(problem, uniform):
        return None  # `own` is one mask (L, L) for all sequences, where B = L
    length = own.shape[1]
    of_keys = own[:, length - keys :] if length >= keys else F.pad(own, (0, keys - length))
    real = _real(own[:, length - queries :], of_keys, sizes)
    return real if length == keys or (real is not None and _hidden(real, problem, uniform)) else None


def same_words(one: Words | None, other: Words | None) -> bool:
    """Whether the padding of two calls is the same."""
    if one is None or other is None:
        return one is other
    sides = zip(one, other, strict=True)
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in sides)


def fits(padding: Tensor, kind: str, sizes: Sizes) -> bool:
    """Whether the `padding` passed to `watch` fits this call's keys in shape."""
    batch, _, queries, keys = sizes.shape
    length = padding.shape[1]
    with_cache = kind == "self" and queries < keys
    return padding.shape[0] == batch and (length == keys or (with_cache and length < keys))


def as_said(padding: Tensor, kind: str, sizes: Sizes, filled: int) -> Words | None:
    """The padding of one call, by the argument of `watch`. Later keys of a cache are words, `filled` are in use."""
    if kind == "cross":
        return _real(None, padding, sizes)
    filled = max(filled, padding.shape[1])
    words = F.pad(F.pad(padding, (0, filled - padding.shape[1]), value=True), (0, sizes.keys - filled))
    return _real(words[:, filled - sizes.queries : filled], words, sizes)


def _real(queries: Tensor | None, keys: Tensor | None, sizes: Sizes) -> Words | None:
    """The words as `Words`; None where there is no padding."""
    sides = (None if t is None or bool(t.all()) else t.to(sizes.device, copy=True) for t in (queries, keys))
    real = Words(*sides)
    return real if real != (None, None) else None


@torch.no_grad()
def _unhidden(problem: Problem, uniform: Tensor | None, kind: str, keys: int) -> Tensor | None:
    """Which of the first `keys` keys some query sees, bool (B, keys), where the mask hides the others as padding.
    None where it hides none as padding.

    Apart from hidden keys, every query sees all keys of its source (cross attention), or one run of neighbours. So a
    choice of keys for each query hides no padding. Where no query sees its own position, a mask is read as a shift.
    """
    problem, blind = taken_apart(problem)  # numbers such as −10000 that are added to scores hide keys as −∞ does
    if blind is not None:
        uniform = blind[..., None] if uniform is None else uniform | blind[..., None]
    visible = problem.visible
    batch, _, queries, every = problem.sizes.shape
    if visible is None or (uniform is None and visible.unseen == "none") or not queries or not keys:
        return None

    def rows() -> Iterator[tuple[int, Tensor]]:
        """The pairs that some head sees, (B, rows, keys), of a few rows at a time."""
        for top in range(0, queries, ROWS):
            some = slice(top, min(top + ROWS, queries))
            keep = visible.spans.keep(*EVERY[:2], some, EVERY[3], every)[..., :keys]
            if uniform is not None:
                keep = keep & ~part(uniform, *EVERY[:2], some)
            yield top, keep.any(1).expand(batch, some.stop - top, keys)

    words = torch.stack([keep.any(1) for _, keep in rows()]).any(0)
    before = F.pad(words.cumsum(-1), (1, 0))  # words before each place
    shift = kind == "self"
    for top, keep in rows():
        first, stop = keep.int().argmax(-1), keys - keep.flip(-1).int().argmax(-1)
        if kind == "cross":
            first, stop = torch.zeros_like(first), torch.full_like(stop, keys)
        count = keep.sum(-1)
        if not bool(((count == before.gather(-1, stop) - before.gather(-1, first)) | (count == 0)).all()):
            return None
        shift = shift and not bool(keep.diagonal(top, 1, 2).any())
    return None if shift else words


def _alike(problem: Problem, uniform: Tensor | None) -> bool:
    """Whether the call's mask is the same for every sequence: then it holds no padding that differs between them."""
    shown: tuple[Tensor | None, ...] = (*problem.added, uniform)
    if problem.spans is not None:
        spans = problem.spans
        rest = None if spans.residual is None else spans.rest(*EVERY)
        shown = (*spans.edges(), rest)
    return all(t is None or bool((t == t[:1]).all()) for t in shown)


@torch.no_grad()
def _hidden(real: Words, problem: Problem, uniform: Tensor | None) -> bool:
    """Whether no word sees a key of padding. If a word does, the mask given to the model is of another sequence."""
    spans, sizes = problem.spans, problem.sizes
    if real.keys is None:
        return False
    if spans is None:
        seen = (~real.keys).any(-1)[:, None, None].expand(-1, -1, sizes.queries)
    elif not spans.plain:
        seen = (spans.keep(*EVERY, sizes.keys) & ~real.keys[:, None, None]).any(-1)
    else:
        before = F.pad((~real.keys).cumsum(-1), (1, 0))[:, None]  # padding keys before each place
        start, stop = (edge.expand(sizes.batch, -1, sizes.queries) for edge in (spans.start, spans.stop))
        before = before.expand(-1, start.shape[1], -1)
        seen = (before.gather(-1, stop) - before.gather(-1, start) > 0) & (stop > start)
    if real.queries is not None:
        seen = seen & real.queries[:, None]
    return not bool((seen if uniform is None else seen & ~uniform[..., 0]).any())
