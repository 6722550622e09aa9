"""watch(): record every attention call of a model, its own fast backend left in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, overload

from torch import nn

from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.managers import Managed
from clearhead.inspection.reductions.base import Reduction
from clearhead.models.call import AttentionCall
from clearhead.models.calls import listed
from clearhead.models.recording import Recording
from clearhead.models.statistics import Statistics
from clearhead.models.tap.choice import Heads, Layers, check_layers
from clearhead.models.tap.padding import checked
from clearhead.models.tap.refused import refuse_compiled
from clearhead.models.tap.tap import given_calls
from clearhead.models.use.asked import asked
from clearhead.models.use.means import Means
from clearhead.models.use.recorder import Recorder


@overload
def watch(
    model: nn.Module,
    padding: Any = None,
    *,
    every: int = 1,
    layers: Layers = None,
    values: bool = False,
    gradients: bool = False,
) -> AbstractContextManager[Recording]: ...


@overload
def watch(
    model: nn.Module,
    padding: Any = None,
    *,
    keep: Sequence[Reduction] | Reduction,
    every: int = 1,
    layers: Layers = None,
    heads: Heads = None,
    merge: Means | None = None,
    fuse: bool = False,
) -> AbstractContextManager[Statistics]: ...


def watch(
    model: nn.Module,
    padding: Any = None,
    *,
    keep: Any = None,
    every: int = 1,
    layers: Layers = None,
    heads: Heads = None,
    merge: Means | None = None,
    values: bool = False,
    gradients: bool = False,
    fuse: bool = False,
) -> AbstractContextManager[Any]:
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

    `model`: any nn.Module. Recognised are the models of transformers, on whatever backend they run;
    `torch.nn.MultiheadAttention` and the Transformer layers of `torch.nn`, their fast path left in place; direct calls
    of `torch.nn.functional.scaled_dot_product_attention`; and `clearhead.attention`, with any score; in every thread
    that runs the model, or a module of it. Gives a `Recording`: `recording.calls`, and by module `recording[name]`.
    Each `AttentionCall` keeps copies of query and key, and shares the mask with the calls that were given the same
    one; its `weights` are those before dropout.
    `padding`: which positions are words and not padding, a tokenizer's attention mask (B, L), 1 for a word. None takes
    it from the `attention_mask` of that shape that the model is called with. Statistics and reports leave padding out,
    and `call.padding` says what was left out.
    `keep`: reductions, such as `[ch.Entropy(), ch.TopK(5)]`. Each call is reduced when it happens, query and key are
    not kept, and what is given are `Statistics`: `calls[i].results`, in the order of `keep`; O(Lq + Lk) memory a call.
    `every`: of how many runs of the model one is recorded, the first of them; a run is a call from outside in which
    attention is computed. `layers`: which modules, by name, by pattern ("layers.3.*") or by number, in the order in
    which they first call attention. `heads`: which heads are reduced, a number, a slice or some numbers. `merge`: a
    `Means`, to which each call is added instead of being listed.
    `values`: keep each call's value and output too, for `call.output`, `call.value_norms` and `call.weighted_norms`;
    and hold on to the inputs of the layers around it, so that `call.explain` can begin at them.
    `fuse`: take each call's output from the pass of its statistics, in place of the backend's: within 1e-5 of it, and
    faster on long sequences. Of calls on "sdpa" and "clearhead" without padding, dropout, gradients and autocast, where
    nothing else (an edit, another watch) looks at the model; all others are computed as without it.
    `gradients`: also the gradients of the outputs that backward passes give, for `call.gradients`.
    Compiled functions inside the model pause at each attention call, whose record is made in eager
    code: operations that the compiler had fused across the call may change in their last digits.
    Raises a `ClearheadError` at the end of the `with` if no call was recognised: the result is never empty; and where
    `padding` fits no call. Raises an `UnsupportedError` for a compiled model: watch the one that was compiled; and for
    a backend called with a keyword that may change the weights and cannot be read. Warns of calls of
    `F.scaled_dot_product_attention` in threads that run no module, and, without `layers`, of modules with "Attention"
    in their class's name that computed a softmax in their own code: they are not recorded.
    Cost: a copy of query and key a call; O(Lq + Lk) memory each, and the mask's own tensor once where its rows are
    no intervals. `torch.nn` projects queries and keys inside: a record projects them once more.
    """
    if not isinstance(model, nn.Module):
        raise ClearheadError(f"watch takes a torch.nn.Module; got a {type(model).__name__}.")
    refuse_compiled(model)
    wanted = asked(keep, every, layers, heads, merge, values, gradients, fuse)
    words = None if padding is None else checked(padding)
    return Managed("watch(...)", lambda: _watching(Recorder(model, wanted, words)))


def each_call(model: nn.Module, do: Callable[[AttentionCall], None], padding: Any) -> AbstractContextManager[Any]:
    """Do this with each attention call when it happens, before anything can be written to; nothing is kept of it."""
    refuse_compiled(model)
    return _watching(Recorder(model, asked()._replace(each=do), checked(padding)))


@contextmanager
def _watching(recorder: Recorder) -> Iterator[Recording | Statistics]:
    with given_calls(recorder):
        yield Recording(recorder.calls) if recorder.copies else Statistics(recorder.reduced)
    lost = len(recorder.unattributed)
    if not recorder.seen and not recorder.modules:
        raise ClearheadError(_nothing_seen(recorder.stack.model, lost))
    check_layers(recorder.asked.layers, recorder.modules, "watch")
    if not recorder.seen:
        raise ClearheadError(
            f"no call could be recorded: an error came between. Calls were made by {listed(recorder.modules)}."
        )
    if recorder.padding is not None and not recorder.fitted and recorder.asked.layers is None:
        raise ShapeError(_fits_none(recorder))
    if lost:
        warnings.warn(_lost(lost), stacklevel=4)  # points at the caller's `with` statement
    if recorder.unread and recorder.asked.layers is None:
        warnings.warn(_unread(recorder.unread), stacklevel=4)


def _fits_none(recorder: Recorder) -> str:
    assert recorder.padding is not None
    sizes = sorted(recorder.sizes)
    return (
        f"watch: padding has shape {tuple(recorder.padding.shape)}, and the calls have (batch, keys) "
        f"{', '.join(map(str, sizes[:6]))}. Pass the attention mask of the batch that the model was given, (B, L)."
    )


def _unread(modules: dict[str, str]) -> str:
    return (
        f"the attention of {listed(modules)} ({', '.join(dict.fromkeys(modules.values()))}) is not in the record: it "
        "was computed by a softmax in these modules' own code, and not by a function that can be recorded. "
        "Name the layers that are wanted to have no such word: watch(model, layers=…)."
    )


def _lost(calls: int) -> str:
    return (
        f"{calls} calls of scaled_dot_product_attention are not in the record: they were made while the model ran, in "
        "threads that ran no module, so which module they belong to is unknown. If the model's forward hands its "
        "attention to a pool of threads, call a module of the model there, or run it in one thread; if they were not "
        "the model's, nothing is missing."
    )


def _nothing_seen(model: nn.Module, lost: int) -> str:
    backend = getattr(getattr(model, "config", None), "_attn_implementation", None)
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
