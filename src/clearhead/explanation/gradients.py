"""What flows back through each step, for a gradient of the last one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import to_tensor_float
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.steps import Step
from clearhead.base.tracing import without_autocast
from clearhead.explanation.explanation import Explanation, Part


def leaves(arrays: Sequence[Any]) -> list[Any]:
    """Copies that gradients reach; of an array that serves twice there is one."""
    made: dict[int, Any] = {}
    for array in arrays:
        tensor = array
        if isinstance(array, np.ndarray) and array.dtype.kind == "f":
            tensor = to_tensor_float(array, "an input")
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and id(array) not in made:
            made[id(array)] = tensor.detach().clone().requires_grad_()
    return [made.get(id(array), array) for array in arrays]


def with_gradients(explanation: Explanation, given: Any) -> Explanation:
    """The same with a part that goes back from the last step that is computed, whose gradient is given, or all 1."""
    steps = explanation.steps
    last = next(step for step in reversed(steps) if not step.aside)
    grad = _given(given, last, explanation)
    found = [step for step in steps if step.value.requires_grad and not step.aside and step is not last]
    if not found:
        raise ClearheadError("gradients: no input has any; pass query, key and value of a floating-point dtype.")
    with without_autocast(last.value.device):
        grads = torch.autograd.grad(last.value, [step.value for step in found], grad, allow_unused=True)
    why = (
        f"Given: how much a loss grows when a number of {last.name} grows a little, divided by that little growth. "
        "d_… of another step is the same for its numbers."
    )
    back = [Step(f"d_{last.name}", "", why, grad, last.axes)]
    # a step that shows no code is written out in the script, which can't follow a gradient through it
    opaque = [i for i, step in enumerate(found) if step.formula and not step.code]
    for i, (step, flown) in reversed(list(enumerate(zip(found, grads, strict=True)))):
        if flown is not None:
            followed = not opaque or i >= opaque[-1] or step.name == "value"
            back.append(_backward(step, flown, last.name, steps, followed))
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
    if tensor.device != last.value.device:
        raise ClearheadError(f"gradients is on {tensor.device}, and the step {last.name} on {last.value.device}.")
    return tensor.to(last.value.dtype).reshape(last.value.shape)


def _backward(step: Step, grad: Tensor, last: str, steps: Sequence[Step], followed: bool) -> Step:
    name = f"d_{step.name}"
    formula = f"{name} = Σ d_{last} · ∂{last} / ∂{step.name}, over all numbers of {last}"
    why = "By the chain rule: the derivatives of the steps between are multiplied."
    said = [(user.name, user.back[step.name]) for user in steps if step.name in user.back]
    if len(said) == 1:
        ((user, back),) = said
        formula, why = back.formula.replace("{d}", f"d_{user}"), back.why
    if step.axes[-2:] in (("Lk", "E"), ("Lk", "Ek")) or step.name == "value":
        still = (grad == 0).all(-1)
        gone = int((still if still.ndim == 1 else still.flatten(0, -2).all(0)).sum())
        if gone:
            why += f" {gone} of {grad.shape[-2]} keys got 0: no query sees them, so they do not change the loss."
    code = f"({name},) = torch.autograd.grad({last}, {step.name}, d_{last}, retain_graph=True)"
    return Step(name, formula, why, grad, step.axes, code if followed else "")
