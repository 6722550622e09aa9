"""Chapter 8: the Transformer of sixty lines learns to sort, whatever it begins with."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import trained
from chapters import cells


@pytest.fixture(scope="module")
def chapter() -> dict[str, Any]:
    return trained.machine()


def test_the_machine_is_sixty_lines() -> None:
    (machine,) = (cell for cell in cells(8) if cell.startswith("START"))
    assert sum(bool(line.strip()) for line in machine.splitlines()) <= 60


def test_fifteen_steps_lower_the_loss(chapter: dict[str, Any], capsys: Any) -> None:
    torch.manual_seed(0)
    model, held = chapter["Transformer"](), chapter["draw"](128)
    first = chapter["loss_of"](model, *held).item()
    chapter["train"](model, steps=15)
    assert first == pytest.approx(math.log(30), abs=0.5) and chapter["loss_of"](model, *held).item() < first - 0.3


@pytest.mark.parametrize("seed", range(3))
def test_it_sorts_in_600_steps(seed: int, chapter: dict[str, Any], capsys: Any) -> None:
    torch.manual_seed(seed)
    model = chapter["train"](chapter["Transformer"]())
    given, lengths, answer = chapter["draw"](2000)
    assert chapter["right"](chapter["generate"](model, given, lengths), answer).double().mean() >= 0.99
