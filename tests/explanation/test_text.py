"""Words of any kind, in text, Markdown and script; numbers of any length within 80 columns."""

import unicodedata

import pytest
import torch
from recomputed import run

import clearhead as ch

WORDS = [
    "\x1b[31mred", "a\nb", "", "漢字漢字漢字漢字漢字", "한국어", "`code`|x|", "<b>&amp;", "# h", '"""', "x" * 500,
    "שלום", "e\u0301\u0301", "\u202eabc", "a\u00a0b", "www.example.com", "\ud800",
    "\U0001f469\u200d\U0001f467", "\r\n---",
]  # fmt: skip


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)


class Own(torch.nn.Module):
    def forward(self, x):
        return ch.attention(x, x, x)


class Named(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.add_module(name, Own())

    def forward(self, x):
        return next(self.children())(x)


def columns(line):
    marks = sum(unicodedata.category(c) in ("Mn", "Me") for c in line)
    return len(line) + sum(unicodedata.east_asian_width(c) in ("W", "F") for c in line) - marks


def check(explanation):
    for text in (str(explanation), str(explanation.__rich__()), explanation.markdown()):
        assert [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c != "\n"] == []
    assert max(map(columns, str(explanation).splitlines())) <= 80
    run(explanation)


def seen_of(model, words):
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        model(draw(1, 1, words, 4))
    return seen


@pytest.mark.parametrize("word", range(len(WORDS)))
def test_words(word):
    explanation = seen_of(Own(), len(WORDS)).explain(0, 0, word, tokens=WORDS)
    check(explanation)
    assert "www.example" not in explanation.markdown()  # which would be a link


@pytest.mark.parametrize("name", [word for word in WORDS if word and "." not in word], ids=ascii)
def test_names_of_modules(name):
    check(seen_of(Named(name), 3).explain(0, 0, 1))


@pytest.mark.parametrize("word", ["漢" * 20, "a" + "漢" * 20, "e\u0301" * 30], ids=ascii)
def test_rows_with_wide_names_end_where_their_columns_end(word):
    lines = str(seen_of(Own(), 3).explain(0, 0, 1, tokens=[word, "b", "c"])).splitlines()
    tables = [lines[n : n + 3] for n, line in enumerate(lines[:-1]) if lines[n + 1].startswith("     1 b  ")]
    wide = [table for table in tables if table[0].startswith("     0 ")]
    assert len(wide) == 2  # key and value
    assert [len(set(map(columns, table))) for table in wide] == [1, 1]


def test_long_numbers():
    value = torch.full((3, 9), -1e-200, dtype=torch.float64)
    value[0] = -9999.99999
    query = draw(3, 4).double()
    check(ch.explain(query, query, value))
    check(ch.explain(1e-200 * query, query, value, mask=ch.Causal(), align=2**39))


def test_a_plain_dot_product_is_called_by_its_name():
    class Dot(ch.Dot):  # of one's own: it may compute anything
        pass

    x = draw(2, 3)
    for options, title in (
        ({}, "Scaled dot-product attention, step by step"),
        ({"score": ch.Dot(), "scale": 0.5}, "Scaled dot-product attention, step by step"),
        ({"score": ch.Dot(softcap=2.0)}, "Attention by Dot(softcap=2.0), step by step"),
        ({"score": Dot()}, "Attention by Dot(), step by step"),
        ({"score": ch.Gaussian()}, "Attention by Gaussian(bandwidth=1.0), step by step"),
    ):
        explanation = ch.explain(x, x, x, **options)
        assert str(explanation).splitlines()[0] == title
