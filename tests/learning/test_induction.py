"""The induction example: its sequences are what they claim to be, its edits cut what they name, and it learns."""

import induction
import pytest
import torch
from induction import LENGTH, WORDS, AttentionOnly, comes_again, hits, losses, periodic, scores, train, without_key

import clearhead as ch


class Copies(torch.nn.Module):
    """Foresees what followed the last same token, without attention."""

    def forward(self, tokens):
        logits = torch.zeros(*tokens.shape, WORDS)
        for row, sequence in zip(logits, tokens.tolist(), strict=True):
            follower = {}
            for i, token in enumerate(sequence):
                if i:
                    follower[sequence[i - 1]] = token
                if token in follower:
                    row[i, follower[token]] = 1
        return logits


def fresh(**sizes):
    torch.manual_seed(0)
    return AttentionOnly(**sizes)


def test_a_sequence_repeats_after_its_period_and_not_before():
    torch.manual_seed(1)
    tokens, period = periodic(200)
    assert tokens.shape == (200, LENGTH)
    assert sorted(set(period[:, 0].tolist())) == list(range(4, 33))
    for sequence, [p] in zip(tokens, period.tolist(), strict=True):
        assert (sequence[p:] == sequence[:-p]).all()
        assert len(set(sequence[:p].tolist())) == p


def test_what_comes_again_is_what_copying_foresees():
    torch.manual_seed(2)
    tokens, period = periodic(20)
    assert hits(Copies(), tokens, period) == 1
    again = comes_again(tokens, period)
    likeliest = Copies()(tokens[:, :-1]).amax(-1)
    assert (likeliest[again] == 1).all() and (likeliest[~again] == 0).all()


def test_losses_are_those_of_the_next_tokens():
    model, (tokens, _) = fresh(), periodic(3, length=10)
    with torch.no_grad():
        each, chances = losses(model, tokens), model(tokens).softmax(-1)
    assert each.shape == (3, 9)
    for i, j in [(0, 0), (1, 4), (2, 8)]:
        assert each[i, j].item() == pytest.approx(-chances[i, j, tokens[i, j + 1]].log().item(), rel=1e-4)


def test_thirty_steps_lower_the_loss():
    history = train(fresh(), periods=(4, 4), steps=30, every=30)
    assert [at.step for at in history] == [0, 30]
    assert history[1].again < 0.95 * history[0].again


def test_one_sequence_is_foreseen_as_it_is_among_others():
    model, (tokens, period) = fresh(heads=2), periodic(4)
    with torch.no_grad():
        assert torch.allclose(model(tokens[1:2]), model(tokens)[1:2], atol=1e-5)
    assert 0 <= hits(model, tokens[:1], period[:1]) <= 1


def test_scores_are_the_means_of_the_weights_that_they_name():
    model, (tokens, _) = fresh(heads=2), periodic(5, (20, 20), length=40)
    found = scores(model, tokens)
    i = torch.arange(40)
    for layer in range(2):
        weights = model.layers[layer].attend.attention_weights[:]
        assert torch.allclose(found["previous"][layer], weights[:, :, i[1:], i[:-1]].mean((0, 2)), atol=1e-6)
        on_followers = weights[:, :, i[20:], i[20:] - 19].mean((0, 2))
        assert torch.allclose(found["induction"][layer], on_followers, atol=1e-6)


@pytest.mark.parametrize("back", [1, 2])
def test_a_key_is_cut_from_the_first_layer_alone(back):
    model, (tokens, _) = fresh(), periodic(3)
    keep = torch.tensor([[k <= q and q - k != back for k in range(LENGTH)] for q in range(LENGTH)])
    with torch.no_grad():
        with ch.edit(model, ch.edits.ForceMask(without_key(back), layers=0)):
            cut = model(tokens)
        x = model.embed(tokens)
        y = model.layers[0].norm(x)
        x = model.layers[1](x + model.layers[0].attend(y, y, y, mask=keep))
        assert torch.allclose(cut, model.choose(model.norm(x)), atol=1e-5)
        assert not torch.allclose(cut, model(tokens), atol=1e-4)


def test_what_is_taken_away_comes_back():
    model, (tokens, period) = fresh(), periodic(8)
    with torch.no_grad():
        before = model(tokens)
        assert set(induction.without(model, tokens, period)) == {"previous key", "two back", "layer"}
        assert torch.equal(model(tokens), before)
