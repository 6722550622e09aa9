"""Runs of a model under a recorder, and what is said at their end."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.managers import Uninterrupted
from clearhead.models.interception.choice import check_layers
from clearhead.models.interception.intercept import intercept
from clearhead.models.origins.ran import Origin
from clearhead.models.recorder import missed
from clearhead.models.recorder.asked import asked
from clearhead.models.recorder.recorder import Recorder
from clearhead.models.recordings.attention_call import AttentionCall

Given = TypeVar("Given")


def each_call(
    model: nn.Module, do: Callable[[AttentionCall], None], padding: Tensor, values: bool
) -> AbstractContextManager[Any]:
    """Call `do` with every attention call of this thread when it happens, before its tensors can be written to. Nothing
    is kept.

    `values`: whether a call has its value.
    """
    recorder = Recorder(model, asked(values=values)._replace(each=do, own=True), padding)
    return Uninterrupted(lambda: recorded(recorder, lambda recorder: None))


def writers_of(model: nn.Module, run: Callable[[], object]) -> dict[str, Origin]:
    """The layer that writes the heads of each module, found in one run, as calls of the module have it."""
    recorder = Recorder(model, asked(values=True)._replace(own=True))
    with Uninterrupted(lambda: recorded(recorder, lambda recorder: recorder.calls)) as calls:
        run()
    found = ((call.name, call.origin.writer) for call in calls if call.origin is not None)
    return {name: Origin([], 0, [writer]) for name, writer in found if writer is not None and writer.can_be_read()}


@contextmanager
def recorded(recorder: Recorder, given: Callable[[Recorder], Given]) -> Iterator[Given]:
    """The recorder receives the model's calls inside the `with`, which gives `given(recorder)`; raises where it saw
    none, and warns of those that it missed."""
    with intercept(recorder), recorder.caches.noting_crops():
        yield given(recorder)
    others = [name for name in recorder.left if name not in recorder.modules]
    elsewhere = [missed.left(others)] if others else []
    if recorder.unattributed:
        elsewhere.append(missed.lost(len(recorder.unattributed)))
    if recorder.undecided:
        raise ClearheadError(recorder.undecided)
    if not recorder.modules:
        raise ClearheadError(missed.nothing_seen(recorder.stack.model, elsewhere))
    check_layers(recorder.asked.layers, recorder.sites, recorder.asked.who)
    elsewhere += missed.describe_deviations(recorder.deviations, "record")
    if recorder.missing:
        elsewhere.append(missed.left_out(recorder.missing, "in the record"))
    if recorder.sizes and recorder.padding is not None and not recorder.fitted and recorder.asked.layers is None:
        raise ShapeError(
            f"watch: padding has shape {tuple(recorder.padding.shape)}, and the calls have (batch, keys) "
            f"{', '.join(map(str, sorted(recorder.sizes)[:6]))}. Pass the attention mask of the model's batch, (B, L)."
        )
    for said in elsewhere:
        warnings.warn(said, stacklevel=4)  # points at the caller's `with` statement
    if recorder.unread and recorder.asked.layers is None:
        warnings.warn(recorder.told_of_unread("in the record", "watch(model, layers=…)"), stacklevel=4)
