"""What a model computed at padding is read by no metric: an error says where the words are."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from test_sweep import IDS, SAME, ablated
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import clearhead as ch

RIGHT = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
PADDED = {"input_ids": IDS, "attention_mask": RIGHT}
LEFT = {"input_ids": torch.cat([IDS[:1].roll(3, 1), IDS[1:]]), "attention_mask": RIGHT.flip(1)}
LAST = RIGHT.sum(1) - 1


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SAME, initializer_range=0.3)).eval()


def refused(ask: Any, said: str) -> None:
    with pytest.raises(ch.ClearheadError, match=re.escape(said)):
        ask()


def test_the_last_word_of_each_padded_text_is_that_of_the_text_alone(llama: Any) -> None:
    right = "position -1 of sequence 0 is padding by the attention mask"
    refused(lambda: ch.models.logit_attribution(llama, PADDED, token=5), right)
    refused(lambda: ch.models.logit_attribution(llama, PADDED, token=5, position=[2, -7]), "whole number from -6 to 5")
    found = ch.models.logit_attribution(llama, PADDED, token=5, position=LAST)
    beside = ch.models.logit_attribution(llama, LEFT, token=5)  # -1 is a word where padding is on the left
    for row, length in enumerate([3, 6]):
        alone = ch.models.logit_attribution(llama, IDS[row : row + 1, :length], token=5)
        for one in (found, beside):
            torch.testing.assert_close(one.logit[row], alone.logit[0], atol=1e-5, rtol=0)
            for call, own in zip(one, alone, strict=True):
                torch.testing.assert_close(call.heads[row], own.heads[0], atol=1e-5, rtol=0)
    refused(
        lambda: ch.models.logit_attribution(llama, LEFT, token=5, position=1),
        "position 1 of sequence 0 is padding by the attention mask, so its logits are those of no token. The last "
        "word of each sequence is at position=-1.",
    )
    # an answer at each position of a padded text: those at padding may be left aside
    every = ch.models.logit_attribution(llama, PADDED, token=5, position=[range(6)])
    torch.testing.assert_close(every.logit[0, 2], found.logit[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("measure", [ch.models.sweep, ch.models.attribution_patching])
def test_a_sweep_knows_the_padding_of_its_inputs(llama: Any, measure: Any) -> None:
    with torch.no_grad():
        logits = llama(**PADDED).logits
    right = "position -1 of sequence 0 is padding by the attention mask, so its logits are those of no token. "
    right += "The last word of each sequence is at position=attention_mask.sum(1) - 1."
    for metric in (ch.models.logit_difference(5), ch.models.logit_difference(5, 7), ch.models.kl(logits)):
        refused(lambda metric=metric: measure(llama, ablated, PADDED, metric), right)
    refused(lambda: measure(llama, ablated, PADDED, ch.models.next_token_loss(IDS)), "some of ids are padding")
    refused(
        lambda: measure(
            llama, ablated, LEFT, ch.models.next_token_loss(IDS.masked_fill(LEFT["attention_mask"] == 0, -1))
        ),
        "follow padding",
    )
    found = measure(llama, ablated, PADDED, ch.models.logit_difference(5, position=LAST))
    assert found.plain == pytest.approx(float(logits[[0, 1], LAST, 5].mean()), abs=1e-5)
    for inputs in (PADDED, LEFT):
        mask, ids = inputs["attention_mask"], inputs["input_ids"]
        loss = ch.models.next_token_loss(ids.masked_fill(mask * mask.roll(1, 1) == 0, -100))
        alone = [llama(IDS[n : n + 1, :length], labels=IDS[n : n + 1, :length]).loss for n, length in enumerate([3, 6])]
        assert measure(llama, ablated, inputs, loss).plain == pytest.approx(float(sum(alone).detach()) / 2, abs=1e-5)
    # a metric of one's own, and inputs without a mask, are as they were
    own = measure(llama, ablated, PADDED, lambda output: output.logits[:, -1, 5])
    assert own.plain == pytest.approx(float(logits[:, -1, 5].mean()), abs=1e-5)
    measure(llama, ablated, IDS, ch.models.logit_difference(5))


class Wrapped(torch.nn.Module):
    """A module around a model whose inputs have no names."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


@pytest.mark.parametrize("around", [lambda model: model, Wrapped], ids=["itself", "wrapped"])
def test_the_mask_of_an_encoder_is_not_the_decoders(around: Any) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4}
    model = around(T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)).eval())
    inputs = PADDED | {"decoder_input_ids": IDS}
    for mask, fits in ((None, True), (RIGHT.flip(1), True), (RIGHT, False)):
        more = {} if mask is None else {"decoder_attention_mask": mask}
        if fits:
            ch.models.sweep(model, ablated, inputs | more, ch.models.logit_difference(5))
        else:
            refused(
                lambda more=more: ch.models.sweep(model, ablated, inputs | more, ch.models.logit_difference(5)),
                "position -1 of sequence 0 is padding",
            )
    every = torch.tensor([[1, 1, 1, 0, 0, 0]] * 2)  # a mask that no difference between texts tells from a decoder's
    with torch.no_grad(), ch.watch(model) as seen:
        model(**inputs | {"attention_mask": every})
    for call in seen:
        encoder, cross = "decoder" not in call.name, call.kind == "cross"
        queries, keys = call.padding or (None, None)
        for side, padded in ((queries, encoder), (keys, encoder or cross)):
            assert torch.equal(side, every.bool()) if padded else side is None, call.name


@pytest.mark.parametrize("text", ["hello", b"hello", ["hello", "you"], ("hello",), [1, 2, 3], [[1, 2]]], ids=repr)
def test_a_text_in_the_place_of_its_ids_is_one_error(llama: Any, text: Any) -> None:
    metric = ch.models.logit_difference(5)
    for ask in (
        lambda: ch.models.logit_attribution(llama, text, token=3),
        lambda: ch.models.sweep(llama, ablated, text, metric),
        lambda: ch.models.attribution_patching(llama, ablated, text, metric),
        lambda: ch.models.circuits(llama, text),
    ):
        refused(ask, "a text or tokens: pass what the tokenizer makes of it, tokenizer(text")
