"""The text: tokens chosen alone or together, looks in passing, arcs, find, words of every script, long texts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rendered import render

from clearhead.report import Layer

Make = Callable[..., Any]

WORDS = [
    "[CLS]", "the", "map", "persuaded", "people", "that", "it", "was",
    "the", "water", ",", "not", "the", "air", ".", "[SEP]",
]  # fmt: skip
HOST = "document.getElementById('clearhead')"
ROOT = f"{HOST}.shadowRoot"
SHADED = f"Array.from({ROOT}.querySelectorAll('.token'), e => e.style.backgroundColor)"


def shaded_by(opened: Any, tokens: str) -> None:
    opened.until(f"{ROOT}.getElementById('texts').dataset.shaded", tokens)


def address_of(opened: Any, name: str) -> Any:
    return opened.page.evaluate(f"new URLSearchParams(location.hash.slice(1)).get('{name}')")


@pytest.fixture
def causal(make_case: Make) -> Any:
    n = len(WORDS)
    return make_case(n, query_tokens=WORDS, heads=2, stop=np.arange(n) + 1, seed=3)


def mean_look(case: Any, head: int, view: str, tokens: list[int]) -> tuple[Any, Any]:
    """The mean of some rows (or columns) of the weights, and of uniform attention under the same mask."""
    weights = case.weights[head]
    allowed = np.arange(weights.shape[1]) < np.broadcast_to(case.layer.stop, (1, len(weights)))[0][:, None]
    uniform = allowed / allowed.sum(1, keepdims=True)
    pick = (lambda of: of[tokens].mean(0)) if view == "out" else (lambda of: of[:, tokens].mean(1))
    return pick(weights), pick(uniform)


@pytest.mark.parametrize("view", ["out", "in"])
def test_several_tokens_show_the_mean_of_their_looks(causal: Any, open_report: Make, view: str) -> None:
    opened = open_report([causal.layer], f"#head=1&token=9&view={view}&tokens=4-6.9")
    shaded_by(opened, "4-6.9")
    tokens = [4, 5, 6, 9]
    mean, uniform = mean_look(causal, 1, view, tokens)
    shown = opened.page.evaluate("clearhead.text()")
    np.testing.assert_allclose(shown["weights"], mean, atol=1e-12)
    np.testing.assert_allclose(shown["fair"], uniform, atol=1e-12)
    colours = opened.page.evaluate(SHADED)
    assert [bool(colour) for colour in colours] == list(mean > uniform)
    assert opened.page.locator("[role=option][aria-selected=true]").count() == 4
    words = {"out": "Where 4 tokens look, on average", "in": "What looks at 4 tokens, on average"}
    assert opened.page.inner_text("#prose-title") == words[view]
    assert opened.page.inner_text("#prose-said") == "4 tokens chosen"


def test_shift_control_and_drag_take_several(causal: Any, open_report: Make) -> None:
    opened = open_report([causal.layer], "#token=3")
    page = opened.page
    token = page.locator(".token")
    token.nth(6).click(modifiers=["Shift"])
    shaded_by(opened, "3-6")
    assert address_of(opened, "tokens") == "3-6" and opened.shown.startswith("0/0/out/3/")
    token.nth(9).click(modifiers=["Control"])
    shaded_by(opened, "3-6.9")
    token.nth(4).click(modifiers=["Control"])
    shaded_by(opened, "3.5-6.9")
    token.nth(8).click()
    shaded_by(opened, "8")
    assert address_of(opened, "tokens") is None
    token.nth(12).hover()
    page.mouse.down()
    token.nth(11).hover()
    token.nth(10).hover()
    assert page.locator(".token.taking").count() == 3
    page.mouse.up()
    shaded_by(opened, "10-12")
    assert page.locator(".token.taking").count() == 0
    assert opened.shown.startswith("0/0/out/12/")
    page.evaluate("history.back()")
    shaded_by(opened, "8")
    page.locator("#map").click()  # a pair chosen elsewhere is of one token
    opened.until("clearhead.text().tokens.length", 1)


def test_alt_takes_the_pair_with_the_chosen_token(causal: Any, open_report: Make) -> None:
    opened = open_report([causal.layer], "#token=5")
    page = opened.page
    page.locator(".token").nth(2).click(modifiers=["Alt"])
    opened.until("document.getElementById('clearhead').dataset.shown", "0/0/out/5/2")
    page.locator(".token.chosen").focus()
    page.keyboard.press("Control+ArrowLeft")
    page.keyboard.press("Alt+Enter")
    opened.until("document.getElementById('clearhead').dataset.shown", "0/0/out/5/4")
    page.go_back()
    opened.until("document.getElementById('clearhead').dataset.shown", "0/0/out/5/2")


def test_a_pointer_at_rest_shows_the_look_of_its_token(causal: Any, open_report: Make) -> None:
    opened = open_report([causal.layer], "#token=12")
    page = opened.page
    before = page.evaluate(SHADED)
    page.locator(".token").nth(7).hover()
    assert page.locator(".token.passing").all_inner_texts() == ["was", "the"]  # at once, with the chosen one
    shaded_by(opened, "7")
    assert page.inner_text("#prose-title").endswith("looks, in passing")
    strongest = WORDS[int(causal.weights[0, 7].argmax())]
    pair = sorted([7, int(causal.weights[0, 7].argmax())])
    assert page.locator(".token.passing").all_inner_texts() == [WORDS[at] for at in pair] and strongest in WORDS
    np.testing.assert_allclose(page.evaluate("clearhead.text().weights"), causal.weights[0, 7], atol=1e-12)
    assert page.evaluate("clearhead.state().token") == 12
    percents = page.locator(".token").nth(7).get_attribute("title").split()[-1]
    assert float(percents.rstrip("%")) == pytest.approx(100 * causal.weights[0, 12, 7], rel=0.05)
    passing = page.evaluate(SHADED)
    page.set_viewport_size({"width": 1180, "height": 720})  # the page lays itself out anew, and shows the same
    page.wait_for_timeout(300)
    shaded_by(opened, "7")
    assert page.evaluate(SHADED) == passing
    assert page.locator(".token.passing").all_inner_texts() == [WORDS[at] for at in pair]
    page.mouse.move(0, 0)
    shaded_by(opened, "12")
    assert page.evaluate(SHADED) == before != passing
    assert page.locator(".token.passing").count() == 0
    page.locator(".token").nth(7).click()
    opened.until("clearhead.state().token", 7)
    shaded_by(opened, "7")
    assert page.evaluate(SHADED) == passing


def plain(text: str) -> str:
    return text.replace("\u2068", "").replace("\u2069", "")


LISTED = f"{ROOT}.querySelector('#strongest button:not([hidden])').title"


def one_query(opened: Any, case: Any, query: int) -> None:
    """Every pane shows the weights of this query, of head 0, and says that the chosen one, 12, is another."""
    page, weights = opened.page, case.weights[0, query]
    opened.until(f"Number({LISTED}.split(' ')[1]).toPrecision(4)", f"{weights.max():#.4g}")
    shaded_by(opened, str(query))
    np.testing.assert_allclose(page.evaluate("clearhead.text().weights"), weights, atol=1e-12)
    name = f"{WORDS[query]} ({query})" if WORDS.count(WORDS[query]) > 1 else WORDS[query]
    assert plain(page.inner_text("#strongest-title")) == f"Keys that “{name}” gives most weight"
    assert plain(page.inner_text("#pair-title")).startswith(f"“{name}” → ")
    assert plain(page.inner_text("#map-pair")).startswith(f"{name} → ")
    assert plain(page.inner_text("#prose-title")).startswith(f"Where “{name}” looks")
    assert f"{query + 1} keys of “{name}”" in plain(page.inner_text("#pair-place"))
    assert plain(page.inner_text("#pair-place")) in plain(page.inner_text("#map-pair"))  # one rank, in the same words
    assert page.is_visible("#pair-pinned") == (query != 12)
    if query != 12:
        assert plain(page.inner_text("#pair-pinned")) == "In passing. “the (12)” stays chosen."
        assert plain(page.inner_text("#prose-note")).startswith("“the (12)” stays chosen. ")


def test_one_query_is_shown_at_a_time(causal: Any, open_report: Make) -> None:
    opened = open_report([causal.layer], "#token=12")
    page = opened.page
    one_query(opened, causal, 12)
    page.locator(".token").nth(7).hover()
    one_query(opened, causal, 7)
    page.locator(".token").nth(9).hover()  # the next one without a rest
    one_query(opened, causal, 9)
    page.locator(".token").nth(12).hover()
    one_query(opened, causal, 12)
    shown = page.evaluate("clearhead.map()")
    x = shown["left"] + 2.5 * shown["across"]["cell"]
    page.locator("#map").hover(position={"x": x, "y": shown["top"] + 5.5 * shown["down"]["cell"]})
    one_query(opened, causal, 5)
    page.mouse.move(0, 0)
    one_query(opened, causal, 12)
    assert page.evaluate("clearhead.state().token") == 12


def worth_an_arc(weights: Any) -> Any:
    """The weights that get an arc: the five largest, without those below a hundredth of the largest."""
    strongest = np.sort(np.ravel(weights))[::-1][:5]
    return strongest[strongest >= strongest[0] / 100]


@pytest.mark.parametrize(("view", "tokens"), [("out", [12]), ("in", [4]), ("out", [9, 10, 13])])
def test_arcs_show_the_strongest_pairs(causal: Any, open_report: Make, view: str, tokens: list[int]) -> None:
    opened = open_report([causal.layer], f"#token={tokens[0]}&view={view}&tokens={'.'.join(map(str, tokens))}")
    page = opened.page
    assert page.locator(".arcs path").count() == 0
    page.get_by_role("button", name="Arcs").click()
    wanted = worth_an_arc(causal.weights[0][tokens] if view == "out" else causal.weights[0][:, tokens].T)
    opened.until(f"{ROOT}.querySelectorAll('.arcs path').length", len(wanted))
    assert address_of(opened, "arcs") == "1"
    labels = page.locator(".arcs text").all_text_contents()
    found = np.array([float(label.strip("%↑↓")) for label in labels])
    near = np.isclose(found[:, None], 100 * wanted, rtol=0.05)
    assert near.any(1).all() and near[0, 0] and (np.diff(found) <= 0).all(), (found, wanted)
    boxes = page.locator(".arcs text").evaluate_all("all => all.map(one => one.getBoundingClientRect().toJSON())")
    for one, other in itertools.combinations(boxes, 2):  # a label that has no place is left to the sentence
        beside = one["right"] <= other["left"] or other["right"] <= one["left"]
        assert beside or min(one["bottom"], other["bottom"]) - max(one["top"], other["top"]) < 4, (one, other)
    assert len(labels) >= len(wanted) - 1
    note = page.inner_text("#prose-note")
    assert note.count("→") == len(wanted) and labels[0] in note
    page.set_viewport_size({"width": 390, "height": 740})  # drawn anew where the tokens are now
    ends = f"""() => {{
        const box = {ROOT}.querySelector('.arcs').getBoundingClientRect();
        const [weight, i, j] = clearhead.text().strongest[0];
        const key = {ROOT}.querySelectorAll('.token')[j].getBoundingClientRect();
        const dot = {ROOT}.querySelector('.arcs circle');
        return Math.abs(Number(dot.getAttribute('cx')) + box.left - key.left - key.width / 2) < 8;
    }}"""
    opened.until(f"({ends})()")


def byte_signs(*pieces: str | bytes) -> list[str]:
    """Tokens of a byte-level tokenizer."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    signs = {byte: chr(byte) for byte in own} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return ["".join(signs[b] for b in (p if isinstance(p, bytes) else p.encode())) for p in pieces]


SCRIPTS = {
    "Hebrew": (["[CLS]", "של", "##ום", "עו", "##לם", ",", "BE", "##RT", "נ", "##בנה", "20", "##18", ".", "[SEP]"],
               "[CLS] שלום עולם, BERT נבנה 2018. [SEP]", "rtl"),
    "Arabic": (["الس", "##لام", "علي", "##كم", "،", "BE", "##RT", "سنة", "20", "##18", "."],
               "السلام عليكم، BERT سنة 2018.", "rtl"),
    "Hebrew in English": (["The", "word", "של", "##ום", "עו", "##לם", "means", "hel", "##lo", "20", "##18", "."],
                          "The word שלום עולם means hello 2018.", "ltr"),
    "Hebrew bytes": (byte_signs("של", "ום", " עו", "לם", " GPT", "-", "2", " ב", "שנה", " 20", "19", "."),
                     "שלום עולם GPT-2 בשנה 2019.", "rtl"),
    "Arabic bytes": (byte_signs("الس", "لام", " علي", "كم", " GPT", "-", "2", " سنة", " 20", "19", "."),
                     "السلام عليكم GPT-2 سنة 2019.", "rtl"),
}  # fmt: skip

# The boxes of the tokens, and of the same letters in one plain run of text, as the browser lays it out by itself.
BOXES = f"""() => {{
    const prose = {ROOT}.querySelector('.prose');
    const tokens = Array.from(prose.querySelectorAll('.token'));
    const plain = document.createElement('div');
    plain.className = 'prose';
    plain.dir = prose.dir;
    plain.textContent = prose.textContent;
    prose.after(plain);
    const letters = plain.firstChild;
    const found = [];
    let from = 0;
    for (const token of tokens) {{
        from = plain.textContent.indexOf(token.textContent, from);
        const range = document.createRange();
        range.setStart(letters, from);
        range.setEnd(letters, from += token.textContent.length);
        const [a, b] = [token, range].map((one) => one.getBoundingClientRect());
        found.push([token.textContent, a.left, a.right, b.left, b.right, token.classList.contains('special')]);
    }}
    plain.remove();
    return found;
}}"""


@pytest.mark.parametrize("script", list(SCRIPTS))
def test_pieces_stand_where_the_letters_of_the_text_stand(make_case: Make, open_report: Make, script: str) -> None:
    tokens, text, direction = SCRIPTS[script]
    opened = open_report([make_case(len(tokens), heads=1, query_tokens=tokens).layer])
    page = opened.page
    assert page.locator(".prose").text_content() == text
    assert page.locator(".prose").get_attribute("dir") == direction
    found = page.evaluate(BOXES)
    # special tokens are wider than their letters: all others may be moved by them alike
    shift = {"rtl": lambda box: box[2] - box[4], "ltr": lambda box: box[1] - box[3]}[direction]
    plain = [box for box in found if not box[5]]
    first = shift(plain[0])
    for name, left, right, plain_left, plain_right, _ in plain:
        assert left - plain_left == pytest.approx(first, abs=2), name
        assert right - plain_right == pytest.approx(first, abs=2), name
    box = {name: (left, right) for name, left, right, *_ in found}
    pieces = [name for name in ("של", "ום", "الس", "لام") if name in box]
    assert box[pieces[1]][1] <= box[pieces[0]][0] + 1  # the later piece is to the left
    assert box["18" if "18" in box else "19"][0] >= box["20"][1] - 1  # a number's to the right


BYTES = {
    "שלום": byte_signs("ש", "לו", "ם"),
    "日本語": byte_signs("日", "本語"),
    "Ġa": ["Ġa"],
    "sław": ["s", "##ław"],  # ł is a byte's sign too, but these are no bytes
    "café": ["caf", "##é"],
    "a 😀▫b": byte_signs("a", b" \xf0\x9f", b"\x98\x80", "b"),
    "x▫ y": byte_signs("x", b"\xe9", " y"),
    "▁": ["▁"],
    "a⏎é▫": ["▁a", "<0x0A>", "<0xC3>", "<0xA9>"],
    "<s> The": ["<s>", "ĠThe"],
}  # fmt: skip


def test_bytes_are_read_as_text(make_case: Make, open_report: Make) -> None:
    layers = [make_case(len(t), heads=1, query_tokens=t, name=f"l{n}").layer for n, t in enumerate(BYTES.values())]
    opened = open_report(layers)
    page = opened.page
    for number, text in enumerate(BYTES):
        page.evaluate(f"location.hash = 'layer={number}'")
        wanted = {"Ġa": "a", "▁": "␣"}.get(text, text)
        opened.until(f"{ROOT}.querySelector('.prose').textContent", wanted)


def test_find(causal: Any, open_report: Make) -> None:
    opened = open_report([causal.layer], "#token=6")
    page = opened.page
    page.keyboard.press("/")  # nothing has the focus
    page.keyboard.type("THE ")
    page.keyboard.press("Backspace")
    assert page.locator(".token.found").all_inner_texts() == ["the", "the", "the"]
    assert page.inner_text("#find-count") == "2 of 3"  # the next after the chosen one
    assert page.locator(".token.current").get_attribute("data-index") == "8"
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert page.inner_text("#find-count") == "1 of 3"
    page.keyboard.press("Shift+Enter")
    assert page.inner_text("#find-count") == "3 of 3"
    page.fill("#find-words", "map pers")  # across tokens
    assert page.locator(".token.found").all_inner_texts() == ["map", "persuaded"]
    page.fill("#find-words", "<b>")
    assert page.inner_text("#find-count") == "not found"
    page.fill("#find-words", "water")
    page.keyboard.press("Escape")
    assert page.locator("#find").is_hidden() and page.locator(".token.found").count() == 0
    assert page.evaluate(f"{ROOT}.activeElement.textContent") == "water"
    page.keyboard.press("Enter")
    opened.until("clearhead.state().token", 9)


def with_meta(layers: list[Layer], change: Callable[[Any], None]) -> str:
    """The page of some layers with its metadata changed."""
    html = render(layers, "A report")
    begin = html.index('id="meta">') + len('id="meta">')
    end = html.index("</script>", begin)
    meta = json.loads(html[begin:end])
    change(meta)
    return html[:begin] + json.dumps(meta).replace("<", "\\u003c") + html[end:]


def test_unknown_words_as_they_were_spelled(make_case: Make, open_report: Make) -> None:
    layer = make_case(4, heads=1, query_tokens=["a", "[UNK]", "b", "[UNK]"]).layer
    spelled = {"1": "<b>ŵ</b>", "3": "א"}
    opened = open_report([], "#token=0", html=with_meta([layer], lambda meta: meta.update(originals=[spelled])))
    page = opened.page
    assert page.locator(".token").all_inner_texts() == ["a", "[UNK]", "b", "[UNK]"]
    page.locator(".token").nth(1).hover()
    assert "spelled “<b>ŵ</b>”" in (page.locator(".token").nth(1).get_attribute("title") or "")
    page.get_by_role("button", name="Original spelling").click()
    opened.until(f"{ROOT}.querySelectorAll('.token.original').length", 2)
    assert page.locator(".token").all_inner_texts() == ["a", "<b>ŵ</b>", "b", "א"]
    assert page.locator(".token *").count() == 0
    assert address_of(opened, "spelling") == "1"
    assert open_report([layer]).page.locator("#spelling").is_hidden()  # a text without any


def test_prompt_and_answer_are_told_apart(causal: Any, open_report: Make) -> None:
    html = with_meta([causal.layer], lambda meta: meta["layers"][0].update(answer=10))
    page = open_report([], html=html).page
    assert page.locator(".token.prompt").count() == 10
    assert page.locator(".token.answer").all_inner_texts() == WORDS[10:]
    assert page.inner_text(".seam") == "answer"
    assert "The answer begins at token 10" in page.inner_text("#prose-note")


def test_the_step_of_a_token_is_said(causal: Any, open_report: Make) -> None:
    html = with_meta([causal.layer], lambda meta: meta["layers"][0].update(answer=10, begins=[0, 10, 11]))
    for token, said in ((3, "in step 0 of 2, the prompt."), (10, "in step 1 of 2."), (12, "in step 2 of 2.")):
        page = open_report([], f"#token={token}", html=html).page
        assert said in page.inner_text("#prose-note")


def test_cross_attention_names_both_texts(make_case: Make, open_report: Make) -> None:
    case = make_case(
        3, 4, kind="cross", heads=1, query_tokens=["das", "Wasser", "."], key_tokens=["it", "is", "wet", "."]
    )
    opened = open_report([case.layer], "#token=1&arcs=1")
    page = opened.page
    assert page.locator("#texts h3").all_inner_texts() == ["decoder text: the queries", "encoder text: the keys"]
    assert page.get_by_role("listbox").count() == 2
    shaded_by(opened, "1")
    colours = page.evaluate(SHADED)
    assert [bool(colour) for colour in colours] == [False] * 3 + list(case.weights[0, 1] > 0.25)
    drawn = worth_an_arc(case.weights[0, 1])
    assert 0 < len(drawn) < 4  # of the four keys, one has less than a hundredth of the largest weight
    assert page.locator(".arcs path").count() == len(drawn)
    page.get_by_text("wet", exact=True).first.hover()  # what a click would show: what looks at it
    shaded_by(opened, "2")
    np.testing.assert_allclose(page.evaluate("clearhead.text().weights"), case.weights[0, :, 2], atol=1e-12)


def test_everything_by_keyboard(causal: Any, open_report: Make) -> None:
    opened = open_report([causal.layer], "#token=4")
    page = opened.page
    page.get_by_role("button", name="Arcs").focus()
    page.keyboard.press("Enter")
    opened.until(f"{ROOT}.querySelectorAll('.arcs path').length", len(worth_an_arc(causal.weights[0, 4])))
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.type("it")
    page.keyboard.press("Escape")
    assert page.evaluate(f"{ROOT}.activeElement.textContent") == "it"
    page.keyboard.press("Enter")
    opened.until("clearhead.state().token", 6)
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    shaded_by(opened, "6-8")
    for _ in range(2):
        page.keyboard.press("Control+ArrowRight")  # moves and takes nothing
    page.keyboard.press("Control+ ")
    shaded_by(opened, "6-8.10")
    page.keyboard.press("ArrowRight")
    shaded_by(opened, "11")
    assert page.locator(".token[tabindex='0']").count() == 1
    assert page.locator(".prose").get_attribute("aria-multiselectable") == "true"


def long_layer(n: int, window: int = 200) -> Layer:
    """A head of n tokens, each of which sees a window before it; computed a row at a time."""
    rng = np.random.default_rng(5)
    query, key = (1.5 * rng.standard_normal((2, 1, n, 8))).astype(np.float32)
    start = np.maximum(0, np.arange(n) - window)
    stop = np.arange(n) + 1
    logsumexp = np.empty((1, n))
    for i in range(n):
        score = 0.35 * key[0, start[i] : stop[i]].astype(np.float64) @ query[0, i].astype(np.float64)
        logsumexp[0, i] = np.log(np.exp(score).sum())
    words = [f"Ġw{i}" if i % 37 else "Ċ" for i in range(n)]
    zeros = np.zeros((1, n))
    return Layer(
        "long", "self", query, key, 0.35, None, start[None].astype(np.int32), stop[None].astype(np.int32), None,
        logsumexp, zeros, zeros, zeros, np.zeros((1, 32, 32)), words, words,
    )  # fmt: skip


def test_a_text_of_16384_tokens(open_report: Make) -> None:
    n = 16384
    opened = open_report([long_layer(n)], "#token=9000&arcs=1", wait=False)
    page = opened.page
    shaded_by(opened, "9000")
    count = f"{ROOT}.querySelectorAll('.token').length"
    assert 100 < page.evaluate(count) < 3000
    assert page.locator(".token.chosen").inner_text() == "w9000"
    chosen = page.locator(".token.chosen").bounding_box()
    prose = page.locator(".prose").bounding_box()
    assert prose["y"] <= chosen["y"] <= prose["y"] + prose["height"]
    assert page.locator(".token.chosen").get_attribute("aria-posinset") == "9001"
    page.locator(".token.chosen").focus()
    page.keyboard.press("End")
    opened.until("clearhead.state().token", n - 1)
    assert page.evaluate(f"{ROOT}.activeElement.textContent") == f"w{n - 1}"
    assert page.evaluate(count) < 3000
    page.keyboard.press("ArrowUp")
    page.keyboard.press("PageUp")
    opened.until("clearhead.state().token < 16370")
    strip = page.locator(".strip")
    strip.click(position={"x": 5, "y": 0.25 * prose["height"]})
    middle = f"""(() => {{
        const box = {ROOT}.querySelector('.prose').getBoundingClientRect();
        const tokens = Array.from({ROOT}.querySelectorAll('.token'));
        const seen = tokens.filter((e) => Math.abs(e.getBoundingClientRect().top - box.top - box.height / 2) < 20);
        return Number(seen[0].dataset.index);
    }})()"""
    opened.until(f"Math.abs({middle} - {n // 4}) < 400")
    assert page.evaluate(count) < 3000
    page.keyboard.press("/")
    page.keyboard.type("w15000")
    opened.until(f"{ROOT}.querySelector('.token.current').textContent", "w15000")
    assert page.evaluate(count) < 3000


def test_the_strip_shows_where_the_weight_is(make_case: Make, open_report: Make) -> None:
    case = make_case(1200, heads=1, features=16, query_tokens=[f"word{i:04}" for i in range(1200)], spread=3.0)
    opened = open_report([case.layer], "#token=600", wait=False)
    shaded_by(opened, "600")
    page = opened.page
    rows = page.evaluate(f"""() => {{
        const canvas = {ROOT}.querySelector('.strip');
        const pixels = canvas.getContext('2d').getImageData(8, 0, 1, canvas.height).data;
        return Array.from({{ length: canvas.height }}, (_, row) => pixels[4 * row + 3] > 0);
    }}""")
    heavy = int(case.weights[0, 600].argmax())
    place = heavy / 1200 * len(rows)
    assert any(rows[max(0, int(place) - 4) : int(place) + 5])
    assert not all(rows)
    short = open_report([make_case(5).layer])
    assert short.page.locator(".strip").is_hidden()


def test_hostile_tokens_stay_text(make_case: Make, open_report: Make) -> None:
    tokens = ["<img src=x onerror=alert(1)>", "</script><script>alert(2)</script>", "\u202eevil", "Ġ<b>", "&lt;"] * 2
    opened = open_report([make_case(len(tokens), heads=1, query_tokens=tokens).layer], "#token=0&tokens=0-3&arcs=1")
    page = opened.page
    shaded_by(opened, "0-3")
    page.locator(".token").nth(7).hover()
    shaded_by(opened, "7")
    page.keyboard.press("/")
    page.keyboard.type("<img src=x")
    assert page.locator(".token.found").count() == 2
    assert page.locator(".token *, #reading img, #reading script, #reading b").count() == 0
    assert "⟨U+202E⟩evil" in page.locator(".prose").text_content()
