"""Several heads over one text, each in a colour of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

Make = Callable[..., Any]
WORDS = ["the", "<b>pump</b>", "in", "the", "street", "was", "closed"]
SHOWN = "document.getElementById('clearhead').dataset.shown"


def bands(page: Any) -> list[list[int]]:
    """For each word and head the opacity of its line, 0 to 255; [] for a word without lines."""
    pictures = page.locator(".coloured [data-index]").evaluate_all("all => all.map(one => one.style.backgroundImage)")
    alpha = r"rgba\(\d+, \d+, \d+, ([\d.]+)\) [\d.]+%|(transparent) [\d.]+%"
    return [[round(255 * float(found[0] or 0)) for found in re.findall(alpha, one)[::2]] for one in pictures]


def test_a_word_has_a_line_of_each_head_that_attends_to_it(make_case: Make, open_report: Make) -> None:
    cases = [make_case(7, heads=3, query_tokens=WORDS, seed=seed, name=f"layer.{seed}") for seed in (1, 2)]
    layers = [case.layer for case in cases]
    opened = open_report(layers, hash="#layer=0&head=1&token=4&colours=1&pins=1.2_0.1_1.0")
    page = opened.page
    opened.until("document.getElementById('clearhead').shadowRoot.querySelectorAll('.coloured [data-index]').length", 7)
    heads = [(0, 1), (1, 2), (1, 0)]  # the shown head is first, and is there once
    for direction in ("out", "in"):
        if direction == "in":
            page.locator("input[value=in]").check(force=True)
            opened.until(f"{SHOWN}.includes('/in/')")
            opened.settle()
        rows = [cases[layer].weights[head] for layer, head in heads]
        weights = np.array([row[4] if direction == "out" else row[:, 4] for row in rows])  # (heads, words)
        found = bands(page)
        for word in range(7):
            seen = [float(alpha) for alpha in found[word]] or [0.0] * 3
            assert [alpha > 0 for alpha in seen] == list(weights[:, word] > 1 / 7), (direction, word)
            order = np.argsort(weights[:, word][weights[:, word] > 1 / 7])
            shown = np.array([alpha for alpha in seen if alpha])
            assert np.all(np.diff(shown[order]) >= 0)
        chips = page.locator("#colours-heads button").all_inner_texts()
        named = [f"L{layer}H{head}" for layer, head in heads]
        best = weights.max(1)
        for chip, name, weight in zip(chips, named, best, strict=True):
            assert chip.strip().startswith(f"{name} → ") and chip.endswith(f"{100 * weight:.1f}%")
    assert page.locator(".coloured [data-index]").nth(1).inner_text() == "<b>pump</b>"
    page.locator(".coloured [data-index]").nth(1).click()
    opened.until(f"{SHOWN}.includes('/1/')")
    page.locator("#colours-heads button").last.click()
    opened.until(f"{SHOWN}.slice(0, 4)", "1/0/")


def test_without_pins_it_says_how_to_add_heads(make_case: Make, open_report: Make) -> None:
    opened = open_report([make_case(7).layer])
    assert opened.page.locator(".coloured").count() == 0  # nothing is computed while it is closed
    opened.page.click("#colours summary")
    opened.until("location.hash.includes('colours=1')")
    opened.until("document.getElementById('clearhead').shadowRoot.querySelectorAll('.coloured [data-index]').length", 7)
    assert opened.page.inner_text("#colours-note").endswith("Pin heads (p) to see them here together.")


def test_heads_of_another_text_are_not_shown(make_case: Make, open_report: Make) -> None:
    layers = [make_case(7, query_tokens=WORDS).layer, make_case(5, name="other", kind="cross").layer]
    opened = open_report(layers, hash="#layer=0&head=0&token=4&colours=1&pins=1.1")
    opened.until("document.getElementById('clearhead').shadowRoot.querySelectorAll('.coloured [data-index]').length", 7)
    assert opened.page.locator("#colours-heads button").count() == 1
