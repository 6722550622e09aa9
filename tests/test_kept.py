"""Normal forms that are kept between calls: one limit in bytes for all tables."""

import gc

import pytest
import torch
from drawn import draw

import clearhead as ch
from clearhead.base import kept
from clearhead.base.kept import Memo, Table
from clearhead.models.interception.masks import MaskStore
from clearhead.problem import visible


@pytest.fixture(autouse=True)
def nothing_kept():
    for place in [*kept._order]:
        kept._drop(place)
    yield
    for place in [*kept._order]:
        kept._drop(place)


def held():
    """The bytes that all tables hold, by their values."""
    total = 0
    for (_, key), entry in kept._order.items():
        value = entry.table()[key]
        found = value[-1] if isinstance(value, tuple) and not isinstance(value, visible.Visible) else value
        parts = (*found.spans.edges(), *found.memo.values()) if isinstance(found, visible.Visible) else found.tensors()
        total += sum(map(kept.size_of, parts))
    return total


def test_all_tables_together_hold_a_limit_in_bytes(monkeypatch):
    """Masks that are plain values, masks that keep their own forms, and the masks of a recording."""
    monkeypatch.setattr(kept, "LIMIT", 2**17)
    streaming = ch.Causal() & (ch.SlidingWindow(before=63) | ch.FirstKeys(4))
    rule = ch.MaskFunction(lambda b, h, q, k: (q + k) % 3 != 0, reads=())
    store, masks = MaskStore(), [ch.Causal() & rule, ch.DenseMask(draw(150, 150) > 0)]
    for i in range(12):
        x = draw(1, 1, 700 + i, 8)
        torch.testing.assert_close(
            ch.attention(x, x, x, mask=streaming), ch.attention(x, x, x, mask=streaming, engine="sdpa")
        )
        few = x[:, :, :150]
        for mask in masks:
            ch.attention(few, few, few, mask=mask)
        ch.attention(x[:, :, : 250 + i], x[:, :, : 250 + i], x[:, :, : 250 + i], mask=masks[0])
        store.convert(draw(1, 1, 200 + i, 200, seed=i) > 0)
        assert held() <= 2**17 + 2**15  # the last value may have grown since it was kept
    assert 2**16 < held()
    assert len(visible._plain) and len(store._distinct) < 12


def test_masks_that_are_gone_take_no_memory():
    for seed in range(5):
        x, mask = draw(1, 1, 100, 8), ch.DenseMask(draw(100, 100, seed=seed) > 0)
        for _ in range(3):
            ch.attention(x, x, x, mask=mask)
    del mask
    gc.collect()
    y = draw(1, 1, 60, 8)
    ch.attention(y, y, y, mask=ch.Causal())
    assert len(kept._order) == 1


def test_the_values_used_longest_ago_are_dropped():
    table, other, memo = Table(3), Table(3), Memo()
    for key in range(3):
        table.keep(key, key, 10)
    assert table.use(0) == 0 and table.use(7) is None
    table.keep(3, 3, 10)
    assert [*table] == [0, 2, 3]
    other.keep(0, "large", kept.LIMIT - 30, memo)
    assert [*table] == [0, 2, 3] and [*other] == [0]
    memo["blocks"] = torch.zeros(10, dtype=torch.float64)
    table.keep(0, "new", 20)  # the oldest of both tables go
    assert dict(table) == {0: "new"} and not other
    other.keep(1, "alone", 2 * kept.LIMIT)
    assert not table and dict(other) == {1: "alone"}
