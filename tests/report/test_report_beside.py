"""Two recordings beside each other on one page: the numbers are those of `compare`, the words those of both."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead.models.loading import bundled, load

Make = Callable[..., Any]
COMPARED = "document.getElementById('clearhead').dataset.compare"
SHOWN = "document.getElementById('clearhead').dataset.shown"
FENCES = "\u2068|\u2069"
TIRED = "The animal did not cross the street because it was too tired."
WIDE = "The animal did not cross the street because it was too wide."
MOVED = "The old animal did not cross the street because it was tired."
OTHER = "Yesterday the animal did not cross the road because it was too wide."
LONGER = "Yesterday the old animal didn't cross the street because it was wide."


def perturbed(model: Any) -> Any:
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return other


@pytest.fixture(scope="module")
def bert() -> Any:
    return load(bundled())


def watched(model: Any, tokenizer: Any, *texts: str, **options: Any) -> tuple[Any, list[list[str]]]:
    """A recording of the texts, and the words of each."""
    inputs = tokenizer(list(texts), return_tensors="pt", **options)
    with torch.no_grad(), ch.watch(model) as seen:
        model(**inputs)
    return seen, [tokenizer.convert_ids_to_tokens(ids) for ids in inputs["input_ids"]]


def meta_of(html: str) -> Any:
    found = re.search(r'id="meta">(.*?)</script>', html, re.S)
    assert found
    return json.loads(found[1])


def named(place: str) -> str:
    """ "7.2" as the page of BERT, of six layers, names it: "L1′H2"."""
    layer, head = map(int, place.split("."))
    return f"L{layer % 6}{'′' * (layer >= 6)}H{head}"


def compared(opened: Any, a: str, b: str) -> Any:
    opened.page.evaluate(f"location.hash = '#layer=0&head=0&a={a}&b={b}'")
    title = " − ".join(named(side) for side in (a, b))
    opened.page.wait_for_selector(f"#compare-title:text-is('{title}')")
    opened.until(COMPARED, "drawn")
    return opened.page.evaluate("clearhead.compare()")


def check(opened: Any, found: Any, heads: list[tuple[int, int]], mine: Any, atol: float) -> None:
    """The page's numbers are those of `compare`, at the positions `mine` of the first text."""
    count = len(found.calls)
    for layer, head in heads:
        page = compared(opened, f"{layer}.{head}", f"{layer + count}.{head}")
        got = np.array(page["byQuery"], dtype=float)
        np.testing.assert_allclose(got[mine], found[layer].by_query[0, head], rtol=0, atol=atol)
        assert np.isnan(np.delete(got, mine)).all()
        assert page["mean"] == pytest.approx(float(found[layer].divergence[head]), abs=atol)
        difference = -found[layer].weights[0, head].dense().double().numpy()
        place = {int(at): n for n, at in enumerate(mine)}
        for pair in page["largest"]:
            want = difference[place[pair["i"]], place[pair["j"]]]
            assert pair["a"] - pair["b"] == pytest.approx(want, abs=atol)
        sizes = np.sort(np.abs(difference).ravel())[::-1][:12]
        np.testing.assert_allclose(sorted(abs(p["a"] - p["b"]) for p in page["largest"])[::-1], sizes, atol=atol)


def check_measure(html: str, found: Any) -> None:
    """The page's divergence of each head is that of `compare`."""
    meta = meta_of(html)
    at = [measure["name"] for measure in meta["measures"]].index("divergence")
    for number, call in enumerate(found.calls):
        values = [head["measures"][at] for head in meta["layers"][number]["heads"]]
        np.testing.assert_allclose([value for value, _ in values], call.divergence, rtol=1e-4)
        assert {uniform for _, uniform in values} == {0}
        beside = [head["measures"][at] for head in meta["layers"][number + len(found.calls)]["heads"]]
        assert beside == values  # it is the same from either side
    place = meta["distinctive"]
    assert (place["layer"], place["head"]) == found.most and place["measure"] == "divergence"
    assert place["sentence"] == str(found)


HEADS = [(0, 0), (3, 1), (5, 8)]


@pytest.mark.parametrize("error", [0, 1e-4])
def test_texts_of_one_length(bert: Any, open_report: Make, tmp_path: Path, error: float) -> None:
    (one, (words,)), (two, (others,)) = watched(*bert, TIRED), watched(*bert, WIDE)
    found = one.compare(two)
    html = (
        one.view(tokens=words, beside=two, beside_tokens=others, **{} if error else {"error": 0})
        .write(tmp_path / "page.html")
        .read_text()
    )
    check_measure(html, found)
    stated = max(layer["error"] or 0 for layer in meta_of(html)["layers"])
    assert (stated > 0) == (error > 0) and stated < 1.5e-4 and meta_of(html)["aligned"] == []
    check(open_report([], html=html), found, HEADS, np.arange(len(words)), atol=stated if error else 1e-6)


@pytest.mark.parametrize("text", [LONGER, MOVED, OTHER], ids=["longer", "as long, its words moved", "words replaced"])
def test_texts_whose_words_are_aligned(bert: Any, open_report: Make, tmp_path: Path, text: str) -> None:
    (one, (words,)), (two, (others,)) = watched(*bert, TIRED), watched(*bert, text)
    assert (len(words) == len(others)) == (text == MOVED)
    places = ch.models.match_tokens(words, others, replaced=True)
    replaced = [(words[i], others[j]) for i, j in zip(*places, strict=True) if words[i] != others[j]]
    assert replaced == ([("street", "road"), ("tired", "wide")] if text == OTHER else [])
    found = one.compare(two, matched=places)
    html = one.view(tokens=words, beside=two, beside_tokens=others, error=0).write(tmp_path / "page.html").read_text()
    check_measure(html, found)
    opened = open_report([], html=html)
    check(opened, found, [(0, 2), (4, 7)], np.array(places[0]), 1e-6)
    said = opened.page.inner_text("#compare-said")
    first, second = (len(side) - len(places[0]) for side in (words, others))
    alone = f"{first} {'query' if first == 1 else 'queries'} that only the first text has, and {second} that only"
    assert f"Not compared: {alone} the second has." in said
    # the other way round, on the words of the second
    page = compared(opened, "6.2", "0.2")
    np.testing.assert_allclose(
        np.array(page["byQuery"], dtype=float)[places[1]], found[0].by_query[0, 2], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_in_one_of_them(bert: Any, open_report: Make, tmp_path: Path, side: str) -> None:
    """Texts of as many words, one of which is padded; positions on the page are those of words."""
    model, tokenizer = bert
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = side
    one, (padded,) = watched(model, tokenizer, TIRED, padding="max_length", max_length=20)
    two, (others,) = watched(model, tokenizer, WIDE)
    shown = [at for at, word in enumerate(padded) if word != "[PAD]"]
    assert len(shown) == len(others) < len(padded)
    found = one.compare(two, matched=(shown, range(len(others))))
    html = one.view(tokens=padded, beside=two, beside_tokens=others, error=0).write(tmp_path / "page.html").read_text()
    check_measure(html, found)
    check(open_report([], html=html), found, HEADS[:2], np.arange(len(others)), 1e-6)


def test_one_sequence_of_a_batch(bert: Any, open_report: Make, tmp_path: Path) -> None:
    """Of batches of two texts, padded otherwise in each, the second ones, whose lengths differ."""
    one, words = watched(*bert, "A short one.", LONGER, padding=True)
    two, others = watched(*bert, TIRED + " Really.", WIDE, padding=True)
    (alone, _), (other, (wide,)) = watched(*bert, LONGER), watched(*bert, WIDE)
    places = ch.models.match_tokens(words[1], wide)
    found = alone.compare(other, matched=places)
    html = (
        one.view(tokens=words[1], beside=two, beside_tokens=others[1], sequence=1, error=0)
        .write(tmp_path / "page.html")
        .read_text()
    )
    at = [measure["name"] for measure in meta_of(html)["measures"]].index("divergence")
    for number, call in enumerate(found.calls):
        got = [head["measures"][at][0] for head in meta_of(html)["layers"][number]["heads"]]
        np.testing.assert_allclose(got, call.divergence, rtol=1e-3, atol=1e-6)
    check(open_report([], html=html), found, [(2, 5)], np.array(places[0]), 1e-6)


def test_the_matrix_and_the_choices(bert: Any, open_report: Make, tmp_path: Path) -> None:
    (one, (words,)), (two, (others,)) = watched(*bert, TIRED), watched(*bert, LONGER)
    found = one.compare(two, matched=ch.models.match_tokens(words, others))
    html = one.view(tokens=words, beside=two, beside_tokens=others).write(tmp_path / "page.html").read_text()
    opened = open_report([], html=html)
    page = opened.page
    layer, head = found.most
    assert opened.shown.startswith(f"{layer}/{head}/")
    assert page.locator("#heads h3").all_inner_texts() == ["Self attention", "Self attention, beside"]
    assert page.input_value("#measure") == "divergence"
    value = float(found[layer].divergence[head])
    label = page.locator(".head[aria-current]").get_attribute("aria-label")
    assert label and label == f"L{layer}H{head}, self, divergence from the other {value:.2g} nats"
    assert page.locator("#heads-ticks").inner_text().split("\n")[0] == "the same weights"
    assert page.locator("#five button:has-text('′')").count() == 0
    page.fill("#only", "L3'")
    opened.until("location.hash.includes('only=')")
    assert page.inner_text("#only-count").startswith("12 of 144")
    page.fill("#only", "")
    # one button for the same head of the other
    assert page.inner_text("#counterpart") == f"Compare L{layer}H{head} with L{layer}′H{head}"
    page.click("#counterpart")
    opened.until(COMPARED, "drawn")
    assert page.inner_text("#compare-title") == f"L{layer}H{head} − L{layer}′H{head}"
    # the chosen token goes along to the other text, which says what it looks at there
    places = dict(zip(*ch.models.match_tokens(words, others), strict=True))
    page.evaluate(f"location.hash = '#layer=0&head=2&token={words.index('street')}&a=0.2&b=6.2'")
    opened.until("clearhead.state().head", 2)
    opened.until(COMPARED, "drawn")
    page.locator(".head").nth(6 * 12 + 2).click()
    opened.until("clearhead.state().layer", 6)
    opened.until("clearhead.state().token", places[words.index("street")])
    # a pair that is taken is one of the text that is shown
    opened.until(COMPARED, "drawn")
    first = page.evaluate("clearhead.compare().largest[0]")
    page.locator("#apart-list button").first.click()
    opened.until(SHOWN, f"6/2/out/{places[first['i']]}/{places[first['j']]}")
    name = re.sub(FENCES, "", page.inner_text("#apart-pair"))
    assert name.startswith(re.sub(FENCES, "", page.locator("#apart-list .name").first.inner_text()))
    # a link restores all of it
    link = page.evaluate("location.hash")
    again = open_report([], link, html=html)
    again.until(COMPARED, "drawn")
    assert again.page.evaluate("location.hash") == link
    assert again.page.inner_text("#compare-title") == "L0H2 − L0′H2"
    assert again.page.inner_text("#apart-pair") == page.inner_text("#apart-pair")


LOOKS = """all => all.map((p) => Array.from(p.querySelectorAll("span"), (one) => one.style.backgroundColor !== ""))"""
CELLS = """(canvas, count) => {
    const copy = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
    const pen = copy.getContext("2d", { willReadFrequently: true });
    pen.drawImage(canvas, 0, 0);
    const at = (cell, size) => Math.floor(((cell + 0.2) / count) * size);
    const each = (give) => Array.from({ length: count }, (_, cell) => give(cell));
    return each((row) => each((column) => Array.from(
        pen.getImageData(at(column, canvas.width), at(row, canvas.height), 1, 1).data.slice(0, 3))));
}"""  # the colour of each cell, near a corner of it


def joined(mine: list[int], theirs: list[int], one: int, other: int) -> list[tuple[int, int]]:
    """The positions of two texts as one text: those that correspond together, −1 where a text lacks the word."""
    found, places = [], [-1, -1]
    for i, j in [*zip(mine, theirs, strict=True), (one, other)]:
        found += [(k, -1) for k in range(places[0] + 1, i)] + [(-1, k) for k in range(places[1] + 1, j)] + [(i, j)]
        places = [i, j]
    return found[:-1]


def test_both_texts_and_both_maps_stand_in_the_comparison(bert: Any, open_report: Make, tmp_path: Path) -> None:
    (one, (words,)), (two, (others,)) = watched(*bert, TIRED), watched(*bert, LONGER)
    html = one.view(tokens=words, beside=two, beside_tokens=others).write(tmp_path / "page.html").read_text()
    token = words.index("street")
    opened = open_report([], f"#layer=0&head=8&token={token}&a=0.8&b=6.8", html=html)
    page = opened.page
    opened.until(COMPARED, "drawn")
    texts = joined(*ch.models.match_tokens(words, others, replaced=True), len(words), len(others))
    assert len(texts) > max(len(words), len(others))
    titles = [re.sub(FENCES, "", title) for title in page.locator("#both h3").all_inner_texts()]
    assert titles == ["L0H8: where “street” looks", "L0′H8: where “street” looks"]
    weights = [side.calls[0].weights.dense()[0, 8].double().numpy() for side in (one, two)]
    shaded = page.locator("#both .shaded").evaluate_all(LOOKS)
    for got, all_weights, text in zip(shaded, weights, (words, others), strict=True):
        clear = np.abs(all_weights[text.index("street")] * len(text) - 1) > 0.02
        assert (np.array(got) == (all_weights[text.index("street")] * len(text) > 1))[clear].all()
    only = "Words in blue are in the text of L0H8 alone, words in brown in that of L0′H8"
    assert only in page.inner_text("#apart-only")
    assert "square root" in page.inner_text("#compare-shown")
    grey = [int("b3b9c4"[at : at + 2], 16) for at in (0, 2, 4)]  # hatched, where a text lacks a word
    for side in (0, 1):
        colours = np.array(page.locator("#both canvas").nth(side).evaluate(CELLS, len(texts)))
        has = np.array([places[side] >= 0 for places in texts])
        assert ((colours == grey).all(-1) == ~(has[:, None] & has)).all(), side
    # a pair of a word that the second text alone has: its head is chosen
    at, box = texts.index((-1, others.index("yesterday"))), page.locator("#both canvas").nth(1).bounding_box()
    place = {"x": (at + 0.5) / len(texts) * box["width"], "y": (at + 0.5) / len(texts) * box["height"]}
    page.locator("#both canvas").nth(1).click(position=place)
    opened.until(SHOWN, "6/8/out/1/1")
    opened.until(COMPARED, "drawn")
    said = re.sub(FENCES, "", page.inner_text("#apart-pair"))
    assert re.match(r"yesterday → yesterday: [\d.e-]+%; only one text has this pair$", said), said
    assert float(said.split(": ")[1].split("%")[0]) == pytest.approx(100 * weights[1][1, 1], rel=0.06)
    titles = [re.sub(FENCES, "", title) for title in page.locator("#both h3").all_inner_texts()]
    assert titles == ["L0H8: its text lacks “yesterday”", "L0′H8: where “yesterday” looks"]


def test_words_that_differ_are_both_named(bert: Any, open_report: Make, tmp_path: Path) -> None:
    bad = "<img src=x onerror=alert(1)>"
    (one, (words,)), (two, (others,)) = watched(*bert, TIRED), watched(*bert, WIDE)
    at = words.index("tired")
    html = (
        one.view(tokens=words, beside=two, beside_tokens=[*others[:at], bad, *others[at + 1 :]])
        .write(tmp_path / "page.html")
        .read_text()
    )
    assert bad not in html
    opened = open_report([], f"#layer=0&head=0&token={at}&pair=0&a=0.0&b=6.0", html=html)
    opened.until(COMPARED, "drawn")
    said = re.sub(FENCES, "", opened.page.inner_text("#apart-pair"))
    assert said.startswith("tired / <img src=x onerror=aler… → [CLS]: ")
    assert opened.page.locator("main img, main script").count() == 0
    for width in (390, 1280):
        opened.page.set_viewport_size({"width": width, "height": 800})
        opened.page.wait_for_timeout(250)
        assert opened.page.locator("#compare").evaluate("e => e.scrollWidth <= e.clientWidth"), width
        assert opened.page.locator("#overview").evaluate("e => e.scrollWidth <= e.clientWidth"), width


class Block(torch.nn.Module):
    def forward(self, x: Any, mask: Any = None) -> Any:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def block_seen(length: int, heads: int = 2, batch: int = 1, mask: Any = None) -> Any:
    block, generator = Block(), torch.Generator().manual_seed(length)
    with ch.watch(block) as seen:
        block(torch.randn(batch, heads, length, 4, generator=generator), mask)
    return seen


def test_what_does_not_fit_is_an_error(tmp_path: Path) -> None:
    path, seen, longer = tmp_path / "page.html", block_seen(3), block_seen(4)
    words, more = ["a", "b", "c"], ["a", "x", "b", "c"]
    two = ch.models.Recording([*seen.calls, *seen.calls])
    for options, said in (
        ({"beside_tokens": words}, "beside_tokens= are the words of beside="),
        ({"beside": two}, "this recording has 1 calls and the other 2"),
        ({"beside": block_seen(3, heads=1)}, "with other heads or sequences"),
        ({"beside": longer}, "have 3 and 4 tokens: pass tokens="),
        ({"beside": longer, "beside_tokens": ["a"]}, "^beside_tokens has 1 words"),
        ({"beside": longer, "beside_tokens": ["u", "v", "w", "x"]}, "have no token in common"),
    ):
        with pytest.raises(ch.ClearheadError, match=said):
            seen.view(tokens=words, **options).write(path)
    with pytest.raises(ch.ClearheadError, match="pass tokens= and beside_tokens="):
        seen.view(beside=longer, beside_tokens=more).write(path)
    assert not path.exists()
    seen.view(tokens=words, beside=longer, beside_tokens=more).write(path)


def test_under_other_masks_a_divergence_is_not_known(open_report: Make, tmp_path: Path) -> None:
    seen, other = block_seen(5), block_seen(5, mask=torch.ones(5, 5).tril().bool())
    with pytest.raises(ch.ClearheadError, match="the masks of"):
        seen.compare(other)
    html = seen.view(beside=other).write(tmp_path / "page.html").read_text()
    assert "divergence" not in [measure["name"] for measure in meta_of(html)["measures"]]
    opened = open_report([], "#a=0.0&b=1.0", html=html)
    opened.until(COMPARED, "drawn")
    assert "4 queries left out: the masks differ" in opened.page.inner_text("#compare-said")


def test_an_encoder_and_its_decoder(open_report: Make, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
    torch.manual_seed(0)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(
        vocab_size=20, d_model=8, encoder_ffn_dim=8, decoder_ffn_dim=8, **sizes, max_position_embeddings=32
    )
    model = transformers.BartModel(config).eval()
    source, target = torch.arange(4, 10)[None], torch.arange(3, 7)[None]
    recordings = []
    for each in (model, perturbed(model)):
        with torch.no_grad(), ch.watch(each) as seen:
            each(input_ids=source, decoder_input_ids=target)
        recordings.append(seen)
    words = {"tokens": list("abcd"), "source_tokens": list("uvwxyz")}
    html = recordings[0].view(**words, beside=recordings[1]).write(tmp_path / "page.html").read_text()
    check_measure(html, recordings[0].compare(recordings[1]))
    page = open_report([], html=html).page
    titles = ["Encoder", "Decoder", "Cross attention"]
    found = page.locator("#heads h3").all_inner_texts()
    assert found == titles + [f"{title}, beside" for title in titles]
