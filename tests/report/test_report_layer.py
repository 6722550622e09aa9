"""The heads and the tiles of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from clearhead.report.layer import of_heads, tiled


def test_grouped_heads_share_key_heads(make_case: Callable[..., Any]) -> None:
    layer = make_case(heads=6, key_heads=2).layer
    assert [layer.key_head(h) for h in range(6)] == [0, 0, 0, 1, 1, 1]


def test_the_one_head_of_a_layer_is_chosen(make_case: Callable[..., Any]) -> None:
    assert of_heads(make_case(heads=1, key_heads=1).layer, [0]).numbers == (0,)


def test_some_rows_of_a_tiled_matrix_begin_inside_a_tile() -> None:
    matrix = (np.arange(300 * 40) % 7).reshape(300, 40).astype(np.float32)
    made = tiled(lambda first, last: matrix[first:last], 300, 40)
    assert made is not None
    for first, last in ((0, 300), (5, 9), (130, 257)):
        np.testing.assert_array_equal(made.rows(first, last, 40), matrix[first:last])
