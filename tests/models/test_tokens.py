"""Every tool takes `tokens=` by one rule: words, lists of words for each sequence, or ids as a model was given them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drawn import draw

import clearhead as ch

matplotlib = pytest.importorskip("matplotlib", reason="the extra [plot] is not installed")
matplotlib.use("Agg")
pyplot = pytest.importorskip("matplotlib.pyplot", reason="the extra [plot] is not installed")

IDS = torch.tensor([[7, 1, 7, 3, 4], [8, 1, 1, 3, 4]])
LETTERS = [list("pqprs"), list("tqqrs")]  # equal where the ids are equal
FORMS = {
    "ids": IDS, "an array": IDS.int().numpy(), "lists": [list(map(str, row)) for row in IDS.tolist()],
    "one text": IDS[1], "a row": IDS[1:], "words": ["8", "1", "1", "3", "4"],
    "an array of words": np.array([list(map(str, row)) for row in IDS.tolist()]),
}  # fmt: skip


@pytest.fixture
def seen():
    class Block(torch.nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    with ch.watch(block := Block()) as found:
        block(draw(2, 2, 5, 4))
    return found


@pytest.mark.parametrize("form", FORMS)
def test_ids_are_shown_as_numbers(seen, form):
    tokens, words = FORMS[form], FORMS["words"]
    if len(tokens) == 2:
        assert seen.table(tokens=tokens) == seen.table(tokens=LETTERS)
        assert seen.distinctive(tokens).measure == seen.distinctive(LETTERS).measure
    (layer,) = seen.layers(tokens, sequence=1)
    assert layer.query_tokens == layer.key_tokens == words
    beside = seen.view(tokens=tokens, sequence=1, beside=seen, beside_tokens=tokens)
    assert beside.page.meta()["texts"] == [words]
    by_word = seen.explain(0, 0, "8", "3", sequence=1, tokens=tokens)
    for one in (by_word, seen[0].explain((1, 0, 0, 3), tokens=tokens)):
        assert str(one) == str(seen[0].explain((1, 0, 0, 3), tokens=words))
    axes = seen.plot(0, 1, sequence=1, tokens=tokens)
    assert [label.get_text() for label in axes.get_xticklabels()] == words
    pyplot.close("all")


def test_what_is_neither_words_nor_ids_is_an_error(seen):
    with pytest.raises(ch.ShapeError, match="tokens has words of 2 sequences, and sequence is 2"):
        seen.plot(0, 1, sequence=2, tokens=IDS)
    for wrong in (IDS.bool(), IDS[None], IDS.float(), list(range(5)), "abcde"):
        for ask in (
            seen.layers,
            lambda tokens: seen.plot(0, 1, tokens=tokens),
            lambda tokens: seen.explain(0, 0, 0, tokens=tokens),
        ):
            with pytest.raises(ch.ClearheadError, match=r"tokens takes words.*a tensor of token ids"):
                ask(tokens=wrong)
