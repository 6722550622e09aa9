"""watch(): record every attention call of a model, its own fast backend left in place."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Never

from torch import nn

from clearhead.base.errors import ClearheadError
from clearhead.base.managers import Managed
from clearhead.base.renamed import refuse
from clearhead.models.recording import Recording
from clearhead.models.tap.choice import Layers
from clearhead.models.tap.padding import checked
from clearhead.models.tap.refused import refuse_compiled
from clearhead.models.use.asked import asked
from clearhead.models.use.recorded import recorded
from clearhead.models.use.recorder import Recorder


def watch(
    model: nn.Module,
    padding: Any = None,
    *,
    every: int = 1,
    layers: Layers = None,
    values: bool = False,
    gradients: bool = False,
    **renamed: Never,
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

    `model`: any nn.Module. Recognised are the models of transformers, on whatever backend they run;
    `torch.nn.MultiheadAttention` and the Transformer layers of `torch.nn`, their fast path left in place; direct calls
    of `torch.nn.functional.scaled_dot_product_attention`; and `clearhead.attention`, with any score; in every thread
    that runs the model, or a module of it. Gives a `Recording`: `recording.calls`, and by module `recording[name]`.
    Each `AttentionCall` keeps copies of query and key, and shares the mask with the calls that were given the same
    one; its `weights` are those before dropout. `clearhead.models.statistics` keeps statistics alone, without copies.
    `padding`: which positions are words and not padding, a tokenizer's attention mask (B, L), 1 for a word. None takes
    it from the `attention_mask` of that shape that the model is called with. Statistics and reports leave padding out,
    and `call.padding` says what was left out.
    `every`: of how many runs of the model one is recorded, the first of them; a run is a call from outside in which
    attention is computed. `layers`: which layers, by their numbers in the model (-1 is the last), by name ("decoder 0,
    cross"), or by a module's name or a pattern of it ("layers.3.*"): one of these, a slice of numbers, or a list. A
    module that is called several times in a run is as many layers, numbered in the order of the calls.
    `values`: keep each call's value and output too, for `call.output`, `call.value_norms` and `call.weighted_norms`;
    and hold on to the inputs of the layers around it, so that `call.explain` can begin at them.
    `gradients`: also the gradients of the outputs that backward passes give, for `call.gradients`.
    Compiled functions inside the model pause at each attention call, whose record is made in eager
    code: operations that the compiler had fused across the call may change in their last digits.
    Raises a `ClearheadError` at the end of the `with` if no call was recognised: the result is never empty; and where
    `padding` fits no call. Raises an `UnsupportedError` for a compiled model: watch the one that was compiled; and for
    a backend called with a keyword that may change the weights and cannot be read. Warns of calls of
    `F.scaled_dot_product_attention` in threads that run no module, and, without `layers`, of modules with "attention",
    "attn", "multihead" or "mha" in their name, or their class's, that computed a softmax in their own code: they are
    not recorded.
    Cost: a copy of query and key a call; O(Lq + Lk) memory each, and the mask's own tensor once where its rows are
    no intervals. `torch.nn` projects queries and keys inside: a record projects them once more.
    """
    refuse("watch", renamed)
    if not isinstance(model, nn.Module):
        raise ClearheadError(f"watch takes a torch.nn.Module; got a {type(model).__name__}.")
    refuse_compiled(model)
    wanted = asked(every, layers, values, gradients)
    words = None if padding is None else checked(padding)
    return Managed("watch(...)", lambda: recorded(Recorder(model, wanted, words), _given))


def _given(recorder: Recorder) -> Recording:
    return Recording(recorder.calls)
