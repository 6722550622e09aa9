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


@pytest.mark.parametrize("form", [form for form, tokens in FORMS.items() if len(tokens) != 2])
def test_the_words_of_one_text_are_not_those_of_a_batch(seen, form):
    """Induction and the same word would count pairs by the words of another text."""
    tokens = FORMS[form]
    for ask in (seen.table, seen.distinctive):
        said = r"tokens has the words of one sequence, and the weights of Block are of 2"
        with pytest.raises(ch.ShapeError, match=said):
            ask(tokens=tokens)
        with pytest.raises(ch.ShapeError, match="source_tokens has the words of one sequence"):
            ask(source_tokens=tokens)
    # a page is of one sequence, and has its numbers
    (layer,) = seen.layers(tokens, sequence=1)
    shares = {measure.name: [found[0] for found in each] for measure, each in by_measure(layer).items()}
    weights, words = seen[0].weights[1].numpy(), FORMS["words"]
    for head in range(2):
        pairs = [[one == other and i != j for j, other in enumerate(words)] for i, one in enumerate(words)]
        some = [weights[head, i][row].sum() for i, row in enumerate(pairs) if any(row)]
        assert shares["same word"][head] == pytest.approx(sum(some) / len(some), abs=1e-6)


def by_measure(layer):
    return {measure: [each[measure] for each in layer.measures] for measure in layer.measures[0]}


def test_beams_share_their_source():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            sizes = {"d_model": 8, "nhead": 2, "dim_feedforward": 8, "batch_first": True}
            self.encoder = torch.nn.TransformerEncoderLayer(**sizes)
            self.decoder = torch.nn.TransformerDecoderLayer(**sizes)

        def forward(self, source, beams):
            return self.decoder(beams, self.encoder(source).expand(3, -1, -1))

    with ch.watch(model := Two().eval()) as seen:
        model(draw(1, 4, 8), draw(3, 5, 8))
    table = seen.table(tokens=[list("vwxyw")] * 3, source_tokens=list("wzyw"))
    cross = [row for row in table if row["kind"] == "cross"]
    (call,) = (call for call in seen if call.kind == "cross")
    weights = call.weights[:].double()
    for head, row in enumerate(cross):  # w, y and w of the beams are in the source
        shares = [weights[:, head, 1, [0, 3]].sum(1), weights[:, head, 3, 2], weights[:, head, 4, [0, 3]].sum(1)]
        assert row["same word"] == pytest.approx(float(torch.stack(shares).mean()), abs=1e-6)
    with pytest.raises(ch.ShapeError, match=r"tokens has the words of one sequence.* are of 3"):
        seen.table(tokens=list("vwxyw"), source_tokens=list("wzyw"))
    with ch.watch(model) as seen:  # each has a source of its own
        model(draw(3, 4, 8), draw(3, 5, 8))
    with pytest.raises(ch.ShapeError, match=r"source_tokens has the words of one sequence.* are of 3"):
        seen.table(tokens=[list("vwxyw")] * 3, source_tokens=list("wzyw"))
