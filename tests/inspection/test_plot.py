"""Pictures of weights, masks and positions, with matplotlib and in notebooks."""

import base64
import itertools
import re
import zlib

import numpy as np
import pytest
import torch
from apart import run

import clearhead as ch

matplotlib = pytest.importorskip("matplotlib", reason="the extra [plot] is not installed")
matplotlib.use("Agg")
pyplot = pytest.importorskip("matplotlib.pyplot", reason="the extra [plot] is not installed")


def test_a_small_head_shows_every_weight_and_its_words():
    weights = ch.weights(torch.rand(2, 3, 4, 8), torch.rand(2, 3, 5, 8))
    axes = weights.plot(1, 2, query_labels=["a", "b", "$c", "d"], key_labels=list("vwxyz"))
    assert torch.equal(torch.tensor(axes.images[0].get_array()), weights[1, 2])
    assert [label.get_text() for label in axes.get_xticklabels()] == list("vwxyz")
    axes.figure.canvas.draw()  # a lone dollar sign is no formula


def test_a_long_head_is_pooled():
    weights = ch.weights(torch.rand(1100, 4), torch.rand(1100, 4))
    axes = weights.plot()
    image = torch.tensor(axes.images[0].get_array())
    assert max(image.shape) <= 512
    torch.testing.assert_close(image.max(), weights.dense().max())


def random(*shape, length=6, width=8, seed=0, **options):
    make = torch.Generator().manual_seed(seed)
    return ch.weights(*(3 * torch.randn(*shape, length, width, generator=make) for _ in range(2)), **options)


def test_a_grid_has_one_scale_and_one_bar():
    weights = random(2, 5)
    axes = weights.plot(1, [0, 3, 4], title="Three of $5", query_labels=list("abcdef"), key_labels=list("uvwxyz"))
    assert len(axes) == 3 and len(axes[0].figure.axes) == 4  # and the bar
    assert {axis.images[0].norm for axis in axes} == {axes[0].images[0].norm}
    assert axes[0].images[0].norm.vmax == pytest.approx(float(weights[1].dense()[[0, 3, 4]].max()))
    for axis, head in zip(axes, (0, 3, 4), strict=True):
        assert axis.get_title() == f"head {head}"
        np.testing.assert_array_equal(axis.images[0].get_array(), weights[1, head])
    axes[0].figure.canvas.draw()
    assert [label.get_text() for label in axes[0].get_yticklabels()] == list("abcdef")
    assert [label.get_text() for label in axes[2].get_xticklabels()] == list("uvwxyz")
    assert len(weights.plot(0)) == 5 and len(weights.plot(slice(None), 2)) == 2 and len(weights.plot()) == 10


def written(axes):
    """The numbers in the cells, by their places, each with its colour."""
    found = {}
    for text in axes.texts:
        column, row = text.get_position()
        found[row, column] = (text.get_text(), text.get_color())
    return found


def contrast(one, other):
    """Of two colours, as WCAG 2.2 defines it."""
    levels = []
    for color in (one, other):
        rgb = np.array(matplotlib.colors.to_rgb(color))
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        levels.append(float(linear @ [0.2126, 0.7152, 0.0722]) + 0.05)
    return max(levels) / min(levels)


@pytest.mark.parametrize("options", [{}, {"cmap": "viridis"}, {"scale": "log"}, {"scale": 1.0}, {"cmap": "Greys"}])
def test_a_small_matrix_has_its_numbers_in_its_cells_and_they_can_be_read(options):
    weights = random(2, 3, mask=ch.Causal())
    axes = weights.plot(1, 2, **options)
    expected = weights[1, 2]
    found = written(axes)
    for i, j in itertools.product(range(6), range(6)):
        said, color = found.pop((i, j))
        assert said == ("0" if j > i else f"{expected[i, j]:.2f}")
        cell = (0.95,) * 3 if j > i else axes.images[0].to_rgba(axes.images[0].get_array())[i, j, :3]
        assert contrast(color, cell) >= 4.5
    assert not found


def test_numbers_fit_their_cells_or_are_left_out():
    for length, heads, said in ((8, 1, 64), (9, 1, 0), (8, 9, 64), (8, 20, 64)):
        axes = np.atleast_1d(random(heads, length=length).plot())
        assert {len(axis.texts) for axis in axes} == {said}
    axes = np.atleast_1d(random(4, length=8).plot())
    axes[0].figure.canvas.draw()
    cell = axes[0].get_window_extent().width / 8
    assert max(text.get_window_extent().width for text in axes[0].texts) <= cell
    narrow = pyplot.figure(figsize=(0.8, 0.8)).add_subplot()
    assert not random(length=8).plot(ax=narrow).texts


def test_small_numbers_have_the_decimals_they_need_and_what_is_missing_has_none():
    pictures = ch.base.output.pictures
    side = pictures.Side("row", 2), pictures.Side("column", 2)

    def said(*rows):
        cells = np.array(rows)
        panel = pictures.Panel(cells, np.isnan(cells))
        axes = pictures.draw([panel], *side, pictures.Style(scale="signed"), "effect")
        return {place: words for place, (words, _) in written(axes).items()}

    assert said([0.5, -0.25], [0.0, np.nan]) == {(0, 0): "0.50", (0, 1): "-0.25", (1, 0): "0.00"}
    assert said([0.012, 0.003], [0.0, 0.0])[0, 0] == "0.012"
    assert said([1.2e-7, 0.0], [0.0, 0.0]) == {}
    assert said([3.0, 1.0], [0.0, 2.0])[0, 0] == "3"


def test_a_small_mask_is_ones_and_zeros():
    found = written(ch.Causal().plot(3, 3))
    assert [[found[i, j][0] for j in range(3)] for i in range(3)] == [["1", "0", "0"], ["1", "1", "0"], ["1", "1", "1"]]


@pytest.mark.parametrize("length", [7, 600])
@pytest.mark.parametrize("how", ["mask", "bias", "both"])
def test_masked_cells_are_told_from_small_weights(how, length):
    keep = torch.ones(length, length, dtype=torch.bool).tril()
    keep[:, length // 2 : length // 2 + max(length // 7, 4 * (length // 600))] = False
    keep[:, 0] = True
    bias = torch.zeros(length, length).masked_fill(~keep, -torch.inf)
    options = {"mask": {"mask": keep}, "bias": {"bias": bias}, "both": {"mask": ch.Causal(), "bias": bias}}[how]
    weights = random(1, 2, length=length, **options)
    axes = weights.plot(0, 1)
    shown = axes.images[0].get_array()
    cell = -(-length // 512)
    spare = -length % cell
    dense = torch.nn.functional.pad(keep, (0, spare, 0, spare)).view(-1, cell, len(shown), cell)
    np.testing.assert_array_equal(np.ma.getmaskarray(shown), ~dense.any(3).any(1).numpy())
    assert np.ma.getmaskarray(shown).any() and axes.patches[0].get_hatch()
    assert "hatched" in axes.figure.axes[1].get_ylabel()


def test_what_is_nan_is_not_shown_as_masked():
    query = torch.randn(1, 4, 8)
    query[0, 2] = torch.nan
    axes = ch.weights(query, torch.randn(1, 4, 8), mask=ch.Causal()).plot(0)
    assert len(axes.images) == 2
    red = ~np.ma.getmaskarray(axes.images[1].get_array())
    assert red[2, :3].all() and not red[[0, 1, 3]].any() and not red[2, 3]


def test_a_log_scale_shows_zero_as_its_least():
    axes = random(1, 1, length=9).plot(0, 0, scale="log")
    shown = axes.images[0].get_array()
    assert axes.images[0].norm.vmin == pytest.approx(0.1 / 9) and shown.min() >= 0.1 / 9
    assert not np.ma.getmaskarray(shown).any()


def test_a_long_head_among_many_is_computed_alone():
    """No map of the other heads, and no 3,000 × 3,000 array, is made."""
    weights = random(1, 64, length=3000, width=4, mask=ch.Causal())
    axes = weights.plot(0, [3, 7])
    shown = axes[1].images[0].get_array()
    assert shown.shape == (250, 250)
    np.testing.assert_allclose(shown[40, :40], weights[0, 7, 480:492, :480].view(12, 40, 12).amax((0, 2)), atol=1e-6)


def test_numpy_and_hostile_words():
    rng = np.random.default_rng(0)
    weights = ch.weights(rng.normal(size=(2, 4, 8)), rng.normal(size=(2, 4, 8)))
    words = ["$x$", "\x1b[31m", "a\nb", "\u202eb"]
    axes = weights.plot(0, query_labels=words, key_labels=words, title="$\\frac{$")
    axes.figure.canvas.draw()
    assert [t.get_text() for t in axes.get_xticklabels()] == [r"\$x\$", r"\x1b[31m", r"a\nb", r"\u202eb"]


def test_a_word_of_any_length_is_cut(tmp_path):
    q, words = torch.eye(2), ["short", "long" * 10_000]
    axes = ch.weights(q, q).plot(query_labels=words)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["short", ("long" * 10)[:39] + "…"]
    picture = ch.explain(q, q, q, tokens=words).write(tmp_path / "steps.svg")
    assert picture.stat().st_size < 200_000


def test_calls_share_a_scale_that_is_given():
    figure, axes = pyplot.subplots(1, 2, layout="constrained")
    for seed, axis in enumerate(axes):
        random(1, seed=seed).plot(0, scale=0.5, bar=False, ax=axis)
    assert len(figure.axes) == 2 and {axis.images[0].norm.vmax for axis in axes} == {0.5}
    bar = random(1).plot(0, scale=1e-3).figure.axes[1]  # weights beyond the scale are told by the bar's end
    assert bar._colorbar.extend == "max"
    assert random(1).plot(0).figure.axes[1]._colorbar.extend == "neither"


@pytest.mark.parametrize("length", [2, 3, 5, 12, 64, 100])
def test_ticks_are_positions(length):
    axes = [random(1, length=length).plot(0), *random(1, 3, length=length).plot(0)]
    axes += [ch.Causal().plot(length, length)]
    for axis in axes:
        axis.figure.canvas.draw()
        for way in (axis.xaxis, axis.yaxis):
            assert all(float(tick).is_integer() for tick in way.get_majorticklocs())


@pytest.mark.parametrize(
    ("length", "heads", "letters"), [(3, 1, 24), (12, 6, 10), (12, 1, 24), (40, 6, 6), (64, 1, 10), (200, 6, 24)]
)
def test_words_do_not_overlap(length, heads, letters):
    words = [f"word{i % 7}" if i % 3 else "x" for i in range(length)]
    with pyplot.rc_context({"font.size": letters}):
        axes = np.atleast_1d(random(1, heads, length=length).plot(0, query_labels=words, key_labels=words))
        axes[0].figure.canvas.draw()
        for axis in axes:
            for way, side in ((axis.xaxis, 0), (axis.yaxis, 1)):
                boxes = [t.get_window_extent() for t in way.get_ticklabels() if t.get_text()]
                ends = sorted((box.min[side], box.max[side]) for box in boxes)
                assert all(first[1] <= second[0] + 1 for first, second in itertools.pairwise(ends))


def test_single_letters_stand_upright():
    date = random(1, length=10).plot(0, key_labels=list("2019-02-15"), query_labels=list("2019-02-15"))
    assert {label.get_rotation() for label in date.get_xticklabels()} == {0}
    long = random(1, length=10).plot(0, key_labels=["understanding"] * 10)
    assert {label.get_rotation() for label in long.get_xticklabels()} == {90}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scale": 0}, "or a number > 0"),
        ({"scale": True}, "or a number > 0"),
        ({"scale": float("nan")}, "or a number > 0"),
        ({"scale": np.ones(2)}, "or a number > 0"),
        ({"scale": "root"}, "'linear' or 'log'"),
        ({"title": 3}, "title is a int"),
    ],
)
def test_bad_looks(given, said):
    with pytest.raises(ch.ClearheadError, match=said):
        random(2).plot(0, **given)


def test_bad_input():
    weights = ch.weights(torch.rand(2, 4, 8), torch.rand(2, 5, 8))
    with pytest.raises(ch.ClearheadError, match="takes 1 numbers at most"):
        weights.plot(0, 1)
    with pytest.raises(ch.ClearheadError, match="a head of plot"):
        weights.plot(2)
    with pytest.raises(ch.ClearheadError, match="one axes is given"):
        weights.plot(ax=weights.plot(0))
    with pytest.raises(ch.ClearheadError, match="these are 65"):
        random(65).plot()
    with pytest.raises(ch.ClearheadError, match="query_labels has 1 words for 4"):
        weights.plot(0, query_labels=["a"])


def test_masks():
    axes = (ch.Causal() & ch.SlidingWindow(before=1)).plot(5, 6, align="lower_right", key_labels=list("abcdef"))
    shown = axes.images[0].get_array()
    assert axes.get_title() == "Causal() & SlidingWindow(before=1)"
    np.testing.assert_array_equal(~np.ma.getmaskarray(shown), np.eye(5, 6, 0) + np.eye(5, 6, 1) > 0)
    axes = ch.Lengths([2, 3]).plot(torch.zeros(2, 4, 8))
    assert [axis.get_title() for axis in axes] == ["sequence 0", "sequence 1"]
    assert [(~np.ma.getmaskarray(axis.images[0].get_array())).sum() for axis in axes] == [8, 12]
    assert ch.Causal().plot().images[0].get_array().shape == (6, 6)


def test_a_mask_of_lengths_has_whole_ticks_a_grid_and_a_picture_for_each_sequence():
    for given, rows, columns in (((), 1, 4), ((3, 5), 3, 5)):
        axes = ch.Lengths([2, 4]).plot(*given)
        assert [axis.get_title() for axis in axes] == ["sequence 0", "sequence 1"]
        axes[0].figure.canvas.draw()
        for axis, length in zip(axes, (2, 4), strict=True):
            assert axis.images[0].get_array().shape == (rows, columns)
            assert (~np.ma.getmaskarray(axis.images[0].get_array())).sum() == rows * length
            for ticks, lines, size in (
                (axis.get_yticks(), axis.get_yticks(minor=True), rows),
                (axis.get_xticks(), axis.get_xticks(minor=True), columns),
            ):
                inside = [tick for tick in ticks if -0.5 < tick < size - 0.5]
                assert inside and all(float(tick).is_integer() for tick in inside)
                assert list(lines) == [n + 0.5 for n in range(size - 1)]
    wide = ch.Causal().plot(300)
    assert len(wide.get_xticks(minor=True)) == 0


def test_lengths_of_queries_and_keys_are_enough_for_every_mask():
    keep = torch.tensor([[True, False, True, True, False], [True, True, True, False, False]])
    causal = torch.ones(3, 5).tril(2).bool()
    masks = {
        (2,): ch.Lengths([2, 4]) & ch.Causal(),
        (1, 2): ch.DenseMask(torch.ones(1, 2, 3, 5).bool()),
        (): ch.Causal() | ch.SlidingWindow(before=1),
    }
    for leading, mask in masks.items():
        whole = mask.dense(3, 5, "lower_right")
        assert whole.shape == (*leading, 3, 5)
        assert len(np.atleast_1d(mask.plot(3, 5, "lower_right"))) == (leading[-1] if leading else 1)
    assert torch.equal(masks[2,].dense(3, 5, "lower_right"), causal & (torch.arange(5) < torch.tensor([[[2]], [[4]]])))
    assert torch.equal(ch.Padding(keep).dense(3, 5), keep[:, None].expand(2, 3, 5))


def test_a_long_mask_is_shares_of_pairs():
    shown = ch.Causal().plot(1500).images[0].get_array()
    assert shown.shape == (500, 500)
    np.testing.assert_allclose(np.diag(shown), 6 / 9)  # 3 × 3 pairs, of which the lower triangle
    assert float(shown.filled(0).mean()) == pytest.approx(1501 / 3000)


def test_positions():
    encode = ch.nn.SinusoidalPositionalEncoding(8)
    shown = encode.plot(20).images[0].get_array()
    np.testing.assert_allclose(shown, encode(torch.zeros(20, 8)), atol=1e-6)
    learnt = ch.nn.LearnedPositionalEncoding(10, 4)
    axes = learnt.plot(title="Learnt")
    np.testing.assert_array_equal(axes.images[0].get_array(), learnt.P.detach())
    assert axes.images[0].norm.vmin == -axes.images[0].norm.vmax and axes.get_title() == "Learnt"
    cos, sin = ch.nn.RotaryEmbedding(6).plot(30)
    angles = np.arange(30)[:, None] * 10000.0 ** (-np.arange(0, 6, 2) / 6)
    np.testing.assert_allclose(cos.images[0].get_array(), np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(sin.images[0].get_array(), np.sin(angles), atol=1e-5)
    assert encode.plot(3000).images[0].get_array().shape == (512, 8)
    with pytest.raises(ch.ClearheadError, match="length"):
        learnt.plot(11)


def cells_of(image):
    """The colours by number of a PNG."""
    data = base64.b64decode(image)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    at, found = 8, b""
    while at < len(data):
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + size]
        assert zlib.crc32(kind + body) == int.from_bytes(data[at + 8 + size : at + 12 + size], "big")
        found += body if kind == b"IDAT" else b""
        at += 12 + size
    return np.frombuffer(zlib.decompress(found), np.uint8).reshape(height, width + 1)[:, 1:]


def images_of(html):
    return [cells_of(image) for image in re.findall(r'src="data:image/png;base64,([^"]*)"', html)]


def test_a_notebook_shows_small_pictures_without_scripts():
    weights = random(1, 20, length=50, mask=ch.Causal())
    html = weights._repr_html_()
    found = images_of(html)
    assert len(found) == 12 and "8 more not shown" in html and "<script" not in html and len(html) < 50_000
    for head, codes in enumerate(found):
        map = weights.pool(32)[0, head].numpy()
        assert ((codes == 0) == (np.arange(25)[:, None] < np.arange(25))).all()
        share = np.clip(1 - np.log(np.maximum(map, 0.1 / 50)) / np.log(0.1 / 50), 0, 1)
        np.testing.assert_allclose(codes[codes > 0], (2 + share * 253)[codes > 0], atol=0.6)


def test_a_notebook_computes_nothing_of_a_long_call():
    html = random(1, 8, length=20_000, width=2)._repr_html_()
    assert "Nothing is computed" in html and "<img" not in html
    assert "<img" not in ch.weights(torch.rand(2, 3, device="meta"), torch.rand(2, 3, device="meta"))._repr_html_()
    assert "<img" in ch.weights(np.eye(4), np.eye(4))._repr_html_()


def test_a_mask_in_a_notebook_is_escaped():
    def rule(b, h, q, k):
        return q >= k

    rule.__name__ = rule.__qualname__ = "<b onload=x>"
    for mask in (ch.MaskFunction(rule), ch.Causal() | ch.MaskFunction(rule)):
        assert "<b " not in mask._repr_html_()
    (codes,) = images_of(ch.Causal()._repr_html_())
    assert ((codes > 0) == np.tri(6, dtype=bool)).all()
    assert "Lengths" in ch.Lengths(torch.full((9,), 3))._repr_html_()


def test_notebooks_need_no_matplotlib():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import torch, clearhead as ch\n"
        "print(len(ch.weights(torch.rand(4, 2), torch.rand(4, 2))._repr_html_() + ch.Causal()._repr_html_()) > 100)\n"
        "try: ch.Causal().plot()\n"
        "except ch.ClearheadError as error: print(error)"
    )
    done = run(code)
    assert done.status == 0 and done.out.startswith("True\n") and "clearhead[plot]" in done.out, done.errors
