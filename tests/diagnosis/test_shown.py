"""What a diagnosis is, and how it is shown."""

import html.parser
import itertools
import json

import pytest
import torch

import clearhead as ch
from diagnosis.planted import PLANTED, UPPER, qkv

HOSTILE = '<img src=x onerror="alert(1)">`$x$` [a](javascript:b) **b** | \x1b[31m\nred'


def hostile():
    finding = ch.explanation.Finding("the scale", "warning", f"evidence of {HOSTILE}", "remedy", {"layer": HOSTILE})
    return ch.explanation.Diagnosis([finding, finding], ["something"])


class Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], ""

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, tuple(name for name, _ in attributes)))

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("name", PLANTED)
def test_eighty_columns(name):
    for call in PLANTED[name]:
        text = str(call())
        assert max(map(len, text.splitlines())) <= 80, text


def test_the_gravest_comes_first():
    diagnosis = ch.diagnose(*qkv(2, 3, dtype=torch.float16), mask=UPPER)
    assert [finding.severity for finding in diagnosis] == ["error", "warning", "note"]
    assert (diagnosis.errors, diagnosis.warnings, diagnosis.notes) == ([diagnosis[0]], [diagnosis[1]], [diagnosis[2]])
    assert diagnosis[:2] == list(diagnosis)[:2] and len(diagnosis) == 3
    assert str(diagnosis).startswith("1 error, 1 warning, 1 note.\nerror: a mask of the opposite polarity")


def test_of_nothing_two_lines_say_what_was_not_examined():
    diagnosis = ch.diagnose(*qkv(2, 3))
    assert len(diagnosis) == 0 and not diagnosis
    assert diagnosis.unexamined == ["the mask you expect", "the backend's output"]
    lines = ["Nothing found.", "Not examined: the mask you expect, the backend's output. Use ch.audit."]
    assert str(diagnosis).splitlines() == lines
    assert [line for line in diagnosis.markdown().replace("\\", "").splitlines() if line] == lines
    tags = Tags()
    tags.feed(diagnosis._repr_html_())
    assert tags.text.splitlines() == lines


def test_a_diagnosis_with_findings_says_what_was_not_examined_too():
    diagnosis = ch.diagnose(*qkv(2, 3), mask=UPPER)
    assert str(diagnosis).endswith("\nNot examined: the mask you expect, the backend's output. Use ch.audit.")
    assert diagnosis.to_dict()["unexamined"] == diagnosis.unexamined


def test_plain_values():
    diagnosis = ch.diagnose(*qkv(2, 3), mask=UPPER)
    again = json.loads(json.dumps(diagnosis.to_dict()))
    assert [ch.explanation.Finding(**finding) for finding in again["findings"]] == list(diagnosis)


def test_equal_findings_are_told_once_with_their_places():
    findings = [
        ch.explanation.Finding("the scale", "note", f"number {i}", "do", {"layer": f"layers.{i}"}) for i in range(9)
    ]
    text = str(ch.explanation.Diagnosis(findings, []))
    assert text == (
        "9 notes.\nnote: the scale (layers.0)\n  number 0\n"
        "  Also in layers.1; layers.2; layers.3; layers.4; and 4 more.\n  → do"
    )


def test_hostile_names_are_text_in_html():
    tags = Tags()
    tags.feed(hostile()._repr_html_())
    assert {tag for tag, _ in tags.tags} <= {"p", "div", "b", "br"}
    assert not any(name.startswith("on") for _, names in tags.tags for name in names)
    assert HOSTILE.split("\x1b")[0] in tags.text


def test_hostile_names_are_text_in_a_terminal():
    text = str(hostile())
    assert "\x1b" not in text and len(text.splitlines()[1]) <= 80


def test_hostile_names_are_text_in_markdown():
    mark = pytest.importorskip("markdown_it", reason="no renderer of Markdown is installed")
    for renderer in (mark.MarkdownIt("commonmark"), mark.MarkdownIt("gfm-like", {"linkify": False})):
        tags = Tags()
        tags.feed(renderer.render(hostile().markdown()))
        assert {tag for tag, _ in tags.tags} <= {"p", "h3", "strong"}, tags.tags
        assert '<img src=x onerror="alert(1)">`$x$` [a](javascript:b) **b** |' in tags.text


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ch.diagnose(torch.nn.Linear(2, 2), torch.ones(2)), "Linear"),
        (lambda: ch.diagnose("model"), "str"),
        (lambda: ch.diagnose(None), "NoneType"),
        (lambda: ch.diagnose(torch.ones(2, 2)), "value"),
        (lambda: ch.diagnose(ch.models.Recording), "Recording"),
        (lambda: ch.diagnose(*qkv(2), torch.ones(2)), "Got Tensor, Tensor, Tensor, Tensor"),
        (lambda: ch.diagnose(*qkv(2), dropout_p=0.5), "dropout_p"),
        (lambda: ch.diagnose(ch.models.Recording([]), torch.ones(2)), "Monitor alone"),
        (lambda: ch.diagnose(ch.nn.MultiHeadAttention(64, 4), *qkv(2), mask=torch.ones(3, 3).bool()), "mask"),
        (lambda: ch.diagnose(ch.nn.MultiHeadAttention(64, 4), torch.ones(2, 64)), "'key'"),
        (lambda: ch.diagnose(*(t.to("meta") for t in qkv(2))), "meta"),
        (lambda: ch.diagnose(*qkv(2), mask=torch.ones(3, 3)), "mask"),
        (lambda: ch.diagnose(torch.nn.MultiheadAttention(64, 4, add_zero_attn=True), *qkv(2)), "add_zero_attn"),
    ],
)
def test_what_it_refuses(call, words):
    with pytest.raises(ch.ClearheadError, match=words):
        call()


@pytest.mark.parametrize("score", [ch.Dot(), ch.Gaussian(), ch.Cosine()], ids=repr)
def test_a_call_with_a_size_of_0_is_diagnosed_or_told(score):
    """Products over vectors of width 0, and over no keys, are numbers as well."""
    for batch, heads, length, width, wide in itertools.product((0, 2), (0, 2), (0, 3), (0, 1), (0, 4)):
        query, key = torch.ones(2, batch, heads, length, width)
        value = torch.ones(batch, heads, length, wide)
        for mask in (None, ch.MaskFunction(lambda b, h, i, j: (i + j) % 2 == 0)):
            try:
                found = ch.diagnose(query, key, value, score=score, mask=mask)
            except ch.ClearheadError:
                continue
            assert str(found) and found.markdown() and found._repr_html_()
