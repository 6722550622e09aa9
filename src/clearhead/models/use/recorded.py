"""A recorder at work inside a `with`, and its errors and warnings at the end for calls that it could not record."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from torch import nn

from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.text import listed
from clearhead.models.attention_call import AttentionCall
from clearhead.models.tap.choice import check_layers
from clearhead.models.tap.padding import checked
from clearhead.models.tap.refused import refuse_compiled
from clearhead.models.tap.tap import given_calls
from clearhead.models.tap.transformers_private import named_backend
from clearhead.models.use.asked import asked
from clearhead.models.use.recorder import Recorder

Given = TypeVar("Given")


def each_call(model: nn.Module, do: Callable[[AttentionCall], None], padding: Any) -> AbstractContextManager[Any]:
    """Call `each` with every attention call when it happens, before its tensors can be written to. Nothing is kept."""
    refuse_compiled(model)
    return recorded(Recorder(model, asked()._replace(each=do), checked(padding)), lambda recorder: None)


@contextmanager
def recorded(recorder: Recorder, given: Callable[[Recorder], Given]) -> Iterator[Given]:
    """The recorder receives the model's calls inside the `with`, which gives `given(recorder)`; raises where it saw
    none, and warns of those that it missed."""
    with given_calls(recorder):
        yield given(recorder)
    lost = len(recorder.unattributed)
    if not recorder.seen and not recorder.modules:
        raise ClearheadError(_nothing_seen(recorder.stack.model, lost))
    check_layers(recorder.asked.layers, recorder.sites, recorder.asked.who)
    if not recorder.seen:
        raise ClearheadError(
            f"no call could be recorded: an error came between. Calls were made by {listed(recorder.modules)}."
        )
    if recorder.padding is not None and not recorder.fitted and recorder.asked.layers is None:
        raise ShapeError(_fits_none(recorder))
    if lost:
        warnings.warn(_lost(lost), stacklevel=4)  # points at the caller's `with` statement
    if recorder.unread and recorder.asked.layers is None:
        warnings.warn(recorder.told_of_unread("in the record", "watch(model, layers=…)"), stacklevel=4)


def _fits_none(recorder: Recorder) -> str:
    assert recorder.padding is not None
    sizes = sorted(recorder.sizes)
    return (
        f"watch: padding has shape {tuple(recorder.padding.shape)}, and the calls have (batch, keys) "
        f"{', '.join(map(str, sizes[:6]))}. Pass the attention mask of the batch that the model was given, (B, L)."
    )


def _lost(calls: int) -> str:
    return (
        f"{calls} calls of scaled_dot_product_attention are not in the record: they were made while the model ran, in "
        "threads that ran no module, so which module they belong to is unknown. If the model's forward hands its "
        "attention to a pool of threads, call a module of the model there, or run it in one thread; if they were not "
        "the model's, nothing is missing."
    )


def _nothing_seen(model: nn.Module, lost: int) -> str:
    backend = named_backend(getattr(model, "config", None))
    lines = [f"the model {type(model).__name__} made no attention call that clearhead recognises."]
    if backend is not None:
        lines.append(f"Its attention backend is {backend!r}.")
    if backend == "eager":
        lines.append("Some models make such calls on another one: load it with attn_implementation='sdpa', if it can.")
    if lost:
        lines.append(_lost(lost))
    lines.append(
        "Run the model itself inside the `with`, and not what torch.compile() made of it. "
        "Recognised are models of transformers that use its attention interface, torch.nn.MultiheadAttention and "
        "torch.nn's Transformer layers, and direct calls of torch.nn.functional.scaled_dot_product_attention; a model "
        "that computes attention in its own code (DeBERTa, Bloom, GPT-J), or in TorchScript, can be recorded once that "
        "code calls one of these."
    )
    return "\n".join(lines)
