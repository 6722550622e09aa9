"""The keywords of other libraries are refused with what to write instead; unknown ones as Python refuses them."""

import inspect
import re

import pytest
import torch

import clearhead as ch
from clearhead import nn
from clearhead.base import keyword_hints

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
TORCH = "attn_mask dropout_p is_causal scale enable_gqa key_padding_mask need_weights"
LIBRARIES = "attention_mask output_attentions causal softmax_scale softcap window_size score_mod valid_len"
THEIRS = {*TORCH.split(), *LIBRARIES.split()}


def raises_hint(call, who, keyword, instead=""):
    expected = re.escape(f"{who}() takes no {keyword}. Write {instead}")
    with pytest.raises(ch.ClearheadError, match=f"^{expected}"):
        call(**{keyword: 3})


@pytest.mark.parametrize("called", FUNCTIONS | MODULES)
def test_keywords_of_others_are_answered_with_what_to_write(called):
    call = (FUNCTIONS | MODULES)[called]
    names = THEIRS | {"past_key_values", "position_ids"} if called == "MultiHeadAttention" else THEIRS
    for name in names - ({"scale", "dropout_p"} if called in FUNCTIONS else set()):
        raises_hint(call, called if called in FUNCTIONS else f"{called}.forward", name)


def test_each_hint_names_a_keyword_that_something_has():
    """A hint whose keyword no function has would never be given."""
    called = [*(vars(ch)[name] for name in FUNCTIONS if name != "plan"), ch.plan, ch.masked_softmax, *PARTS.values()]
    called += [vars(nn)[name].forward for name in MODULES]
    own = {name for function in called for name in inspect.signature(function).parameters}
    for keyword, hints in keyword_hints._HINTS.items():
        for hint in hints:
            assert (name := hint.partition("=")[0]) in own or not name.isidentifier(), (keyword, hint)


def test_a_subclass_may_have_such_keywords():
    class Own(nn.MultiHeadAttention):
        def __init__(self, num_hiddens, num_heads):
            super().__init__(num_hiddens, num_heads)

    assert Own(num_hiddens=8, num_heads=2)(X, X, X).shape == X.shape


def test_several_at_once():
    with pytest.raises(
        ch.ClearheadError, match=r"takes no is_causal\. Write mask=.*\n.*takes no softcap\. Write score="
    ):
        ch.attention(X, X, X, is_causal=True, softcap=2.0)


@pytest.mark.parametrize("called", FUNCTIONS | MODULES)
def test_other_keywords_are_pythons_error(called):
    call = (FUNCTIONS | MODULES)[called]
    name = called if called in FUNCTIONS else f"{called}.forward"
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'caussal'; the nearest is '"):
        call(caussal=True)
    with pytest.raises(TypeError, match="caussal"):
        call(is_causal=True, caussal=True)


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
def test_every_constructor_names_the_nearest_keyword(name):
    sides = inspect.signature(PARTS[name]).parameters
    last = list(sides)[-1]
    assert "**" not in str(inspect.signature(PARTS[name])) and "args" not in sides
    with pytest.raises(TypeError, match=rf"got an unexpected keyword argument '{last}s_'; the nearest is '{last}'$"):
        PARTS[name](**{last + "s_": 1})
    assert len(PARTS) > 35


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


ASKED = {"plan": ch.plan, "diagnose": ch.diagnose, "explain": ch.explain}
OF_OTHERS = ("engine", "score", "sinks", "layout", "digits", "tokens")  # of `attention`, of constructors, of `explain`


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(
    "module", [nn.MultiHeadAttention(8, 2), nn.DotProductAttention(), torch.nn.MultiheadAttention(8, 2)]
)
def test_arguments_of_other_functions_beside_a_module(module, asked):
    """One error in words, whichever function was given the module; `explain` has `digits` and `tokens` itself."""
    for name in OF_OTHERS[:4] if asked == "explain" else OF_OTHERS:
        raises_hint(lambda **more: ASKED[asked](module, X, X, X, **more), f"{type(module).__name__}.forward", name)


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
