"""The part of a recorded call's explanation that leads from the module's input to query, key and value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.base.steps import Step, number
from clearhead.explanation.explanation import Part
from clearhead.explanation.modules.joined import joined_steps
from clearhead.explanation.modules.origin.chain import AXES, Chain, Places
from clearhead.explanation.modules.origin.find import agrees, batched, find, input_step, near
from clearhead.explanation.modules.origin.ran import Origin, Ran
from clearhead.explanation.modules.projection import Linear
from clearhead.explanation.shown import Shown

LISTED = 8_000  # numbers of inputs and weights that are listed; of more the sums are shown, by their first terms


class FromInput(NamedTuple):
    """Steps that end in "query", "key" and "value", and in words which of these could not be had."""

    steps: list[Step]
    missing: list[str]


def from_input(origin: Origin, tensors: Mapping[str, Tensor], given: list[Step], shown: Shown) -> FromInput:
    """`tensors`: query, key and value as they were recorded. `given`: steps of them, for what is shown."""
    heads = tensors["query"].shape[1], tensors["key"].shape[1]
    found: dict[str, tuple[Chain, Places]] = {}
    missing = []
    for step in given:
        tensor = tensors[step.name]
        places = _places(step.name, shown, heads)
        chain = find(step.name, tensor, origin, places, heads) if bool(step.value.isfinite().all()) else None
        if chain is None:
            missing.append(_why_not(step.name, tensor, origin))
        elif not agrees(chain, step.name, tensor, places):
            missing.append(f"The {step.name}: {chain.ran.name} makes it at some positions, and not at all of them.")
        else:
            found[step.name] = chain, places
    sources = _sources(found, tensors, given, shown)
    numbers = {id(step.value): step.value.numel() for step in sources.values()}
    weights = sum(
        chain.rows[sorted({*places.heads})].numel() * sources[n].value.shape[-1] for n, (chain, places) in found.items()
    )
    listed = sum(numbers.values()) + weights <= LISTED
    steps = list({step.name: step for step in sources.values()}.values()) if listed else []
    for step in given:
        if step.name not in found:
            steps.append(step)
            continue
        chain, places = found[step.name]
        source = replace(sources[step.name], axes=("B", AXES[step.name], "in"))
        made = chain.steps(step.name, source, places)
        far = float((made[-1].value - step.value).abs().max())
        steps += _ended(made if listed else _unlisted(made, chain, step.name), step, far, tensors[step.name].dtype)
    if found and not listed:
        said = ", ".join(dict.fromkeys(f"{chain.ran.name} ({_sizes(chain.layer)})" for chain, _ in found.values()))
        missing.append(
            f"Inputs and weights of the layers {said} are too many to be listed: their sums are shown by their first "
            "terms."
        )
    return FromInput(steps, missing)


def last_projection(origin: Origin, output: Step, heads: Tensor, shown: Shown) -> Part:
    """From the outputs of all heads, (B, H, Lq, Ev), to what the module's last layer makes of them."""
    title = "Heads together, and the last projection"
    ran = next((one for one in origin.ran[origin.before :] if _of_heads(one, heads, shown)), None)
    if ran is None or not isinstance(ran.layer, Linear):
        said = "No layer that ran in this module after attention was given the heads side by side."
        return Part(title, (), f"{said} It may be in another module.")
    steps, said = joined_steps(ran.layer, output, heads, shown), f"The module's layer {ran.name}."
    if ran.layer.weight.numel() > LISTED:
        steps = [step for step in steps if step.name not in ("W_output", "b_output")]
        steps[-1] = replace(steps[-1], code="")
        said += f" Its weights ({_sizes(ran.layer)}) are too many to be listed."
    return Part(title, tuple(steps), said)


def _of_heads(ran: Ran, heads: Tensor, shown: Shown) -> bool:
    """Whether a linear layer was given the outputs of the heads, side by side."""
    x = batched(ran.x, heads)
    if not isinstance(ran.layer, Linear) or x is None or x.shape[-1] != heads.shape[1] * heads.shape[3]:
        return False
    batches, queries = list(shown.batches), list(shown.queries)
    theirs, mine = x[batches][:, queries].float(), heads[batches][:, :, queries].float()
    return near(theirs, mine.transpose(1, 2).flatten(2), heads.dtype)


def _places(name: str, shown: Shown, heads: tuple[int, int]) -> Places:
    group = heads[0] // heads[1]
    if name == "query":
        return Places(list(shown.batches), list(shown.heads), list(shown.queries))
    return Places(list(shown.batches), [h // group for h in shown.heads], list(range(shown.sizes.keys)))


def _sources(
    found: Mapping[str, tuple[Chain, Places]], tensors: Mapping[str, Tensor], given: list[Step], shown: Shown
) -> dict[str, Step]:
    """The input of each side's layer: one step for an array that serves twice."""
    inputs = {name: batched(chain.ran.x, tensors[name]) for name, (chain, _) in found.items()}
    known = {name: (x.data_ptr(), x.shape, x.stride()) for name, x in inputs.items() if x is not None}
    one = len({*known.values()}) == 1
    whole = one and len(shown.queries) == shown.sizes.queries
    sources: dict[str, Step] = {}
    for name, (_, places) in found.items():
        x = inputs[name]
        assert x is not None
        twin = next((n for n in sources if known[n] == known[name] and ("query" not in (n, name) or whole)), None)
        if twin is not None:
            sources[name] = sources[twin]
            continue
        step = input_step("x" if whole else f"x_{name}", x, name, places, given[0].value.dtype)
        sources[name] = replace(step, axes=("B", "L", "in")) if whole else step
    return sources


def _ended(steps: list[Step], given: Step, far: float, dtype: torch.dtype) -> list[Step]:
    """The same, its last step with the numbers that the model gave to attention."""
    last = steps[-1]
    if torch.finfo(dtype).bits >= 32:
        exact = "exactly" if far == 0 else f"to within {number(far)}"
        why = f"{last.why} These are the model's own numbers: the line gives them {exact}."
        return [*steps[:-1], replace(last, why=why, value=given.value)]
    kind = str(dtype).removeprefix("torch.")
    why = f"{given.why} The model's own numbers, rounded to {kind} on the way; the last step is within {number(far)}."
    return [*steps[:-1], _renamed(last, f"exact_{given.name}"), replace(given, why=why)]


def _renamed(step: Step, name: str) -> Step:
    """Its own name stands first in its formula and in its code."""
    formula, code = (name + text.removeprefix(step.name) for text in (step.formula, step.code))
    return replace(step, name=name, formula=formula, code=code)


def _unlisted(steps: list[Step], chain: Chain, name: str) -> list[Step]:
    """The same from the layer's sums on, which are given: as those of the head, where there is one."""
    start = next(n for n, step in enumerate(steps) if step.name in (f"flat_{name}", f"unnormed_{name}"))
    flat, after = steps[start], steps[start + 1]
    why = f"{flat.why} {flat.formula}."
    if after.value.numel() != flat.value.numel() or after.value.ndim != 4:
        return [replace(flat, formula="", code="", why=why), *steps[start + 1 :]]
    why, of_layer = why.replace(flat.name, after.name), flat.cell
    assert of_layer is not None
    head = replace(after, formula="", code="", why=why, cell=lambda at: of_layer((at[0], *at[2:])))
    return [head, *steps[start + 2 :]]


def _sizes(layer: Linear) -> str:
    return " × ".join(f"{n:,}" for n in reversed(layer.weight.shape))


def _why_not(name: str, tensor: Tensor, origin: Origin) -> str:
    lengths = {ran.x.shape[:-1].numel() // max(tensor.shape[0], 1) for ran in origin.ran[: origin.before]}
    length = tensor.shape[2]
    if lengths and max(lengths) < length and name != "query":
        return f"The {name}: the layers ran for {max(lengths)} of {length} positions, the others were kept from before."
    if not lengths:
        return f"The {name}: no linear layer ran in the module before attention."
    return (
        f"The {name}: none of the layers that ran before attention gives it, with a norm, a rotation and a factor; the "
        "module computes something else between, or its weights or its input were changed since."
    )
