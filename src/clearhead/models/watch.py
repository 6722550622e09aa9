"""watch() and statistics(): record or reduce every attention call of a model, which keeps its own fast backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import nn

from clearhead.base.arrays import Array
from clearhead.base.managers import Managed
from clearhead.inspection.reductions.base import Reduction
from clearhead.models.interception.choice import Heads, Layers
from clearhead.models.interception.padding import checked
from clearhead.models.interception.refused import validate_model
from clearhead.models.recorder.asked import Asked, asked, asked_to_reduce
from clearhead.models.recorder.recorder import Recorder
from clearhead.models.recorder.runs import recorded
from clearhead.models.recording import Recording
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.models.recordings.reduced import Means, Statistics

T = TypeVar("T")


def watch(
    model: nn.Module,
    padding: Array | None = None,
    *,
    every: int = 1,
    layers: Layers = None,
    values: bool = False,
    gradients: bool = False,
) -> AbstractContextManager[Recording]:
    """Record every attention call that the model makes inside the `with`, its outputs bit-identical.

    >>> import torch, torch.nn.functional as F, clearhead as ch
    >>> class Block(torch.nn.Module):
    ...     def forward(self, x):
    ...         return F.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> block = Block()
    >>> with ch.watch(block) as recording:
    ...     output = block(torch.rand(1, 4, 10, 8))
    >>> recording.calls
    [AttentionCall('Block', self, query (1, 4, 10, 8), key (1, 4, 10, 8), Causal(), sdpa)]
    >>> recording.calls[0].weights[0, 2, 7].shape
    torch.Size([10])

    `model`: any nn.Module. These calls are recognised, in every thread that runs the model or a module of it: those of
    transformers' models, on every backend; of `torch.nn.MultiheadAttention` and the Transformer layers of `torch.nn`,
    which keep their fast path; of `torch.nn.functional.scaled_dot_product_attention`, also where another function was
    put in its place; of `flex_attention` in eager code, whose `mask_mod` is then the mask and whose `score_mod` a
    change of the score; and of `clearhead.attention`, with any score. Gives a `Recording`: `recording.calls`, and by
    module `recording[name]`. Each `AttentionCall` keeps copies of query and key, and shares the mask with the calls
    that were given the same mask; its `weights` are the weights before dropout. `clearhead.models.statistics` keeps
    statistics alone, without copies.
    `padding`: which positions are words and not padding, a tokenizer's attention mask (B, L), 0 for padding. None takes
    it from the `attention_mask` of that shape that the model is called with, from the `key_padding_mask` of modules of
    `torch.nn`, and from the keys that a call's own mask hides from every query. Statistics and reports leave padding
    out, and `call.padding` says which positions were left out.
    `every`: 3 records the first of every three runs of the model; a run is a call from outside in which attention is
    computed, or a step of a model that generates inside the `forward` of another. `layers`: which layers, by their
    numbers in the model (-1 is the last), by name ("decoder 0, cross"), or by a module's name or a pattern of it
    ("layers.3.*"): one of these, a slice of numbers, or a list. A module that is called several times in a run is as
    many layers, numbered in the order of the calls.
    `values`: keep each call's value and output too, for `call.output`, `call.weighted_value_norms` and
    `call.weighted_transformed_norms`; and hold on to the inputs of the layers around the call, so that `call.explain`
    can begin at them.
    `gradients`: also keep the gradients that backward passes give the outputs, for `call.gradients`.
    Compiled functions inside the model pause at each attention call, whose record is made in eager code: operations
    that the compiler had fused across the call may change in their last digits.
    Raises a `ClearheadError` at the end of the `with` if no call was recognised, and where `padding` fits no call.
    Raises an `UnsupportedError` for a compiled model: watch the model that was compiled. A call that cannot be recorded
    does not end the run, and is left out: one inside a transform of `torch.func`, of nested tensors, or of a backend
    with a keyword that may change the weights and cannot be read. At the end a warning names the layers, and
    `recording[name]` raises an `UnsupportedError` with the reason. A function of your own that transformers calls
    without a mask is read as causal; with a sliding window or packed positions its calls are left out.
    Where a layer's function belongs neither to PyTorch nor to transformers, the output of its first call without
    dropout is compared with the recorded weights times the values, and a warning names the layer where they differ.
    Warns of calls of `F.scaled_dot_product_attention` in threads that run no module. Without `layers`, warns of modules
    whose attention is not recorded: modules that call a kernel of PyTorch's themselves, and modules with "attention",
    "attn", "multihead" or "mha" in their name or their class's name that compute a softmax in their own code. A softmax
    that a module computes by hand, as exp() divided by its sum, goes unnoticed.
    Compiled code shows none of these: a compiled `flex_attention` is missing from the record without a warning.
    Cost: for each call a copy of query and key, in O(Lq + Lk) memory, and a copy of the mask's tensor, once, where its
    rows are not intervals. `torch.nn` projects queries and keys inside: a record projects them once more.
    """
    wanted = asked(every, layers, values, gradients)
    return _recorded("watch", model, wanted, padding, lambda recorder: Recording(recorder.calls, recorder.missing))


def watch_own(
    model: nn.Module,
    padding: Array | None = None,
    values: bool = False,
    judge: Callable[[AttentionCall], None] | None = None,
) -> AbstractContextManager[Recording]:
    """`watch`, of the calls of this thread alone: for functions that run the model themselves.

    `judge`: called with each call when it has ended; the call is not kept.
    """
    wanted = asked(values=values)._replace(own=True, judge=judge)
    return _recorded("watch", model, wanted, padding, lambda recorder: Recording(recorder.calls, recorder.missing))


def statistics(
    model: nn.Module,
    reductions: Sequence[Reduction[object]] | Reduction[object],
    padding: Array | None = None,
    *,
    every: int = 1,
    layers: Layers = None,
    heads: Heads = None,
    merge: Means | None = None,
    fuse: bool = False,
) -> AbstractContextManager[Statistics]:
    """Reduce every attention call that the model makes inside the `with`, its outputs bit-identical.

    >>> import torch, clearhead as ch
    >>> block, x = ch.nn.DotProductAttention(), torch.rand(1, 4, 10, 8)
    >>> with ch.models.statistics(block, [ch.reductions.Entropy(), ch.reductions.TopK(5)]) as seen:
    ...     output = block(x, x, x, mask=ch.Causal())
    >>> entropy, (largest, keys) = seen.calls[0].results
    >>> entropy.shape, largest.shape
    (torch.Size([1, 4, 10]), torch.Size([1, 4, 10, 5]))

    `reductions`: those of `clearhead.reductions`, or of your own. Each call is reduced when it happens, and query and
    key are not kept: `calls[i].results` is a tuple in the order of `reductions`, also of one, in O(Lq + Lk) memory.
    `model`, `padding`, `every`, `layers`: as for `clearhead.watch`, which keeps the calls themselves. `heads`: which
    heads are reduced, a number, a slice or a list of numbers. `merge`: a `Means`, to which each call is added instead
    of being listed.
    `fuse`: take each call's output from the pass of its statistics and not from the backend. The output is within 1e-5
    of the backend's, and the run is faster on long sequences. This is done for calls on "sdpa" and "clearhead" without
    padding, dropout, gradients and autocast, where nothing else (an edit, a watch) looks at the model; the backend
    computes all others.
    Gives `Statistics`. Raises the errors of `watch`, and a `ClearheadError` for an argument that is no reduction.
    Cost: a pass over each call's weights, for all of its reductions.
    """
    wanted = asked_to_reduce(reductions, every, layers, heads, merge, fuse)
    return _recorded(
        "models.statistics", model, wanted, padding, lambda recorder: Statistics(recorder.reduced, recorder.missing)
    )


def _recorded(
    what: str, model: nn.Module, wanted: Asked, padding: Any, given: Callable[[Recorder], T]
) -> AbstractContextManager[T]:
    """The context manager that gives `given(recorder)`. `what`: the function that was called."""
    validate_model(model, what)
    words = None if padding is None else checked(padding)
    return Managed(f"{what}(...)", lambda: recorded(Recorder(model, wanted, words), given))
