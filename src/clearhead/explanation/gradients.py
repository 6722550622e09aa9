"""The gradients of the steps of an explanation, from a gradient of the last step."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import to_tensor_float
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.symbolic.expressions import Expression, Unsaid, flows, formula_of, reads
from clearhead.base.symbolic.steps import Step
from clearhead.base.torch_state.contexts import without_autocast
from clearhead.explanation.explanation import Explanation, Part


def leaves(arrays: Sequence[Any]) -> list[Any]:
    """Copies that require gradients. An array that is given twice has one copy."""
    made: dict[int, Any] = {}
    for array in arrays:
        tensor = array
        if isinstance(array, np.ndarray) and array.dtype.kind == "f":
            tensor = to_tensor_float(array, "an input")
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and id(array) not in made:
            made[id(array)] = tensor.detach().clone().requires_grad_()
    return [made.get(id(array), array) for array in arrays]


def with_gradients(explanation: Explanation, given: Any) -> Explanation:
    """The explanation with one more part: the gradients of its steps, from the last step backwards.

    `given`: the gradient of the last step that is no aside, or True for ones.
    """
    steps = explanation.steps
    last = next(step for step in reversed(steps) if not step.aside)
    grad = _given(given, last, explanation)
    found = [step for step in steps if step.value.requires_grad and not step.aside and step is not last]
    if not found:
        raise ClearheadError(
            "gradients: no input has one; pass inputs of a floating-point dtype, as scores.astype(float)."
        )
    with without_autocast(last.value.device):
        grads = torch.autograd.grad(last.value, [step.value for step in found], grad, allow_unused=True)
    why = (
        f"Given: how much a loss grows when a number of {last.name} grows a little, divided by that little growth. "
        "d_… of another step is the same for the numbers of that step."
    )
    back = [Step(f"d_{last.name}", why, grad, last.axes)]
    # the script holds a step without code as numbers, so no gradient passes through such a step there
    opaque = [i for i, step in enumerate(found) if step.made is None and step.formula and not step.code]
    known = {last.name: back[0]}
    for i, (step, flown) in reversed(list(enumerate(zip(found, grads, strict=True)))):
        if flown is not None:
            known[step.name] = Step(f"d_{step.name}", "", flown, step.axes)
            followed = not opaque or i >= opaque[-1] or step.name == "value"
            back.append(_backward(step, known, last.name, [step for step in steps if not step.aside], followed))
    part = Part("Gradients: how a loss changes with the numbers of each step", tuple(back))
    return replace(explanation, parts=(*explanation.parts, part))


def _given(given: Any, last: Step, explanation: Explanation) -> Tensor:
    if given is True:
        return torch.ones_like(last.value)
    tensor: Tensor = to_tensor_float(given, "gradients").detach()
    shape = explanation.shown.squeezed(last).shape
    if tensor.shape != shape:
        raise ShapeError(
            f"gradients has shape {tuple(tensor.shape)}; expected that of the step {last.name}, {tuple(shape)}, or "
            "True for ones."
        )
    return tensor.to(last.value.dtype).reshape(last.value.shape)


def _backward(step: Step, known: Mapping[str, Step], last: str, steps: Sequence[Step], followed: bool) -> Step:
    """The gradient of a step, with its formula and its reason.

    `known`: the gradients of this step and of the steps after it, by the names of the steps.
    """
    grad = known[step.name]
    said = _said(step, known, steps)
    if said is None:
        formula = f"{grad.name} = Σ d_{last} · ∂{last} / ∂{step.name}, over all numbers of {last}"
        why = "By the chain rule: the derivatives of the steps between are multiplied."
    else:
        formula, why = said
    if step.axes[-2:] in (("Lk", "E"), ("Lk", "Ek")) or step.name == "value":
        still = (grad.value == 0).all(-1)
        gone = int((still if still.ndim == 1 else still.flatten(0, -2).all(0)).sum())
        if gone:
            why += f" {gone} of {grad.value.shape[-2]} keys got 0: no query sees them, so they do not change the loss."
    code = f"({grad.name},) = torch.autograd.grad({last}, {step.name}, d_{last}, retain_graph=True)"
    return grad.but(why=why, formula=formula, code=code if followed else "")


def _said(step: Step, known: Mapping[str, Step], steps: Sequence[Step]) -> tuple[str, str] | None:
    """The formula of a step's gradient and the reason, from the trees of the steps that read it; None where a tree
    cannot say them."""
    flown, why = [], ""
    try:
        for user in (each for each in steps if each.name in known):
            if user.by is not None and reads(user.by, step.name):
                flown += flows(user.by, user, known[user.name], step.name)
                why = reason(user, step.name)
            elif user.by is None and user.made is not None and reads(user.made, step.name):
                return None
    except Unsaid:
        return None
    if not flown:
        return None
    return formula_of(f"d_{step.name}", functools.reduce(operator.add, flown), step.axes), why


def reason(user: Step, name: str) -> str:
    """The reason for the gradient of the step `name`, by the operation of the step `user`, which reads it."""
    by = user.by
    if isinstance(by, Expression) and by.name == "softmax":
        return (
            "A larger score makes its own weight larger and the others of its row smaller: hence the difference."
            + " Where a weight is 0 this is 0." * bool((user.value == 0).any())
        )
    if isinstance(by, Expression) and by.name == "matmul" and user.name == "output":
        left = getattr(by.inputs[0], "name", "")
        made = f"Output i is made of value j times {left}[i, j]"
        if name == left:
            return f"{made}: so this weight gets d_output times value j."
        return f"{made}, so value j gets d_output of each i, times that weight."
    return f"By the chain rule: the gradient of {user.name}, times the derivative of {user.name} by this step."
