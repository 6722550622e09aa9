"""Layer refuses what does not fit together, and says which field."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kind", "sideways", 'Layer.kind is \'sideways\'; it must be "self" or "cross"'),
        ("query", np.zeros((7, 8)), "one sequence of a batch"),
        ("query", np.zeros((2, 0, 8)), "at least one head, query, key and feature"),
        ("key", np.zeros((3, 7, 8)), "3 heads, which must divide 2"),
        ("key", np.zeros((2, 7, 9)), r"Layer.key must be \(2, 7, 8\); got \(2, 7, 9\)"),
        ("start", np.zeros((3, 7)), r"Layer.start must be \(1, 7\) or \(2, 7\); got \(3, 7\)"),
        ("stop", np.zeros((1, 6)), "Layer.stop must be"),
        ("bias", np.zeros((7, 7)), "Layer.bias must be"),
        ("logsumexp", np.zeros((1, 7)), r"Layer.logsumexp must be \(2, 7\)"),
        ("entropy", np.zeros((2, 6)), "Layer.entropy must be"),
        ("received", np.zeros((2, 6)), "Layer.received must be"),
        ("distance", np.zeros((2, 6)), "Layer.distance must be"),
        ("thumbnail", np.zeros((1, 7, 7)), "Layer.thumbnail must be"),
        ("query_tokens", ["a"], "Layer.query_tokens has 1 tokens for length 7"),
        ("key_tokens", ["a"] * 8, "Layer.key_tokens has 8 tokens for length 7"),
    ],
)
def test_a_misfit_is_named(make_case: Callable[..., Any], field: str, value: Any, message: str) -> None:
    layer = make_case().layer
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(layer, **{field: value})


def test_grouped_heads_share_key_heads(make_case: Callable[..., Any]) -> None:
    layer = make_case(heads=6, key_heads=2).layer
    assert [layer.key_head(h) for h in range(6)] == [0, 0, 0, 1, 1, 1]
