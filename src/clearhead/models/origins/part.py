"""The part of a recorded call's explanation that leads from layers' inputs to query, key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.base.symbolic.steps import Step, number
from clearhead.explanation.explanation import Part
from clearhead.explanation.modules.projection import Linear, joined_steps
from clearhead.explanation.shown import Shown
from clearhead.models.origins.chain import AXES, Chain, Places, taken
from clearhead.models.origins.find import batched, find, given_heads, gives, input_step, near
from clearhead.models.origins.ran import Origin, Ran

LISTED = 8_000  # the most numbers of inputs and weights that are listed; else sums are shown by their first terms


class FromInput(NamedTuple):
    """Steps that end in "query", "key" and "value", and sentences on those of the three whose layers were not found."""

    steps: list[Step]
    missing: list[str]


def from_input(origin: Origin, tensors: Mapping[str, Tensor], given: list[Step], shown: Shown) -> FromInput:
    """The steps from the inputs of layers to query, key and value.

    `tensors`: query, key and value as they were recorded. `given`: the steps of the part of them that is shown.
    """
    heads = tensors["query"].shape[1], tensors["key"].shape[1]
    found: dict[str, tuple[Chain, Places]] = {}
    missing = []
    for step in given:
        tensor = tensors[step.name]
        places = _places(step.name, shown, heads)
        chain = find(step.name, tensor, origin, places, heads) if bool(step.value.isfinite().all()) else None
        if chain is None:
            missing.append(_why_not(step.name, tensor, origin))
        else:
            found[step.name] = chain, places
    sources = _sources(found, tensors, given, shown)
    made: dict[str, list[Step]] = {}
    for step in given:
        if step.name in found:
            chain, places = found[step.name]
            source = sources[step.name].but(axes=("B", AXES[step.name], "in"))
            steps = chain.steps(step.name, source, places)
            values = steps[-1].value, step.value, tensors[step.name].dtype
            if near(*values) or near(*values, chain.doubt(source, places)):
                made[step.name] = steps
            else:
                missing.append(f"The {step.name}: {chain.ran.name} makes it at some positions, and not at others.")
    inputs = {id(sources[name].value): sources[name].value.numel() for name in made}
    weights = [step.value.numel() for steps in made.values() for step in steps if "in" in step.axes]
    listed = sum(inputs.values()) + sum(weights) <= LISTED
    steps = list({sources[name].name: sources[name] for name in made}.values()) if listed else []
    for step in given:
        if step.name in made:
            mine = made[step.name] if listed else _unlisted(made[step.name], step.name)
            steps += _ended(mine, step, made[step.name][-1].value, tensors[step.name].dtype)
        else:
            steps.append(step)
    if made and not listed:
        layers = {name: found[name][0] for name in made}
        said = ", ".join(dict.fromkeys(f"{chain.ran.name} ({_sizes(chain.layer)})" for chain in layers.values()))
        missing.append(
            f"Inputs and weights of the layers {said} are too many to be listed: their sums are shown by their first "
            "terms."
        )
    return FromInput(steps, missing)


def last_projection(origin: Origin, output: Step, heads: Tensor, shown: Shown) -> Part:
    """The part from the outputs of all heads, (B, H, Lq, Ev), to the result of the layer that was given them."""
    title = "Heads together, and the last projection"
    after = sorted(origin.ran[origin.before :], key=lambda one: one.inner)
    ran = next((one for one in after if _of_heads(one, heads, shown)), None)
    found = ran or origin.writer
    if found is None:
        said = (
            "No last projection was found: no linear layer whose input was the outputs of all heads side by side ran "
            "after attention, in this module or around it."
        )
        return Part(title, (), said)
    if ran is not None and ran.inner:
        said = (
            f"The layer {ran.name} was given the outputs of all heads side by side. The module around it, as of an "
            "adapter, may do more with them, so the module's result is not shown."
        )
        return Part(title, (), said)
    layer = found.layer if (found.stands if ran is None else _gives(ran, shown, heads)) else None
    if not isinstance(layer, Linear):
        said = (
            f"The input of the layer {found.name} was the outputs of all heads side by side. Its result is not that of "
            "its weights and its bias: the layer computes something else, or these were changed or freed since."
        )
        return Part(title, (), said)
    said = f"The layer {found.name} of another module." if ran is None else f"The module's layer {ran.name}."
    steps = joined_steps(layer, output, heads, shown)
    if layer.weight.numel() > LISTED:
        steps = [step for step in steps if step.name not in ("W_output", "b_output")]
        steps[-1] = steps[-1].listed(formula=steps[-1].formula)
        said += f" Its weights ({_sizes(layer)}) are too many to be listed."
    return Part(title, tuple(steps), said)


def _of_heads(ran: Ran, heads: Tensor, shown: Shown) -> bool:
    """Whether a linear layer was given the outputs of the heads, side by side."""
    x, batches, queries = batched(ran.x, heads), list(shown.batches), list(shown.queries)
    if ran.kind is not Linear or x is None:
        return False
    return given_heads(taken(taken(x, 0, batches), 1, queries), taken(taken(heads, 0, batches), 2, queries))


def _gives(ran: Ran, shown: Shown, heads: Tensor) -> bool:
    """Whether the layer's result is that of its weights and bias, for the queries that are shown."""
    if ran.result is None or not ran.can_be_read():
        return False
    assert isinstance(ran.layer, Linear)
    return gives(ran.layer, ran.x, ran.result, heads, list(shown.batches), list(shown.queries))


def _places(name: str, shown: Shown, heads: tuple[int, int]) -> Places:
    group = heads[0] // heads[1]
    if name == "query":
        return Places(list(shown.batches), list(shown.heads), list(shown.queries))
    return Places(list(shown.batches), [h // group for h in shown.heads], list(range(shown.sizes.keys)))


def _sources(
    found: Mapping[str, tuple[Chain, Places]], tensors: Mapping[str, Tensor], given: list[Step], shown: Shown
) -> dict[str, Step]:
    """The input of each side's layer. An array that is used twice has one step."""
    inputs = {name: batched(chain.ran.x, tensors[name]) for name, (chain, _) in found.items()}
    known = {name: (x.data_ptr(), x.shape, x.stride()) for name, x in inputs.items() if x is not None}
    one = len({*known.values()}) == 1
    whole = one and len(shown.queries) == shown.sizes.queries
    steps: dict[Any, Step] = {}
    sources: dict[str, Step] = {}
    for name, (_, places) in found.items():
        x, same = inputs[name], (known[name], whole or name == "query")
        assert x is not None
        if same not in steps:
            step = input_step("x" if whole else f"x_{name}", x, name, places, given[0].value.dtype)
            steps[same] = step.but(axes=("B", "L", "in")) if whole else step
        sources[name] = steps[same]
    return sources


def _ended(steps: list[Step], given: Step, found: Tensor, dtype: torch.dtype) -> list[Step]:
    """The same steps, the last one with the numbers that the model gave to attention."""
    last, far = steps[-1], float((found - given.value).abs().max())
    if torch.finfo(dtype).bits >= 32:
        exact = "exactly" if far == 0 else f"to within {number(far)}"
        why = f"{last.why} These are the model's own numbers: the line gives them {exact}."
        return [*steps[:-1], last.but(why=why, value=given.value)]
    kind = str(dtype).removeprefix("torch.")
    why = f"{given.why} The model's own numbers, rounded to {kind} on the way; the last step is within {number(far)}."
    return [*steps[:-1], last.called(f"exact_{given.name}"), given.but(why=why)]


def _unlisted(steps: list[Step], name: str) -> list[Step]:
    """The steps from the layer's sums on. The sums become a given step, of the head where there is only one."""
    start = next(n for n, step in enumerate(steps) if step.name in (f"flat_{name}", f"unnormed_{name}"))
    flat, after = steps[start], steps[start + 1]
    why = f"{flat.why} {flat.formula}."
    if after.value.numel() != flat.value.numel() or after.value.ndim != 4:
        return [flat.listed(why=why), *steps[start + 1 :]]
    assert flat.made is not None
    head = after.listed(why=why.replace(flat.name, after.name), made=flat.made.unsqueeze(1))
    return [head, *steps[start + 2 :]]


def _sizes(layer: Linear) -> str:
    return " × ".join(f"{n:,}" for n in reversed(layer.weight.shape))


def _why_not(name: str, tensor: Tensor, origin: Origin) -> str:
    lengths = {ran.x.shape[:-1].numel() // max(tensor.shape[0], 1) for ran in origin.ran[: origin.before]}
    length = tensor.shape[2]
    if lengths and max(lengths) < length and name != "query":
        ran = f"The {name}: the layers ran for {max(lengths)} of {length} positions"
        return f"{ran}, the others were kept from before, or are slots of a cache that hold nothing yet."
    if not lengths:
        return f"The {name}: no linear layer ran in the module before attention."
    return (
        f"The {name}: none of the layers that ran before attention gives it, with a norm, a rotation and a factor; the "
        "module computes something else between, or its weights or its input were changed since."
    )
