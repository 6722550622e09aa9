"""A picture whose patches are the tokens of a recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead.models.views.image import patches_of

Make = Callable[..., Any]
SHOWN = "document.getElementById('clearhead').dataset.shown"
ROWS, COLUMNS = 2, 3
DRAWN = "document.getElementById('clearhead').shadowRoot.getElementById('image-picture').dataset.drawn"


class Block(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return F.scaled_dot_product_attention(x, x.roll(1, 2), x)


def recorded(length: int) -> Any:
    x = 1.5 * torch.randn(1, 2, length, 8, generator=torch.Generator().manual_seed(0))
    with ch.watch(model := Block()) as seen:
        model(x)
    return seen


@pytest.fixture(scope="module")
def seen() -> Any:
    return recorded(1 + ROWS * COLUMNS)


PICTURE = np.kron(np.arange(6).reshape(ROWS, COLUMNS, 1) * [40, -40, 10] + [20, 230, 0], np.ones((10, 10, 1))).astype(
    "uint8"
)


def test_patches_lie_over_the_picture(seen: Any, open_report: Make, tmp_path: Any) -> None:
    html = seen.view(image=PICTURE).write(tmp_path / "page.html").read_text()
    opened = open_report([], "#layer=0&head=1&token=5", html=html)
    page = opened.page
    assert page.locator(".prose .token").all_inner_texts() == ["[CLS]", "0,0", "0,1", "0,2", "1,0", "1,1", "1,2"]
    opened.until(DRAWN, "0/1/out/5")
    weights = seen[0].weights[0, 1, 5].numpy()
    get = """() => {
        const canvas = document.getElementById('clearhead').shadowRoot.getElementById('image-picture');
        const { width, height } = canvas;
        const { data } = canvas.getContext('2d').getImageData(0, 0, width, height);
        return [0, 1, 2, 3, 4, 5].map((patch) => {
            const [x, y] = [(patch % 3 + 0.5) * width / 3, (Math.floor(patch / 3) + 0.5) * height / 2].map(Math.floor);
            return Array.from(data.slice(4 * (y * width + x), 4 * (y * width + x) + 3));
        });
    }"""
    pixels = np.array(page.evaluate(get))
    for patch, got in enumerate(pixels):
        row, column = divmod(patch, COLUMNS)
        veiled = 0.7 * PICTURE[10 * row, 10 * column] + 0.3 * 255
        assert (np.abs(got - veiled).max() < 2) == (7 * weights[1 + patch] <= 1), (patch, got, veiled)
    assert (7 * weights[1:] > 1).any() and (7 * weights[1:] <= 1).any()
    box = page.locator("#image-picture").bounding_box()
    page.mouse.click(box["x"] + 0.9 * box["width"], box["y"] + 0.2 * box["height"])
    opened.until(f"{SHOWN}.slice(0, 10)", "0/1/out/3/")
    page.locator("#image-picture").focus()
    page.keyboard.press("ArrowDown")
    opened.until(f"{SHOWN}.slice(0, 10)", "0/1/out/6/")
    assert "1,2" in page.locator("#image-picture").get_attribute("aria-label")
    page.mouse.move(box["x"] + 0.1 * box["width"], box["y"] + 0.2 * box["height"])
    assert page.inner_text("#pair-title").startswith("“\u20681,2\u2069” → “\u20680,0\u2069”")


def test_a_page_without_a_picture_has_none(seen: Any, open_report: Make, tmp_path: Any) -> None:
    opened = open_report([], html=seen.view().write(tmp_path / "page.html").read_text())
    assert opened.page.is_hidden("#image")


@pytest.mark.parametrize(
    ("shape", "length", "wanted"),
    [
        ((224, 224, 3), 197, (14, 14, 1)),
        ((3, 224, 224), 261, (16, 16, 5)),  # four registers
        ((96, 96), 144, (12, 12, 0)),
        ((160, 320, 3), 51, (5, 10, 1)),
        ((1000, 1000, 3), 5, (2, 2, 1)),
    ],
)
def test_the_grid_follows_from_the_sides(shape: tuple[int, ...], length: int, wanted: tuple[int, ...]) -> None:
    found = patches_of(np.zeros(shape), {length})
    assert found[1:] == wanted and found.pixels.dtype == np.uint8 and max(found.pixels.shape) <= 448
    assert len(found.words) == length


def test_numbers_of_any_kind_are_one_picture() -> None:
    pixels = torch.randint(0, 256, (3, 8, 8), generator=torch.Generator().manual_seed(1))
    for given in (pixels, pixels.byte(), pixels.numpy().transpose(1, 2, 0), pixels / 255):
        np.testing.assert_array_equal(patches_of(given, {16}).pixels, pixels.numpy().transpose(1, 2, 0))


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (np.zeros((30, 17, 3)), "no grid of square patches"),
        ("picture.png", "or a picture of PIL"),
        (np.zeros((8, 8, 4)), "or a picture of PIL"),
        (np.zeros((0, 8, 3)), "or a picture of PIL"),
        (None.__class__, "or a picture of PIL"),
    ],
)
def test_what_is_no_picture_is_an_error(seen: Any, image: Any, said: str) -> None:
    with pytest.raises(ch.ClearheadError, match=said):
        seen.view(image=image)
