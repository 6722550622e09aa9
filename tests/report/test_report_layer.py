"""Layer refuses what does not fit together, and says which field."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clearhead.report.layer import PageBias, Tiles, tiled
from conftest import bias_of_matrix


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kind", "sideways", "Layer.kind is 'sideways'; it must be one of 'self', 'cross'"),
        ("query", np.zeros((7, 8)), "one sequence of a batch"),
        ("query", np.zeros((2, 0, 8)), "at least one head, query, key and feature"),
        ("key", np.zeros((3, 7, 8)), "3 heads, which must divide 2"),
        ("key", np.zeros((2, 7, 9)), r"Layer.key must be \(2, 7, 8\); got \(2, 7, 9\)"),
        ("start", np.zeros((3, 7)), r"Layer.start must be \(1, 7\) or \(2, 7\); got \(3, 7\)"),
        ("stop", np.zeros((1, 6)), "Layer.stop must be"),
        (
            "bias",
            PageBias(relative=np.zeros((2, 12))),
            r"Layer.bias.relative must be \(1, 13\) or \(2, 13\); got \(2, 12\)",
        ),
        ("bias", PageBias(dense=np.zeros((1, 7, 7))), r"Layer.bias.dense must be \(1, 7, 1\) or \(2, 7, 1\)"),
        ("bias", bias_of_matrix(np.ones((3, 7, 7))), "Layer.bias.tiles must be of 1 or 2 heads; got 3"),
        ("holes", (tiled(lambda a, b: np.ones((b - a, 7)) > 0, 7, 7),) * 3, "Layer.holes must be of 1 or 2 heads"),
        ("holes", (Tiles(np.zeros((1, 1), int), np.ones((1, 4, 4))),), r"Layer.holes cover \(4, 4\) pairs"),
        ("weight", np.zeros(7), r"Layer.weight must be \(8,\); got \(7,\)"),
        ("scores", np.zeros((2, 7, 7)), "no feature where scores are given"),
        ("phi", "max", "Layer.phi is 'max'; it must be one of 'mul', 'tanh_add', 'sq_diff'"),
        ("role", "middle", "Layer.role is 'middle'"),
        ("numbers", (1,), "Layer.numbers has 1 entries for 2 heads"),
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


def test_some_rows_of_a_tiled_matrix_begin_inside_a_tile() -> None:
    matrix = (np.arange(300 * 40) % 7).reshape(300, 40).astype(np.float32)
    made = tiled(lambda first, last: matrix[first:last], 300, 40)
    assert made is not None
    for first, last in ((0, 300), (5, 9), (130, 257)):
        np.testing.assert_array_equal(made.rows(first, last, 40), matrix[first:last])
