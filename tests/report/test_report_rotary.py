"""The terms of a score by rotary frequency: the entries that a model turns together, and how fast."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import clearhead as ch

HALVES = [(n, n + 8) for n in range(8)]
SLOWER = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "vocab_size": 50,
    "tie_word_embeddings": False,
}


def seen_of(kind: str, values: bool = True, positions: Any = None, **more: Any) -> ch.models.Recording:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | more)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    ids = torch.randint(3, 50, (2, 12))
    with torch.no_grad(), ch.watch(model, values=values) as seen:
        model(input_ids=ids, **({} if positions is None else {"position_ids": positions}))
    return seen


def pairs_of(seen: ch.models.Recording, sequence: int = 0) -> Any:
    return seen.layers(sequence=sequence)[0].pairs


@pytest.mark.parametrize(
    "kind, more, places, base",
    [
        ("Llama", {}, HALVES, 10_000),
        ("Llama", SLOWER, HALVES, 500),
        ("Llama", {"num_key_value_heads": 1, "head_dim": 8}, [(n, n + 4) for n in range(4)], 10_000),
        ("Qwen3", {"num_key_value_heads": 3, "head_dim": 16}, HALVES, 10_000),
        ("Cohere", {"eos_token_id": 2}, [(2 * n, 2 * n + 1) for n in range(8)], 500_000),
        ("GPTNeoX", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
         [(n, n + 4) for n in range(4)], 10_000),
    ],
    ids=["halves", "base", "grouped", "normed", "neighbours", "first half alone"],
)  # fmt: skip
def test_pairs_are_those_of_the_model(kind: str, more: Any, places: Any, base: float) -> None:
    found = pairs_of(seen_of(kind, **more))
    assert [(one, other) for one, other, _ in found] == places
    wanted = [2 * math.pi * base ** (n / len(places)) for n in range(len(places))]
    np.testing.assert_allclose([turn for _, _, turn in found], wanted, rtol=2e-3)


def test_none_where_nothing_is_turned_or_known() -> None:
    assert pairs_of(seen_of("Llama", values=False)) == ()
    assert pairs_of(seen_of("Bert")) == ()


def test_positions_that_do_not_follow_each_other_have_pairs_without_a_period() -> None:
    positions = torch.tensor([list(range(12)), [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    seen = seen_of("Llama", positions=positions)
    assert all(turn is not None for _, _, turn in pairs_of(seen, 0))
    found = pairs_of(seen, 1)
    assert [(one, other) for one, other, _ in found] == HALVES
    assert found[0][2] is None


def test_terms_by_frequency(open_report: Callable[..., Any]) -> None:
    seen = seen_of("Llama")
    layer = seen.layers(error=0)[0]
    opened = open_report([layer], "#head=1&token=9&pair=4")
    opened.page.locator("#terms summary").click()
    assert opened.page.inner_text("#terms-title") == "What each rotary frequency adds to the score"
    each = layer.scale * layer.query[1, 9].astype(np.float64) * layer.key[1, 4]
    terms = each[:8] + each[8:]
    order = np.argsort(-np.abs(terms))
    names = opened.page.locator("#term-list .name").all_inner_texts()
    periods = [f"{float(f'{2 * math.pi * 10_000 ** (n / 8):.2g}'):,g}" for n in order[:6]]
    wanted = [f"one turn in {p} positions, dimensions {n} and {n + 8}" for p, n in zip(periods, order, strict=False)]
    assert names == [*wanted, "the other 2"]
    shares = [float(x.replace("−", "-")) for x in opened.page.locator("#term-list .share").all_inner_texts()]
    np.testing.assert_allclose(shares, [*terms[order[:6]], terms[order[6:]].sum()], atol=6e-4)


def test_dimensions_that_are_not_turned_stand_alone(open_report: Callable[..., Any]) -> None:
    more = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}
    opened = open_report([seen_of("GPTNeoX", **more).layers(error=0)[0]], "#head=0&token=9&pair=4")
    opened.page.locator("#terms summary").click()
    names = opened.page.locator("#term-list .name").all_inner_texts()
    assert any(name.startswith("dimension ") for name in names)
    assert names[-1] == "the other 8"  # 2 frequencies and 12 dimensions
