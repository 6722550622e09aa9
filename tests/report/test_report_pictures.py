"""The pictures of the pages in the README are those of this run: `--pictures` takes them anew."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

import clearhead as ch
from clearhead.explanation.examples import example
from clearhead.models import bundled, load

ROOT = Path(__file__).parents[2]


def check(page: Any, picture: Path, size: tuple[int, int], config: pytest.Config) -> None:
    """What the page looks like is what stands in the docs."""
    taken = page.screenshot()
    if config.getoption("--pictures"):
        picture.write_bytes(taken)
    now, kept = imread(BytesIO(taken)), imread(picture)
    assert now.shape[1::-1] == kept.shape[1::-1] == size
    # Other versions of Chromium and of fonts draw letters otherwise; a page that has changed differs by more.
    assert np.abs(now[..., :3] - kept[..., :3]).mean() < 0.03


def test_the_picture_in_the_readme_is_of_this_page(
    open_report: Callable[..., Any], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    model, tokenizer = load(bundled())
    inputs = tokenizer((ROOT / "examples" / "paragraph.txt").read_text(), return_tensors="pt", truncation=True)
    with torch.no_grad(), ch.watch(model) as seen:
        model(**inputs)
    words = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    html = seen.view(tokens=words, title="A paragraph").write(tmp_path / "page.html").read_text(encoding="utf-8")
    page = open_report([], "#layer=2&head=9", simple=True, html=html, viewport={"width": 1400, "height": 1000}).page
    check(page, ROOT / "docs" / "report.png", (1400, 1000), pytestconfig)


def test_the_picture_of_an_explanation_is_of_this_page(show: Callable[..., Any], pytestconfig: pytest.Config) -> None:
    opened = show(example("dot"), "#step=weights", viewport={"width": 1000, "height": 600})
    check(opened.page, ROOT / "docs" / "explanation.png", (1000, 600), pytestconfig)
