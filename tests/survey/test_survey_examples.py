"""The strongest examples of each head and measure, beside a search through all texts in NumPy and float64."""

import numpy as np
import pytest
import torch
from browser import Opened
from test_survey_page import inside
from test_survey_state import Reader, corpus, letters

import clearhead as ch

NAMES = ["first", "previous", "normalised entropy", "sink", "induction"]
KEEP = [*NAMES, "examples"]
TEXTS = list(dict.fromkeys(corpus(60)))


def run(state=None, rank=(0, 1), **options):
    options = {"keep": KEEP, "batch": 64, "texts": TEXTS, "tokenizer": letters} | options
    return ch.models.survey(Reader().eval(), state=state, rank=rank, **options)


@pytest.fixture(scope="module")
def found():
    return run()


def weights_of(text):
    """(H, L, L)."""
    x = Reader().table(torch.tensor(list(text.encode()))).detach().double().unflatten(-1, (2, 4)).transpose(0, 1)
    return (x @ x.mT / 2).softmax(-1).numpy()


def peak(name, w, text):
    """Of one head and text: how far the furthest query is from uniform attention, with value, uniform, query, key."""
    length = len(w)
    uniform = np.full((length, length), 1 / length)
    if name == "sink":
        key = (w.sum(0) - uniform.sum(0)).argmax()
        return w.sum(0)[key] / length - 1 / length, w.sum(0)[key] / length, 1 / length, None, key
    if name == "normalised entropy":
        values, even = -(w * np.log(w)).sum(-1) / np.log(length), np.ones(length)
        apart, keys = even - values, w.argmax(-1)
    else:
        i, j = np.indices(w.shape)
        before = np.array([None, *text], dtype=object)[:-1]
        pairs = {"first": j == 0, "previous": j == i - 1, "induction": (before == np.array([*text])[:, None]) & (j < i)}
        values, even = (np.where(pairs[name], each, 0).sum(-1) for each in (w, uniform))
        apart = np.where(pairs[name].any(-1), values - even, -np.inf)
        keys = {"first": j[:, 0] * 0, "previous": np.arange(length) - 1, "induction": w.argmax(-1)}[name]
    query = apart.argmax()
    return apart[query], values[query], even[query], query, keys[query]


def test_they_are_the_strongest_of_all_texts(found):
    rows, every = found.examples(), [weights_of(text) for text in TEXTS]
    assert len(rows) == 2 * len(NAMES) * 3
    for head in (0, 1):
        for name in NAMES:
            own = [row for row in rows if row["head"] == head and row["measure"] == name]
            wanted = [peak(name, w[head], text) for w, text in zip(every, TEXTS, strict=True)]
            best = sorted((one for one in wanted if one[0] > -np.inf), key=lambda one: -one[0])
            value = [row["value"] for row in own]
            np.testing.assert_allclose(value, [one[1] for one in best[:3]], atol=1e-5, err_msg=name)
            np.testing.assert_allclose([row["uniform"] for row in own], [one[2] for one in best[:3]], atol=1e-6)
            assert (own[0]["query"], own[0]["key"]) == best[0][3:]
            text = TEXTS[next(n for n, one in enumerate(wanted) if one is best[0])]
            near = {int(end) + step for end in best[0][3:] if end is not None for step in range(-8, 9)}
            places = sorted(near & set(range(len(text))))
            assert own[0]["places"] == places
            assert own[0]["tokens"] == [str(ord(text[place])) for place in places]


def test_they_are_the_same_of_ranks_that_stop_and_go_on(found, tmp_path):
    with pytest.raises(ch.ClearheadError, match="batches of other ranks are missing"):
        run(tmp_path, (1, 2), wait=0.0)
    assert run(tmp_path, (0, 2)).examples() == found.examples() == run(tmp_path).examples()
    assert run(tmp_path).digest == found.digest


def test_a_text_that_is_read_twice_is_one_example(found):
    assert run(texts=[*TEXTS, *TEXTS]).examples() == found.examples()


def test_none_where_they_were_not_asked_for(found, tmp_path):
    none = run(tmp_path, keep=NAMES)
    assert none.examples() == [] and none.digest == found.digest
    with pytest.raises(ch.ClearheadError, match="another survey, which differs in examples"):
        run(tmp_path)
    assert len(run(keep=None).examples()) == 2 * 5 * 3


class Words:
    """A tokenizer of words, which are hostile."""

    words = ("<b>", "<img src=x onerror=alert(1)>", "\u202edrawkcab", "</template>", "plain", "ABCDE")

    def __call__(self, texts, **options):
        return {"input_ids": [[self.words.index(word) for word in text.split("|")] for text in texts]}

    def convert_ids_to_tokens(self, ids):
        return [self.words[one] for one in ids]


def test_the_page_marks_query_and_key(tmp_path, browser):
    texts = ["|".join(Words.words), "|".join([*Words.words[::-1], *Words.words])]
    survey = run(texts=texts, tokenizer=Words(), keep=["previous", "sink", "examples"])
    path = survey.write(tmp_path / "page.html")
    opened = browser.open(path, Opened, "#layer=0&head=1&by=previous", viewport={"width": 390, "height": 800})
    opened.until(inside("root.querySelectorAll('.examples li').length"), 2)
    row = next(row for row in survey.examples() if row["head"] == 1 and row["measure"] == "previous")

    def at(kind):
        return opened.page.evaluate(inside(f"root.querySelector('.example .{kind}').title"))

    assert at("query") == f"query, position {row['query']}" and at("key") == f"key, position {row['key']}"
    shown = opened.page.evaluate(inside("root.querySelector('.example').textContent"))
    assert "<img src=x onerror=alert(1)>" in shown and "\u202e" not in shown and "</template>" in shown
    assert opened.page.evaluate(inside("root.querySelectorAll('.example img').length")) == 0
    assert opened.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    said = opened.page.evaluate(inside("root.querySelector('.examples .quiet').textContent"))
    assert said == f"{100 * row['value']:.0f}%; uniform attention: {100 * row['uniform']:.0f}%"
    figures = opened.page.evaluate(inside("root.getElementById('figures').textContent"))
    assert ", over 16 queries" in figures  # of 18, the first of each text sees no token before it
    opened.page.evaluate(inside("root.getElementById('measure').value = 'sink'"))
    opened.page.evaluate(inside("root.getElementById('measure').dispatchEvent(new Event('change'))"))
    opened.until(inside("root.querySelectorAll('.example .query').length"), 0)
    assert opened.page.evaluate(inside("root.querySelectorAll('.example .key').length")) == 2
