"""Beam search returns its sequences in another order than the rows of its last step: `joined(sequences)` finds them."""

import warnings

import pytest
import torch
from test_joined import IDS, STEPS, attentions, bart, llama, made, t5, transformers

import clearhead as ch

assert transformers
PAD = 99  # the models give no such token


def returned(model, ids=IDS, **options):
    """What was seen of beam search, and the sequences that it returned, whose last token was never read."""
    options = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": PAD, "num_beams": 3} | options
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        sequences = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return seen, sequences


TEXTS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))


def beside(dense, want):
    torch.testing.assert_close(dense, want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("returns", [1, 2])
def test_rows_are_those_of_the_returned_sequences(cache, returns):
    model = made(llama)
    seen, sequences = returned(model, TEXTS, num_return_sequences=returns, cache_implementation=cache)
    wanted = attentions(model, "attentions", input_ids=sequences[:, :-1])
    with pytest.warns(UserWarning, match=r"these rows are beams.*joined\(sequences\)"):
        unsorted = seen.joined()
    with pytest.warns(UserWarning, match=r"joined\(sequences\)"):
        assert torch.equal(seen[seen.names[0]].joined()[:], unsorted[0].weights[:])
    assert (unsorted[0].weights[0] - wanted[0][0]).abs().max() > 1e-3  # row 0 is not the first that was returned
    joined = seen.joined(sequences)
    for name, call, want in zip(seen.names, joined, wanted, strict=True):
        beside(call.weights.dense(), want)
        beside(seen[name].joined(sequences.numpy()).dense(), want)
        assert torch.equal(call.ids, sequences[:, :-1]) and call.begins == (0, *range(9, 9 + STEPS - 1))
        torch.testing.assert_close(call.output, want @ call.value.repeat_interleave(2, 1), atol=1e-5, rtol=0)
    beside(seen[seen.names[1]].joined(sequences.flip(0)).dense(), wanted[1].flip(0))
    beside(seen[seen.names[1]].joined(sequences[0, :-1]).dense(), wanted[1][:1])
    # the page and the table of the first have the words of the first
    one, words = seen.joined(sequences[:1]), list(map(str, sequences[0, :-1].tolist()))
    assert one.view(tokens=words).page.meta()["texts"] == [words]
    same = [row["same word"] for row in one.table(tokens=words)[:4]]
    for head, share in enumerate(same):
        pairs = [[a == b and j < i for j, b in enumerate(words)] for i, a in enumerate(words)]
        by_hand = [wanted[0][0, head, i][row].sum() for i, row in enumerate(map(torch.tensor, pairs)) if row.any()]
        assert share == pytest.approx(float(sum(by_hand) / len(by_hand)), abs=1e-5)


def test_a_beam_that_ended_early_is_joined_by_itself():
    model, ids = made(llama), IDS[1:]
    _, free = returned(model, ids)
    seen, sequences = returned(model, ids, num_return_sequences=3, eos_token_id=int(free[0, 11]))
    lengths = (sequences != PAD).sum(1).tolist()
    assert lengths == [11, 12, 13]
    for sequence, length in zip(sequences, lengths, strict=True):
        wanted = attentions(model, "attentions", input_ids=sequence[None, : length - 1])
        for call, want in zip(seen.joined(sequence[:length]), wanted, strict=True):
            beside(call.weights.dense(), want)
    with pytest.raises(ch.ClearheadError, match=r"a beam ended early.*joined\(sequences\[i, :length\]\)"):
        seen.joined(sequences)


@pytest.mark.parametrize("make", [t5, bart])
def test_the_source_follows_the_returned_sequences(make):
    model = made(make)
    seen, sequences = returned(model)
    joined = seen.joined(sequences.flip(0))
    inputs = {"input_ids": IDS.flip(0), "decoder_input_ids": sequences[:, :-1].flip(0)}
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = model(**inputs, output_attentions=True)
    decoders = [call for call in joined if "decoder" in call.name]
    pairs = zip(wanted.decoder_attentions, wanted.cross_attentions, strict=True)
    for call, want in zip(decoders, [one for pair in pairs for one in pair], strict=True):
        beside(call.weights.dense(), want)
    encoders = [call for call in joined if "decoder" not in call.name]
    for call, want in zip(encoders, wanted.encoder_attentions, strict=True):
        beside(call.weights.dense(), want)


class Constant(torch.nn.Module):
    """Logits that do not see the text: every input has the same answers."""

    def forward(self, hidden):
        return hidden.new_zeros(()) * hidden.sum(-1, keepdim=True) + torch.arange(100.0).sin().to(hidden.dtype)


@pytest.mark.parametrize("options", [{}, {"num_return_sequences": 2}, {"num_beams": 4, "num_return_sequences": 2}])
def test_inputs_with_the_same_answers_keep_their_sources(options):
    """Rows of different inputs have the same tokens, and their cross attention reads different encoders."""
    model = made(bart)
    model.lm_head = Constant()
    seen, sequences = returned(model, **options)
    times = options.get("num_return_sequences", 1)
    assert torch.equal(sequences[:times], sequences[times:])
    inputs = {"input_ids": IDS.repeat_interleave(times, 0), "decoder_input_ids": sequences[:, :-1]}
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = model(**inputs, output_attentions=True)
    joined = seen.joined(sequences)
    cross = [call for call in joined if call.kind == "cross"]
    encoders = [call for call in joined if "decoder" not in call.name]
    for calls, wants in ((cross, wanted.cross_attentions), (encoders, wanted.encoder_attentions)):
        for call, want in zip(calls, wants, strict=True):
            beside(call.weights.dense(), want)
    name = cross[1].name
    beside(seen[name].joined(sequences).dense(), wanted.cross_attentions[1])
    for ask in (seen.joined, seen[name].joined):
        with pytest.raises(ch.ClearheadError, match=r"sequence 0 is the text of several rows.*Pass all sequences"):
            ask(sequences[:1])


def test_rows_that_stay_where_they_are_need_no_sequences():
    """A greedy batch of two texts; one text twice, whose rows stay equal; and two samples, which a warning names."""
    model = made(llama)
    for ids in (IDS, IDS[:1].repeat(2, 1)):
        seen, sequences = returned(model, ids, num_beams=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            joined = seen.joined()
        assert torch.equal(joined[1].weights[:], seen.joined(sequences)[1].weights[:])
    torch.manual_seed(0)
    seen, _ = returned(model, IDS[:1], num_beams=1, do_sample=True, num_return_sequences=2)
    with pytest.warns(UserWarning, match=r"joined\(sequences\)"):
        seen.joined()


def test_sequences_that_no_row_has_read_are_an_error(tmp_path):
    model = made(llama)
    seen, sequences = returned(model)
    for wrong in (sequences + 1, sequences[:, :-3], sequences.repeat(4, 1), sequences.repeat(1, 2)):
        with pytest.raises(ch.ClearheadError, match=r"not each is the text of a row"):
            seen.joined(wrong)
    for wrong in ("text", sequences.float(), [[1, 2]], sequences[:0]):
        with pytest.raises(ch.ClearheadError, match=r"expected the ids that generate returned, integers \(N, L\)"):
            seen.joined(wrong)
    again = ch.models.load_recording(seen.write(tmp_path / "seen"))
    with pytest.raises(ch.ClearheadError, match=r"which tokens .* has read is not known.*Leave sequences out"):
        again.joined(sequences)
    words = list(map(str, sequences[0].tolist()))
    for ask in (lambda: seen.view(tokens=words), lambda: seen.table(tokens=sequences)):
        with pytest.raises(ch.ShapeError, match=r"steps of a generation.*seen\.joined\(sequences\)"):
            ask()
    with ch.watch(block := ch.nn.DotProductAttention()) as plain:
        block(*[torch.rand(1, 1, 3, 4)] * 3)
    with pytest.raises(ch.ShapeError) as raised:
        plain.view(tokens=list("ab"))
    assert "generation" not in str(raised.value)
