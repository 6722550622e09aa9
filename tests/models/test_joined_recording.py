"""The steps of a generation as one recording: its calls, its tables and its page, beside a full forward."""

import pytest
import torch
import torch.nn.functional as F
from test_joined import BART, LEFT, STEPS, attentions, generated, llama, made, transformers

import clearhead as ch


@pytest.mark.parametrize("mask", [None, LEFT], ids=["no padding", "left padding"])
def test_it_is_a_full_forward(mask, tmp_path):
    model = made(llama)
    seen, sequences = generated(model, mask=mask, values=True)
    joined = seen.joined()
    full = None if mask is None else F.pad(mask, (0, STEPS - 1), value=1)
    with torch.no_grad(), ch.watch(model, values=True) as whole:
        model(input_ids=sequences, attention_mask=full)
    wanted = attentions(model, "attentions", input_ids=sequences, attention_mask=full)
    words = torch.ones_like(sequences).bool() if full is None else full.bool()
    assert joined.names == seen.names and len(joined) == len(whole) == 2
    for call, other, want in zip(joined, whole, wanted, strict=True):
        rows = words[:, None, :].expand(want.shape[:3])
        torch.testing.assert_close(call.weights.dense()[rows], want[rows], atol=1e-6, rtol=0)
        keys = words[:, None, :].expand(call.value.shape[:3])
        torch.testing.assert_close(call.value[keys], other.value[keys], atol=1e-5, rtol=0)
        torch.testing.assert_close(call.output[rows], other.output[rows], atol=1e-5, rtol=0)
        assert call.begins == (0, *range(9, 9 + STEPS - 1))
    for row, other in zip(joined.table(tokens=sequences), whole.table(tokens=sequences), strict=True):
        assert "step" not in row
        for name in ("previous", "same word", "normalised entropy", "distance", "weighted value norm"):
            assert row[name] == pytest.approx(other[name], abs=1e-5), name
    view = joined.view(sequence=1, tokens=[f"w{i}" for i in range(sequences.shape[1])])
    meta = view.page.meta()
    pad = 0 if mask is None else 3
    for layer in meta["layers"]:
        assert layer["answer"] == 9 - pad and layer["begins"] == [0, *range(9 - pad, 9 + STEPS - 1 - pad)]
    assert meta["flows"] == [[0, 1]]  # one text, as of one run


def test_the_token_that_was_never_read_is_left_out():
    seen, sequences = generated(made(llama))
    words = [f"w{i}" for i in range(sequences.shape[1] + 1)]
    with pytest.warns(UserWarning, match="the last one was generated and never read"):
        meta = seen.joined().view(tokens=words).page.meta()
    assert meta["texts"] == [words[:-1]]


def test_an_encoder_decoder_has_its_cross_attention_too():
    model = made(
        lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**BART, decoder_start_token_id=2))
    )
    seen, sequences = generated(model)
    joined = seen.joined()
    assert [(call.kind, call.shape[2:]) for call in joined if "decoder" in call.name] == [
        (kind, (sequences.shape[1], length))
        for _ in range(2)
        for kind, length in (("self", sequences.shape[1]), ("cross", 9))
    ]


def test_one_run_is_one_step():
    class Block(torch.nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    with ch.watch(model := Block()) as seen:
        model(torch.rand(1, 2, 5, 8))
    assert seen.joined()[0].shape == (1, 2, 5, 5) and seen.joined()[0].begins == (0,)
