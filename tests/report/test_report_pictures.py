"""The pictures in the README are those of this run: `--pictures` takes them anew."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.image import imread

import clearhead as ch
from clearhead.models import bundled, load

ROOT = Path(__file__).parents[2]


def check(taken: bytes, name: str, size: tuple[int, int], config: pytest.Config) -> None:
    """Compare a picture with the file of this name in `docs`."""
    picture = ROOT / "docs" / name
    if config.getoption("--pictures"):
        picture.write_bytes(taken)
    now, kept = imread(BytesIO(taken)), imread(picture)
    assert now.shape[1::-1] == kept.shape[1::-1] == size
    # Other versions of Chromium and of fonts draw letters otherwise; a page that has changed differs by more.
    assert np.abs(now[..., :3] - kept[..., :3]).mean() < 0.03


@pytest.fixture(scope="module")
def paragraph() -> tuple[ch.models.Recording, list[str]]:
    """The recording of the small BERT on the README's paragraph, and the tokens."""
    model, tokenizer = load(bundled())
    inputs = tokenizer((ROOT / "examples" / "paragraph.txt").read_text(), return_tensors="pt")
    with torch.no_grad(), ch.watch(model) as seen:
        model(**inputs)
    return seen, tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())


def test_the_picture_of_the_report_is_of_this_page(
    open_report: Callable[..., Any], tmp_path: Path, paragraph: Any, pytestconfig: pytest.Config
) -> None:
    seen, tokens = paragraph
    html = seen.view(tokens=tokens, title="A paragraph").write(tmp_path / "page.html").read_text(encoding="utf-8")
    page = open_report([], "#layer=2&head=9", simple=True, html=html, viewport={"width": 1400, "height": 1000}).page
    check(page.screenshot(), "report.png", (1400, 1000), pytestconfig)


def test_the_picture_of_an_explanation_is_of_this_page(
    show: Callable[..., Any], paragraph: Any, pytestconfig: pytest.Config
) -> None:
    seen, tokens = paragraph
    explanation = seen.explain(layer=2, head=9, query="fell", key="fall", tokens=tokens)
    opened = show(explanation, "#step=weights", viewport={"width": 1000, "height": 815})
    check(opened.page.screenshot(), "explanation.png", (1000, 815), pytestconfig)


def test_the_picture_of_padding_is_of_these_weights(pytestconfig: pytest.Config) -> None:
    model, tokenizer = load(bundled())
    texts = ["The pump was closed.", "The parish closed the pump in Broad Street."]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    tokens = tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist())
    with plt.rc_context({"font.size": 13}):
        figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
        for inputs, title, ax in zip(
            ({"input_ids": batch["input_ids"]}, batch),
            ("without attention_mask: attention to padding", "with attention_mask"),
            axes,
            strict=True,
        ):
            with torch.no_grad(), ch.watch(model) as seen:
                model(**inputs)
            seen[0].weights.plot(
                0, 4, query_labels=tokens, key_labels=tokens, title=title, scale=0.5, bar=inputs is batch, ax=ax
            )
        taken = BytesIO()
        figure.savefig(taken, dpi=100)
    check(taken.getvalue(), "padding.png", (1100, 460), pytestconfig)
