"""Two backends of a model beside the formula."""

from __future__ import annotations

from typing import Any

from clearhead.base.errors import ClearheadError, require
from clearhead.base.numbers import check_number
from clearhead.models.calls import listed
from clearhead.models.read.attending import on_backend, run
from clearhead.models.read.comparison import ComparedCall, Comparison, compared
from clearhead.models.use.edits.edit import refuse_edited
from clearhead.models.watch import watch


def compare(model: Any, one: str, other: str, inputs: Any, *, tolerance: float | None = None) -> Comparison:
    """Run a model of transformers on two backends, and find the first call whose output is not what its inputs say.

    >>> import torch, clearhead as ch
    >>> from transformers import LlamaConfig, LlamaModel
    >>> model = LlamaModel(LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    ...                                num_attention_heads=8, num_key_value_heads=2)).eval()
    >>> found = ch.compare(model, "sdpa", "eager", torch.arange(10)[None])
    >>> print(found.first)
    None
    >>> [(row["module"], row["backend"]) for row in found.table()][:3]
    [('layers.0.self_attn', 'sdpa'), ('layers.1.self_attn', 'sdpa'), ('layers.0.self_attn', 'eager')]

    Each call's output is compared with softmax(score + mask) · value on that call's own inputs, computed in float32 at
    least: so an error in one layer is not found again in those after it, and a backend that leaves out a scale, a
    softcap, a mask or sinks is named with the call. The two runs are not compared with each other: where rounding
    alone differs, they part further and further.
    `model`: a model of transformers in eval mode; its backend is set, and set back after it, or after an error.
    `one`, `other`: names of backends, such as "sdpa", "eager", or one that was registered. `inputs`: as for
    `assert_attends`. `tolerance`: the largest error, as a part of the largest value, that is rounding; None takes it
    from the dtype and the largest score s: (1 + s / 4) times 4e-6 in float32, 1e-3 in float16, 8e-3 in bfloat16.
    Queries that see nothing, and padding, are left out: backends differ in what they give there.
    Gives a `Comparison`: `first`, `table()`, and `str()`. Raises a `ClearheadError` for another model or a backend that
    is not there. Cost: two runs of the model under `watch(values=True)`, and each call's output again.
    """
    transformers = require("transformers", "models", "compare")
    if not isinstance(model, transformers.PreTrainedModel):
        raise ClearheadError(f"compare takes a model of transformers; got a {type(model).__name__}.")
    if any(part.training for part in model.modules()):
        raise ClearheadError("compare takes a model in eval mode, where no dropout acts on the outputs: model.eval().")
    there = ["eager", *transformers.AttentionInterface().valid_keys()]
    for backend in (one, other):
        if backend not in there:  # transformers would look for it on the network, and run what it finds
            raise ClearheadError(f"compare: there is no backend {backend!r}; there are {listed(there)}.")
    if not model._can_set_attn_implementation():
        raise ClearheadError(
            f"{type(model).__name__} computes attention in its own code: transformers cannot give it another backend."
        )
    most = None if tolerance is None else check_number(tolerance, "compare: tolerance")
    if most is not None and most < 0:
        raise ClearheadError(f"compare: tolerance is {tolerance!r}; expected a part of the largest value, 0 or more.")
    refuse_edited(model, "compare")
    found: list[ComparedCall] = []
    for number, backend in enumerate((one, other)):
        with on_backend(model, backend), watch(model, values=True) as seen:
            run(model, inputs)
        found += [compared(call, i, backend, number, most) for i, call in enumerate(seen.calls)]
    return Comparison(found)
