"""The picture of the page in the README is one of this run: `--pictures` takes it anew."""

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
from clearhead.models import bundled, load

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "report.png"


def test_the_picture_in_the_readme_is_of_this_page(
    open_report: Callable[..., Any], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    model, tokenizer = load(bundled())
    inputs = tokenizer((ROOT / "examples" / "paragraph.txt").read_text(), return_tensors="pt", truncation=True)
    with torch.no_grad(), ch.watch(model) as seen:
        model(**inputs)
    words = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    html = seen.view(tokens=words, title="A paragraph").write(tmp_path / "page.html").read_text(encoding="utf-8")
    page = open_report([], "#arcs=1", html=html, viewport={"width": 1400, "height": 1000}).page
    taken = page.screenshot()
    if pytestconfig.getoption("--pictures"):
        PICTURE.write_bytes(taken)
    now, kept = imread(BytesIO(taken)), imread(PICTURE)
    assert now.shape[:2] == kept.shape[:2] == (1000, 1400)
    # Other versions of Chromium and of fonts draw letters otherwise; a page that has changed differs by more.
    assert np.abs(now[..., :3] - kept[..., :3]).mean() < 0.03
