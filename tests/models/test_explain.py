"""Recorded calls explained: each step against the model's own numbers, and the script of what was explained."""

import pytest
import torch
import torch.nn.functional as F
from recomputed import check_script
from small_models import MODELS, OWN_EAGER, PADDINGS, flat, inputs_of, pair, takes_a_mask

import clearhead as ch
from clearhead.models import bundled, load

ALL = {**MODELS, **OWN_EAGER}
CASES = [(name, padding) for name in ALL for padding in PADDINGS if padding == "no padding" or takes_a_mask(name)]


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_every_step_is_what_the_model_computed(name, padding):
    fast, slow = pair(name, ALL[name])
    inputs = inputs_of(name, PADDINGS[padding])
    with torch.no_grad():
        theirs = flat(slow(**inputs, output_attentions=True))
        with ch.watch(fast, values=True) as seen:
            fast(**inputs)
    for call in seen.calls:
        # three words: a padding query gets other weights from eager code than from sdpa
        queries = slice(6, 9) if padding == "left padding" and call.query.shape[2] == 9 else slice(2, 5)
        explanation = call.explain((1, slice(0, 4, 3), queries))
        mine = explanation["weights"]
        alike = (w[1:2, 0:4:3, queries] for w in theirs if w.shape == call.weights.shape)
        assert any(torch.allclose(w, mine, atol=2e-5) for w in alike), call
        torch.testing.assert_close(explanation["output"], explanation["model_output"], rtol=1e-4, atol=1e-4)
        assert "more than rounding" not in str(explanation)
        check_script(explanation)


class Block(torch.nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.dropout = dropout

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=self.dropout)


def seen_of(block, *shape, **watching):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), ch.watch(block, **watching) as seen:
        block(x)
    return seen


def test_the_words_of_a_real_model():
    model, tokenizer = load(bundled())
    inputs = tokenizer("The quick brown fox jumps over the lazy dog.", return_tensors="pt")
    words = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        model(**inputs)
    explanation = seen.explain(3, head=5, query=words.index("jumps"), key=words.index("fox"), tokens=words)
    assert "scores[5, 5, 4] = " in str(explanation)
    assert "5 jumps takes " in " ".join(str(explanation).split())
    assert torch.equal(explanation["weights"][0, 0, 0], seen[3].explain((0, 5, 5))["weights"][0, 0, 0])
    by_name = seen.explain("encoder.layer.3.attention.self", 5, 5, tokens=words)
    assert torch.equal(by_name["weights"], explanation["weights"])


def test_without_values_the_output_is_said_to_be_missing():
    explanation = seen_of(Block(), 1, 2, 5, 4).explain(0, 1, 3)
    assert "watch with values=True" in " ".join(str(explanation).split())
    assert "output" not in [step.name for step in explanation.steps]
    check_script(explanation)


def test_words_that_can_be_read_once():
    seen = seen_of(Block(), 1, 2, 5, 4)
    assert str(seen.explain(0, 1, 3, tokens=iter("abcde"))) == str(seen.explain(0, 1, 3, tokens=list("abcde")))


def test_dropout_in_the_model_is_not_passed_over():
    torch.manual_seed(0)
    explanation = seen_of(Block(dropout=0.5), 1, 2, 5, 4, values=True).explain(0, 1, 3)
    assert "more than rounding: the model drops weights" in " ".join(str(explanation).split())


@pytest.mark.parametrize("score", [ch.Additive(4, 4, 3), ch.Gaussian(0.5), ch.Cosine(0.2), ch.Bilinear(4, 4)], ids=str)
def test_calls_of_clearhead_s_own_attention(score):
    class Own(torch.nn.Module):
        def forward(self, x):
            return ch.attention(x, x, x, score=score, mask=ch.Causal())

    seen = seen_of(Own(), 2, 3, 5, 4, values=True)
    explanation = seen.explain(0, 1, 3, sequence=1)
    torch.testing.assert_close(explanation["output"], explanation["model_output"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(explanation["weights"][0, 0, 0], seen[0].weights[1, 1, 3], rtol=1e-5, atol=1e-6)
    check_script(explanation)


def test_a_pair_of_a_long_call_needs_little_memory():
    seen = seen_of(Block(), 1, 2, 4096, 16, values=True)
    explanation = seen.explain(0, 1, 4000, 77)
    largest = max(step.value.numel() for step in explanation.steps)
    assert largest <= 4096 * 16  # nothing of queries × keys
    assert len(explanation.shown.keys) == 64
    assert 77 in explanation.shown.keys
    weights = seen[0].weights[0, 1, 4000]
    assert {*weights.topk(60).indices.tolist()} <= {*explanation.shown.keys}


def test_a_loaded_recording_is_explained_alike(tmp_path):
    seen = seen_of(Block(), 1, 2, 5, 4, values=True)
    again = ch.models.load_recording(seen.write(tmp_path / "seen"))
    assert torch.equal(again.explain(0, 1, 3)["output"], seen.explain(0, 1, 3)["output"])
