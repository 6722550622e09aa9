"""Multi-head attention, from its inputs to its output."""

from __future__ import annotations

from dataclasses import replace
from inspect import BoundArguments
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.arrays import accumulated
from clearhead.base.symbolic.steps import Step
from clearhead.base.torch_state.contexts import without_autocast
from clearhead.explanation.explanation import Explanation, Part
from clearhead.explanation.inputs import drawn
from clearhead.explanation.modules.captured import Captured, capture_call, check_forward
from clearhead.explanation.modules.projection import Linear, joined_steps, projection_steps, split
from clearhead.explanation.modules.sides import Side, gate_steps, side_steps, stages
from clearhead.explanation.of_problem import attention_parts, input_steps
from clearhead.explanation.shown import Asked, Shown, choose, settle
from clearhead.nn._heads import split_heads
from clearhead.nn._options import compute_gate, validate_key_positions, validate_positions
from clearhead.nn.key_value_cache import KeyValueCache
from clearhead.nn.multi_head_attention import MultiHeadAttention
from clearhead.nn.prepared_keys import PreparedKeys
from clearhead.nn.torch_multihead_attention import TorchMultiheadAttention

Module = MultiHeadAttention | TorchMultiheadAttention
SIDES = {"query": "Lq", "key": "Lk", "value": "Lk"}


def layers_of(module: Module) -> dict[str, Linear]:
    """The layers of the `SIDES` and of the "output". Those of torch's sides may be the parts of one matrix."""
    check_forward(module, MultiHeadAttention, TorchMultiheadAttention)
    if isinstance(module, TorchMultiheadAttention):
        sides = (Linear(weight, bias) for _, weight, bias in module._projections())
        return dict(zip(SIDES, sides, strict=True)) | {"output": Linear(module.out_proj.weight, module.out_proj.bias)}
    layers = {"query": module.W_q, "key": module.W_k, "value": module.W_v, "output": module.W_o}
    for layer in (*layers.values(), *([module.W_g] if module.W_g is not None else [])):
        check_forward(layer, nn.Linear, hooks=False)
    return {name: Linear(layer.weight, layer.bias) for name, layer in layers.items()}


def explain_multi_head(module: Module, bound: BoundArguments, at: Asked) -> Explanation:
    """The projections, their split into heads, each head's attention, and the last projection."""
    layers, found = layers_of(module), capture_call(module, bound)
    given: dict[str, Any] = {name: bound.arguments.get(name) for name in SIDES}
    batched, problem = given["query"].ndim == 3, found.problem
    length_first = isinstance(module, TorchMultiheadAttention) and not module.batch_first
    if length_first and batched:
        turned = {id(t): t.transpose(0, 1) for t in given.values()}  # an array that serves twice stays one
        given = {name: turned[id(t)] for name, t in given.items()}
    if batched:
        shown = choose(at, problem.sizes)
    else:
        index = at.at if isinstance(at.at, tuple) else (at.at,)
        inner = at if at.at is None else at._replace(at=(0, *index))
        shown = replace(choose(inner, problem.sizes), absent=("B",))
    with without_autocast(problem.sizes.device):
        sources = _sources(given, shown, problem.query.dtype)
        projected = _projected(module, layers, sources, shown, found, bound.arguments)
        attention, weights, keep = attention_parts(problem, found.call.mask, shown, projected)
        output = next(step for step in attention[-1].steps if step.name == "output")
        heads = found.heads.reshape(-1, problem.sizes.heads, *found.heads.shape[-2:])
        gates: list[Step] = []
        if isinstance(module, MultiHeadAttention) and module.gate is not None and module.W_g is not None:
            gates = gate_steps(module, sources["query"], output, shown)
            rows = given["query"] if batched else given["query"][None]
            heads = heads * compute_gate(module.gate, module.W_g(rows), heads)
        joined = joined_steps(layers["output"], gates[-1] if gates else output, heads, shown)
    assert problem.value is not None
    shapes = {n: tuple(t.shape) for n, t in zip(SIDES, (problem.query, problem.key, problem.value), strict=True)}
    parts = [
        Part("Inputs", tuple({step.name: step for step in sources.values()}.values()), _said(given, length_first)),
        Part("Projections, and the heads", tuple(projected), drawn(shapes, problem.sizes), letters_of=("B", "H")),
        *attention,
        *([Part("Gate: how much of each head's output goes on", tuple(gates))] if gates else []),
        Part("Heads together, and the last projection", tuple(joined)),
    ]
    title = f"{type(module).__name__}({module.extra_repr()}), step by step".replace("()", "")
    return Explanation(title, tuple(parts), settle(shown, weights, keep))


def _said(given: dict[str, Any], length_first: bool) -> str:
    if given["key"] is given["query"] and given["value"] is given["query"]:
        kind = "Self-attention: queries, keys and values are all made from one input."
    else:
        kind = "Cross-attention: the queries are made from one input, keys and values from another."
    kind += (
        " Each query gets one output: a weighted sum of the values. The better key j fits the query, the larger the "
        "weight of value j."
    )
    return kind + ("\nThe module takes the length first, (L, B, E); here the batch comes first." * length_first)


def _sources(given: dict[str, Any], shown: Shown, dtype: torch.dtype) -> dict[str, Step]:
    """The inputs that are projected, of the chosen sequences and queries. An array that is given twice has one step."""
    found: dict[str, Step] = {}
    kind = accumulated(dtype)
    tensors = {
        name: t for name, t in given.items() if isinstance(t, Tensor) and not isinstance(given["key"], PreparedKeys)
    }
    tensors = tensors or {"query": given["query"]}
    same = all(tensors.get(name) is given["query"] for name in SIDES)
    alike = same and len(shown.queries) == shown.sizes.queries
    for name, tensor in tensors.items():
        x = tensor if tensor.ndim == 3 else tensor[None]
        x = x[list(shown.batches)] if x.shape[0] > 1 else x
        if name == "query":
            x = x[:, list(shown.queries)]
        if name == "value" and tensor is tensors.get("key"):
            found[name] = found["key"]
        elif alike and name != "query":
            found[name] = found["query"]
        else:
            label = "x" if alike else "x_key" if name == "key" and same else f"x_{name}"
            why = "The module's input: one vector for each position of each sequence."
            x = x.to(kind).view_as(x)  # one tensor may serve twice, and each use has a gradient of its own
            found[name] = Step(label, why, x, ("B", "L" if alike else SIDES[name], "in"))
    return found


def _projected(
    module: Module,
    layers: dict[str, Linear],
    sources: dict[str, Step],
    shown: Shown,
    found: Captured,
    bound: dict[str, Any],
) -> list[Step]:
    """The steps that end in query, key and value. Keys from a cache, and prepared keys, are given steps."""
    sizes, width = found.problem.sizes, module.head_dim
    group = sizes.heads // found.problem.key.shape[1]
    steps: list[Step] = []
    for name in SIDES:
        length = sizes.queries if name == "query" else sizes.keys
        source = sources.get(name)
        if source is None or (name != "query" and source.value.shape[-2] != length):
            given = next(step for step in input_steps(found.problem, shown) if step.name == name)
            why = "Computed before this call, and kept in the cache or by prepare(). "
            steps.append(given.but(why=f"{why}Each new {name} of this call stands last."))
            continue
        each = shown.heads if name == "query" else [h // group for h in shown.heads]
        heads = list(dict.fromkeys(each))  # query heads that share a key head share its rows of the layer too
        linear = layers[name].rows_of(heads, width).to(source.value)
        why = f"A linear layer makes {len(heads)} × {width} numbers of each vector: {width} for each head"
        why += "." if len(shown.heads) == sizes.heads else f", here for head {', '.join(map(str, heads))} alone."
        source = source.but(axes=("B", SIDES[name], "in"))  # positions of one array may be queries and keys
        steps += projection_steps(linear, source, name, f"flat_{name}", why)
        places = [heads.index(head) for head in each]
        ours = module if isinstance(module, MultiHeadAttention) and name != "value" else None
        steps.append(split(steps[-1], len(heads), places, name if ours is None else stages(ours, name)[0]))
        if ours is not None:
            steps += side_steps(ours, _side(ours, name, list(each), found, shown, bound), steps[-1])
    return steps


def _side(
    module: MultiHeadAttention, name: str, heads: list[int], found: Captured, shown: Shown, bound: dict[str, Any]
) -> Side:
    """The queries or the keys of a call, as they were before norm and rotary."""
    x, layer = bound[name], module.W_q if name == "query" else module.W_k
    unnormed = split_heads(layer(x if x.ndim == 3 else x[None]), f"W_{name[0]}", module.head_dim)
    first = found.call.align if isinstance(bound.get("cache"), KeyValueCache) else 0
    past = first if name == "query" and isinstance(first, int | Tensor) else 0
    if isinstance(past, Tensor) and unnormed.shape[0] == 1:
        unnormed = unnormed.expand(len(past), -1, -1, -1)
    positions, of_keys = bound.get("positions"), bound.get("key_positions")
    if name == "query":
        places = validate_positions(positions, "positions", x, module.rotary)
    else:
        places = validate_key_positions(positions, of_keys, bound["query"], x, module.rotary)
    rows = list(shown.queries) if name == "query" else list(range(unnormed.shape[2]))
    return Side(name, heads, rows, list(shown.batches), unnormed, past, places)
