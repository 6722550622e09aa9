"""A pair that the mask hides receives no gradient, whatever becomes of the row of its query."""

import math

import pytest
import torch

import clearhead as ch

HEADS, KEY_HEADS, LENGTH, WIDTH, ROW, KEY = 4, 2, 12, 4, 6, 7
ROWS, KEYS = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
MASKS = {
    "causal": (ch.Causal(), KEYS <= ROWS),
    "gaps": (ch.Causal() & (ch.SlidingWindow(before=2) | ch.Lengths([2])),
             (KEYS <= ROWS) & ((ROWS - KEYS < 3) | (KEYS < 2))),
    "rule": (ch.MaskFunction(lambda b, h, i, j: (j <= i) & ((i + j) % 3 != 1) | (i == j)),
             (KEYS <= ROWS) & ((ROWS + KEYS) % 3 != 1) | (ROWS == KEYS)),
}  # fmt: skip


class Own(ch.extend.Score):
    def tile(self, query, key):
        return query @ key.mT / 2


SCORES = {
    "dot": ch.Dot(),
    "softcap": ch.Dot(softcap=2.0),
    "changed": ch.Dot(softcap=2.0).then(lambda s, b, h, i, j: 1.5 * s - 0.01 * (i - j)),
    "tile": Own(),
}
BIASES = {"none": None, "numbers": torch.linspace(-1, 1, LENGTH).expand(1, HEADS, LENGTH, LENGTH),
          "function": ch.BiasFunction(lambda b, h, i, j: -0.1 * (i - j).abs())}  # fmt: skip


def whole(query, key, value, sinks, engine, **given):
    return ch.attention(query, key, value, sinks=sinks, engine=engine, **given)


def joined(query, key, value, sinks, engine, **given):
    """The same from two partial results."""
    parts = [
        ch.partial(query, key[:, :, at], value[:, :, at], keys=(at.start, LENGTH), engine=engine, **given)
        for at in (slice(0, 5), slice(5, LENGTH))
    ]
    return parts[0].merge(parts[1]).finish(sinks)


def looked_at(query, key, value, sinks, engine, **given):
    output = ch.weights(query, key, sinks=sinks, engine=engine, **given).reduce(ch.reductions.Output(value))
    return output


def traced(query, key, value, sinks, engine, **given):
    def call(*inputs):
        return whole(*inputs, engine, **given)

    return torch.compile(call, backend="aot_eager")(query, key, value, sinks)


def gradients(run, inputs, grad, **given):
    """The output, and the gradients of query, key, value, and the bias that is numbers."""
    tensors = {name: t.clone().requires_grad_() for name, t in inputs.items() if isinstance(t, torch.Tensor)}
    output = run(**given, **(inputs | tensors))
    wanted = [tensors[name] for name in ("query", "key", "value", "bias") if name in tensors]
    return output.detach(), torch.autograd.grad(output, wanted, grad)


def check(run, engine, score, mask, keep, bias, sinks, bad):
    """Of a row that is NaN, nothing reaches what it does not see: as if the row had no part in the loss."""
    torch.manual_seed(0)
    shapes = ((HEADS, LENGTH), (KEY_HEADS, LENGTH), (KEY_HEADS, LENGTH))
    query, key, value = (torch.randn(1, *shape, WIDTH) for shape in shapes)
    clean = {"query": query, "key": key, "value": value, "bias": bias, "sinks": sinks}
    broken = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in clean.items()}
    rows = torch.arange(LENGTH) == ROW
    if bad == "bias":
        broken["bias"][:, :, ROW, 0] = math.inf
    elif bad == "query":
        broken["query"][:, :, ROW] = math.nan
    else:
        broken[bad][:, :, KEY, 1] = math.nan
        rows = keep[:, KEY]
    given, grad = {"engine": engine, "score": score, "mask": mask}, torch.randn(1, HEADS, LENGTH, WIDTH)
    output, found = gradients(run, broken, grad, **given)
    _, want = gradients(run, clean, grad.masked_fill(rows[:, None], 0.0), **given)
    assert output[:, :, rows].isnan().all() and output[:, :, ~rows].isfinite().all()
    hidden = ~keep[rows].any(0)
    torch.testing.assert_close(found[0][:, :, ~rows], want[0][:, :, ~rows])
    for got, one in zip(found[1:3], want[1:3], strict=True):
        torch.testing.assert_close(got[:, :, hidden], one[:, :, hidden])
    for got, one in zip(found[3:], want[3:], strict=True):  # the bias
        pairs = ~(rows[:, None] & keep)
        torch.testing.assert_close(got[:, :, pairs], one[:, :, pairs])


@pytest.mark.parametrize("run", [whole, joined, looked_at])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 1, HEADS)], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("engine", [None, "tiled", "reference"])
def test_a_row_of_nan_reaches_nothing_that_it_does_not_see(run, sinks, score, engine):
    for mask, keep in MASKS.values():
        for name, bias in BIASES.items():
            for bad in ("query", "key", "value", *(["bias"] if name == "numbers" else [])):
                check(run, engine, SCORES[score], mask, keep, bias, sinks, bad)


@pytest.mark.parametrize("score", ["dot", "tile"])
def test_in_compiled_code(score):
    for bias in (None, BIASES["numbers"]):
        check(traced, None, SCORES[score], *MASKS["causal"], bias, torch.zeros(HEADS), "query")


@pytest.mark.parametrize("run", [whole, joined, looked_at])
@pytest.mark.parametrize("sinks", [None, torch.zeros(HEADS)], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("engine", [None, "tiled", "reference"])
def test_pairs_that_a_float_mask_hides(run, sinks, score, engine):
    """A score of −∞ beside one of +∞, which makes the row NaN."""
    keep = MASKS["causal"][1]
    check(run, engine, SCORES[score], None, keep, torch.zeros(1, HEADS, LENGTH, LENGTH).masked_fill(~keep, -math.inf),
          sinks, "bias")  # fmt: skip
