"""Explanations speak only of what their computation contains."""

import random
import re

import pytest
import torch

import clearhead as ch

SCORES = {
    "dot": lambda: None,
    "softcap": lambda: ch.Dot(softcap=3.0),
    "gaussian": ch.Gaussian,
    "cosine": ch.Cosine,
    "bilinear": lambda: ch.Bilinear(4, 4),
    "additive": lambda: ch.Additive(4, 4, 3),
    "function": lambda: lambda query, key: (query @ key.mT).sin(),
    "changed": lambda: ch.Dot().then(lambda score, b, h, i, j: score - (i - j)),
}
MASKS = {
    "none": lambda: None,
    "causal": ch.Causal,
    "lengths": lambda: ch.Lengths(3),
    "all allowed": lambda: torch.ones(5, 5, dtype=torch.bool),
    "bool": lambda: torch.eye(5, dtype=torch.bool),
    "float": lambda: torch.randn(5, 5),
    "very negative": lambda: torch.zeros(5, 5).masked_fill(~torch.ones(5, 5).tril().bool(), -1e9),
}
MODULES = {
    "plain": lambda: ch.nn.MultiHeadAttention(8, 2),
    "grouped": lambda: ch.nn.MultiHeadAttention(8, 4, num_kv_heads=2, rotary=ch.nn.RotaryEmbedding(2)),
    "additive": lambda: ch.nn.AdditiveAttention(8),
    "dot": ch.nn.DotProductAttention,
    "torch's": lambda: torch.nn.MultiheadAttention(8, 2, batch_first=True),
}


def steps_of(explanation):
    return [step for part in explanation.parts for step in part.steps]


def has(name):
    return lambda explanation: any(step.name.startswith(name) for step in steps_of(explanation))


def minus_infinity(explanation):
    return any(
        bool((step.value == -torch.inf).any()) for step in steps_of(explanation) if step.value.is_floating_point()
    )


# words of a sentence, and what the explanation has where they are true
CLAIMS = {
    r"-∞": minus_infinity,
    r"\bmask(ed)?\b": lambda e: has("mask")(e) or has("bias")(e),
    r"\bsinks?\b": has("sink"),
    r"\bbias\b": has("bias"),
    r"\b[Dd]ropout\b": has("kept"),
    r"\bvalues?\b(?! that)": has("value"),
    r"\boutputs?\b": has("output"),
    r"how far apart the two": lambda e: False,
    r"[■·] is": has("mask"),
    r"\bheads?\b": lambda e: any("H" in step.axes for step in steps_of(e)),
}


def check(explanation):
    formulas = " ".join(step.formula for step in steps_of(explanation))
    letters = {x for index in re.findall(r"\[([^\]]*)\]", formulas) for x in re.findall(r"[a-z]+", index)}
    notes = " ".join(part["drawn"] for part in explanation.document.record["parts"])
    said = re.search(r"In a formula (.*?)(: |\. )", notes)
    explained = re.findall(r"\b([b-z])\b", said[1]) if said else []
    assert set(explained) <= letters and {"i", "j"} <= set(explained), (explained, letters)
    for symbol in re.findall(r"\w+\[[^\]]*\]|Σ_\w", notes):
        assert symbol in formulas, symbol
    axes = {axis for step in steps_of(explanation) for axis in step.axes}
    for axis in re.findall(r"\b(B|H|Lq|Lk|E|Eq|Ek|Ev) (?:sequences|heads|queries|keys|numbers)", notes):
        assert axis in axes, axis
    for step in steps_of(explanation):
        for words, holds in CLAIMS.items():
            assert not re.search(words, step.why) or holds(explanation), (step.name, step.why)


@pytest.mark.parametrize("seed", range(24))
def test_each_symbol_and_each_thing_that_is_explained_occurs(seed):
    source = random.Random(seed)
    torch.manual_seed(seed)
    lead = source.choice([(), (2,), (2, 2)])
    query, key, value = (torch.randn(*lead, 5, 4) for _ in range(3))
    options = {"score": SCORES[source.choice(list(SCORES))](), "mask": MASKS[source.choice(list(MASKS))]()}
    if source.random() < 0.3:
        options["bias"] = source.choice([torch.rand(5, 5), -torch.rand(5, 5), ch.ALiBi(2) if len(lead) == 2 else None])
    if len(lead) == 2 and source.random() < 0.3:
        options["sinks"] = torch.zeros(2)
    if source.random() < 0.3:
        options["dropout_p"] = 0.5
    check(ch.explain(query, key, value, gradients=source.random() < 0.3, **options))


@pytest.mark.parametrize("mask", ["none", "causal", "all allowed"])
@pytest.mark.parametrize("module", MODULES)
def test_modules(module, mask):
    x = torch.randn(1, 5, 8)
    given = (x, x, x)
    options = {} if mask == "none" or module == "torch's" else {"mask": MASKS[mask]()}
    check(ch.explain(MODULES[module]().eval(), *given, **options))


@pytest.mark.parametrize("options", [{}, {"valid_lens": [3]}, {"mask": torch.ones(5, 5, dtype=torch.bool)}], ids=str)
def test_a_softmax_of_scores(options):
    explanation = ch.explain(torch.randn(5, 5), **options)
    check(explanation)
    assert "Σ_d" not in str(explanation) and "query[" not in str(explanation)


def test_a_call_without_its_values():
    block, x = ch.nn.DotProductAttention(), torch.randn(1, 1, 5, 4)
    with ch.watch(block) as seen:
        block(x, x, x)
    for step in steps_of(seen[0].explain()):
        if step.name in ("query", "key"):
            assert "value" not in step.why and "output" not in step.why


def test_a_float_mask_is_called_a_mask():
    x = torch.eye(3)
    said = str(ch.explain(x, x, x, mask=torch.zeros(3, 3).masked_fill(~torch.ones(3, 3).tril().bool(), -1e9)))
    said = " ".join(said.split())
    assert "The float mask: a number for each pair." in said
    assert "The mask is added to the score: where it is below 0 the score is smaller." in said
    assert "how far apart" not in said.split("bias (")[1].split("masked")[0].split("maximum")[0]


def test_equal_weights_are_all_said():
    q = torch.tensor([[1.0, 0, 2, 1], [0, 2, 1, -1]])
    k = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, -1], [2, 1, 0, 1]])
    said = " ".join(str(ch.explain(q, k, torch.eye(3))).split())
    assert "query 1 takes 58% of the value of key 1 and 21% of the value of key 0, and as much of key 2." in said
    said = " ".join(str(ch.explain(torch.zeros(1, 4), torch.zeros(5, 4), torch.zeros(5, 2))).split())
    assert "20% of the value of key 0 and 20% of the value of key 1, and as much of 3 more keys." in said
