"""An explanation as a program in plain PyTorch, which computes the same steps and prints them."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.output.text import printable
from clearhead.base.symbolic.steps import Step
from clearhead.explanation.document import Document

NUMBERS = 20_000  # the most numbers that the inputs of a script hold

HEAD = """\
import torch

torch.set_printoptions(precision={digits}, sci_mode=False, linewidth=120)
inf, nan = float("inf"), float("nan")
"""


def render(document: Document) -> str:
    """The program."""
    steps = lines_of(document)
    lines = [f"# {printable(document.title)}", HEAD.format(digits=document.digits)]
    for section in document.sections:
        lines.append(f"# {printable(section.title)}")
        for step in (entry.step for entry in section.entries):
            shows = f"print({step.name!r}, tuple({step.name}.shape), {step.name}.detach(), sep='\\n')"
            lines += [f"# {printable(step.why)}", steps[step.name], shows]
        lines.append("")
    return "\n".join(lines)


def lines_of(document: Document) -> dict[str, str]:
    """The line of each step, by the step's name. What is given is written out, in digits that give it back exactly.

    Raises a `ClearheadError` where the inputs hold too many numbers.
    """
    steps = [step for part in document.parts for step in part.steps]
    count = sum(step.value.numel() for step in steps if not step.code)
    if count > NUMBERS:
        raise ClearheadError(
            f"the inputs of this explanation hold {count:,} numbers, and a script writes out at most {NUMBERS:,}. "
            "Explain a smaller example: a script cannot leave out keys, since the softmax needs all of them."
        )
    follows = any("torch.autograd.grad" in step.code for step in steps)

    def line(step: Step) -> str:
        learns = follows and step.value.is_floating_point() and not step.name.startswith("d_")
        return step.code or f"{step.name} = {_literal(document.shown.squeezed(step))}" + ".requires_grad_()" * learns

    return {step.name: line(step) for step in steps}


def _literal(value: Tensor) -> str:
    """A tensor as Python code. Each number has the fewest digits that give it back exactly."""
    value = value.detach().cpu()
    dtype = f", dtype={value.dtype}" if value.dtype not in (torch.int64, torch.bool) else ""
    return f"torch.tensor({_nested(value.numpy())}{dtype})"


def _nested(array: np.ndarray) -> str:
    if array.ndim:
        return f"[{', '.join(_nested(row) for row in array)}]"
    if array.dtype.kind != "f":
        return str(array.item())
    return str(array[()]) if math.isfinite(array) else str(float(array))
