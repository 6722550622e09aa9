"""The keywords of other libraries are refused with what to write instead; unknown ones as Python refuses them."""

import inspect

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import clearhead as ch
from clearhead import nn

X = torch.rand(2, 5, 8)
FUNCTIONS = {
    "attention": lambda **more: ch.attention(X, X, X, **more),
    "plan": lambda **more: ch.plan(X, X, X, **more),
    "partial": lambda **more: ch.partial(X, X, X, **more),
    "weights": lambda **more: ch.weights(X, X, **more),
}
MODULES = {
    "MultiHeadAttention": lambda **more: nn.MultiHeadAttention(8, 2)(X, X, X, **more),
    "DotProductAttention": lambda **more: nn.DotProductAttention()(X, X, X, **more),
    "AdditiveAttention": lambda **more: nn.AdditiveAttention(4)(X, X, X, **more),
}
# torch's functions, by their signatures; scaled_dot_product_attention has none, and flash-attn is not installed here
THEIRS = {*inspect.signature(torch.nn.MultiheadAttention.forward).parameters}
THEIRS |= {*inspect.signature(flex_attention).parameters} - {"kernel_options", "return_aux"}
THEIRS |= {"attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "causal", "softmax_scale", "window_size"}
THEIRS |= {"softcap", "alibi_slopes", "dropout", "attention_mask", "cu_seqlens_q", "cu_seqlens_k"}
THEIRS |= {"explain", "return_weights"}  # code for teaching
OF_MODULES = {"scale", "dropout_p", "position_ids", "past_key_values"}
OURS = {"self", "query", "key", "value", "score", "mask", "valid_lens", "bias", "scale", "sinks", "align", "dropout_p"}


@pytest.mark.parametrize("name", sorted(THEIRS - OURS))
@pytest.mark.parametrize("called", FUNCTIONS)
def test_functions_say_what_to_write(called, name):
    with pytest.raises(ch.ClearheadError) as caught:
        FUNCTIONS[called](**{name: None})
    assert str(caught.value).startswith(f"{called} takes no {name}: ") and f"\n  - for {name}: " in str(caught.value)


@pytest.mark.parametrize("name", sorted(THEIRS - OURS | OF_MODULES))
@pytest.mark.parametrize("called", MODULES)
def test_modules_say_what_to_write(called, name):
    with pytest.raises(ch.ClearheadError) as caught:
        MODULES[called](**{name: None})
    assert str(caught.value).startswith(f"{called} takes no {name}: ") and f"\n  - for {name}: " in str(caught.value)


def test_several_at_once():
    with pytest.raises(ch.ClearheadError, match=r"(?s)is_causal, softcap.*- for is_causal: .*- for softcap: "):
        ch.attention(X, X, X, is_causal=True, softcap=2.0)


@pytest.mark.parametrize("called", FUNCTIONS | MODULES)
def test_other_keywords_are_pythons_error(called):
    call = (FUNCTIONS | MODULES)[called]
    name = called if called in FUNCTIONS else f"{called}.forward"
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'caussal'$"):
        call(caussal=True)
    with pytest.raises(TypeError, match="caussal"):
        call(is_causal=True, caussal=True)


def test_options_that_only_a_function_has_are_no_keyword_of_others():
    with pytest.raises(TypeError, match="'dropout_p'"):
        ch.weights(X, X, dropout_p=0.1)


@pytest.mark.parametrize("tokens", [torch.ones(5, 5).long(), torch.ones(5, 5), torch.ones(5, 5).bool()])
def test_a_tokenizers_mask_beside_a_mask_is_padding(tokens):
    """B = L, where its shape says nothing: the message names Padding first."""
    for join in (lambda: ch.Causal() & tokens, lambda: tokens & ch.Causal(), lambda: ch.Causal() | tokens.numpy()):
        with pytest.raises(ch.ClearheadError) as caught:
            join()
        said = str(caught.value)
        assert 0 < said.index("Padding(") < said.index("DenseMask(") and "tokenizer's attention_mask" in said
