"""The keywords of other libraries are refused with what to write instead; unknown ones as Python refuses them."""

import inspect

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import clearhead as ch
from clearhead import nn
from clearhead.nn._keywords import OF_ADDITIVE, OF_DOT_PRODUCT, OF_MULTI_HEAD, OF_POSITIONS

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


BUILT = {
    "MultiHeadAttention": (nn.MultiHeadAttention, OF_MULTI_HEAD, (8, 2)),
    "AdditiveAttention": (nn.AdditiveAttention, OF_ADDITIVE, (4,)),
    "DotProductAttention": (nn.DotProductAttention, OF_DOT_PRODUCT, ()),
    "SinusoidalPositionalEncoding": (nn.SinusoidalPositionalEncoding, OF_POSITIONS, (8,)),
}
TEACHING = {"num_hiddens", "query_size", "key_size", "value_size"}  # Dive into Deep Learning, older and newer


@pytest.mark.parametrize("name", BUILT)
def test_what_builds_a_module_says_what_to_write(name):
    cls, table, sizes = BUILT[name]
    for keyword, instead in table.items():
        for args in (sizes, ()):  # with and without what has to be given
            with pytest.raises(ch.ClearheadError) as caught:
                cls(*args, **{keyword: 3})
            assert str(caught.value).startswith(f"{name} takes no {keyword}: ")
            assert str(caught.value).endswith(f"\n  - for {keyword}: {instead}")
        assert keyword not in inspect.signature(cls).parameters
    with pytest.raises(
        TypeError, match=rf"^{name}.__init__\(\) got an unexpected keyword argument 'num_hidens'; it takes "
    ):
        cls(*sizes, num_hidens=3)
    assert cls(*sizes).training and "**" not in str(inspect.signature(cls))


def test_the_keywords_of_torch_and_of_teaching_are_known():
    theirs = {*inspect.signature(torch.nn.MultiheadAttention).parameters} - {"device", "dtype", "dropout"}
    for name in ("MultiHeadAttention", "AdditiveAttention", "DotProductAttention"):
        cls, table, _ = BUILT[name]
        known = {*table, *inspect.signature(cls).parameters}
        assert TEACHING <= known
        assert theirs - {"add_bias_kv", "add_zero_attn"} <= known
    assert theirs <= {*OF_MULTI_HEAD, *inspect.signature(nn.MultiHeadAttention).parameters}


def test_more_by_position_than_there_are_says_what_older_code_means():
    with pytest.raises(ch.ClearheadError, match=r"got 6.\n.*write MultiHeadAttention\(num_hiddens, num_heads,"):
        nn.MultiHeadAttention(8, 8, 8, 8, 2, 0.5)
    with pytest.raises(ch.ClearheadError, match=r"got 4.\n.*write AdditiveAttention\(num_hiddens, dropout,"):
        nn.AdditiveAttention(2, 20, 8, 0.1)
    with pytest.raises(TypeError, match="positional"):
        nn.DotProductAttention(0.1, 2)


def test_a_subclass_may_have_such_keywords():
    class Own(nn.MultiHeadAttention):
        def __init__(self, num_hiddens, num_heads):
            super().__init__(num_hiddens, num_heads)

    assert Own(num_hiddens=8, num_heads=2)(X, X, X).shape == X.shape


@pytest.mark.parametrize("name", ["mask", "attn_mask", "valid_len", "lengths", "axis"])
def test_masked_softmax_says_what_to_write(name):
    for call in (ch.masked_softmax, lambda *given, **more: ch.explain(ch.masked_softmax, *given, **more)):
        with pytest.raises(ch.ClearheadError, match=rf"(?s)^masked_softmax takes no {name}: .*\n  - for {name}: "):
            call(X[0], **{name: 1})
    with pytest.raises(TypeError, match="'mask_'"):
        ch.masked_softmax(X[0], mask_=1)


LENGTHS = {
    "valid_lens.long()": torch.tensor([2.0, 3.0]),
    "valid_lens.astype(int)": np.array([2.0, 3.0]),
    "[int(n) for n in valid_lens]": [2.0, 3.0],
}


@pytest.mark.parametrize("instead", LENGTHS)
def test_lengths_that_are_floats_are_told_how_to_be_integers(instead):
    valid_lens = LENGTHS[instead]
    for call in (ch.Lengths, lambda lengths: ch.attention(X, X, X, valid_lens=lengths), MODULES["AdditiveAttention"]):
        with pytest.raises(ch.ClearheadError, match="says how many keys may be seen") as caught:
            call(valid_lens) if call is not MODULES["AdditiveAttention"] else call(valid_lens=valid_lens)
        assert str(caught.value).endswith(f"Pass {instead}.")
    torch.testing.assert_close(
        ch.attention(X, X, X, valid_lens=eval(instead)), ch.attention(X, X, X, valid_lens=[2, 3])
    )


def test_lengths_in_the_place_of_a_mask_are_named():
    with pytest.raises(ch.ClearheadError, match=r"seems to be lengths, \(B,\): pass valid_lens=mask.long\(\)"):
        nn.MultiHeadAttention(8, 2)(X, X, X, torch.tensor([2.0, 3.0]))


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


@pytest.mark.parametrize("tokens", [torch.ones(5, 5).long(), torch.ones(5, 5), torch.ones(5, 5).bool()])
def test_a_tokenizers_mask_beside_a_mask_is_padding(tokens):
    """B = L, where its shape says nothing: the message names Padding first."""
    for join in (lambda: ch.Causal() & tokens, lambda: tokens & ch.Causal(), lambda: ch.Causal() | tokens.numpy()):
        with pytest.raises(ch.ClearheadError) as caught:
            join()
        said = str(caught.value)
        assert 0 < said.index("Padding(") < said.index("DenseMask(") and "tokenizer's attention_mask" in said


SPACES = {"": ch, "nn.": nn, "reductions.": ch.reductions, "edits.": ch.edits}
MADE = {"nn.PreparedKeys", "nn.RotaryScaling"}  # by `prepare`, and by its own methods
PARTS = {f"{space}{name}": cls for space, owner in SPACES.items() for name, cls in vars(owner).items()}
PARTS = {
    name: cls
    for name, cls in PARTS.items()
    if inspect.isclass(cls)
    and cls.__module__.startswith("clearhead.")
    and not issubclass(cls, Exception)
    and name not in MADE
    and inspect.signature(cls).parameters
}


@pytest.mark.parametrize("name", PARTS)
def test_every_constructor_says_what_it_takes_the_nearest_name_first(name):
    own = list(inspect.signature(PARTS[name]).parameters)
    with pytest.raises(TypeError, match="got an unexpected keyword argument") as caught:
        PARTS[name](**{own[-1] + "s_": 1})
    listed = str(caught.value).partition("; it takes ")[2].split(", ")
    assert listed[0] == own[-1] and sorted(listed) == sorted(own), str(caught.value)
    assert len(PARTS) > 35


OTHERS = {
    "window": (ch.SlidingWindow, "before=window - 1"),
    "size": (ch.SlidingWindow, "before=size - 1"),
    "window_size": (ch.SlidingWindow, "before=window_size - 1"),
    "cap": (ch.Dot, "softcap=cap"),
    "causal": (lambda **more: ch.RelativeBias(8, **more), "bidirectional=not causal"),
    "rope": (lambda **more: nn.MultiHeadAttention(8, 2, **more), "rotary=RotaryEmbedding(head_dim)"),
}


@pytest.mark.parametrize("keyword", OTHERS)
def test_parts_know_the_names_of_others(keyword):
    make, instead = OTHERS[keyword]
    with pytest.raises(ch.ClearheadError, match=rf"takes no {keyword}: ") as caught:
        make(**{keyword: 3})
    assert f"for {keyword}: {instead}" in str(caught.value)


def test_what_others_are_told_to_write_is_right():
    window = 3
    keep = torch.ones(5, 5).tril().triu(1 - window).bool()  # the last `window` keys, the query's own with them
    mask = ch.Causal() & ch.SlidingWindow(before=window - 1)
    torch.testing.assert_close(ch.attention(X, X, X, mask=mask), ch.attention(X, X, X, mask=keep))
    cap, causal = 2.0, True
    assert ch.Dot(softcap=cap).softcap == cap and not ch.RelativeBias(8, bidirectional=not causal).bidirectional


def test_a_part_is_made_in_compiled_code_and_in_a_subclass():
    def windowed(x):
        return ch.attention(x, x, x, mask=ch.SlidingWindow(before=3))

    step = torch.compile(windowed, backend="eager", fullgraph=True)
    torch.testing.assert_close(step(X), windowed(X))

    class Own(ch.Dot):
        def __init__(self, mine):
            super().__init__(softcap=mine)

    assert Own(mine=2.0).softcap == 2.0
    with pytest.raises(TypeError, match=r"Own.__init__\(\) got an unexpected keyword argument 'other'$"):
        Own(other=2.0)


OF_OTHERS = (
    "engine",
    "score",
    "sinks",
    "layout",
    "digits",
    "tokens",
)  # of attention, of what builds a module, of explain
ASKED = {"plan": ch.plan, "diagnose": ch.diagnose, "explain": ch.explain}


@pytest.mark.parametrize("name", OF_OTHERS)
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(
    "module", [nn.MultiHeadAttention(8, 2), nn.DotProductAttention(), torch.nn.MultiheadAttention(8, 2)]
)
def test_arguments_of_other_functions_beside_a_module(module, asked, name):
    """One error in words, whichever function was given the module; `explain` has `digits` and `tokens` itself."""
    if asked == "explain" and name in ("digits", "tokens"):
        return
    with pytest.raises(ch.ClearheadError) as caught:
        ASKED[asked](module, X, X, X, **{name: 3})
    who = type(module).__name__
    assert str(caught.value).startswith(f"{who} takes no {name}: other functions of clearhead have such arguments.")
    assert f"\n  - for {name}: " in str(caught.value) and "torch.nn" not in str(caught.value)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(
    "module", [nn.MultiHeadAttention(8, 2), torch.nn.MultiheadAttention(8, 2), nn.SinusoidalPositionalEncoding(8)]
)
def test_a_word_that_nothing_knows_beside_a_module(module, asked):
    given = X[0] if isinstance(module, nn.SinusoidalPositionalEncoding) else (X, X, X)
    if asked != "explain" and isinstance(module, nn.SinusoidalPositionalEncoding):
        return
    with pytest.raises(
        ch.ClearheadError, match=f"{asked} calls {type(module).__name__} with the other arguments: .*'q_'"
    ):
        ASKED[asked](module, *([given] if torch.is_tensor(given) else given), q_=1)


@pytest.mark.parametrize(
    ("called", "name"), [("weights", "dropout_p"), ("partial", "dropout_p"), ("attention", "digits")]
)
def test_arguments_of_other_functions_beside_a_call(called, name):
    with pytest.raises(ch.ClearheadError, match=f"^{called} takes no {name}: .*\n  - for {name}: "):
        FUNCTIONS[called](**{name: None})
