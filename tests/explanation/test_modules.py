"""Modules explained: their last step is what they give, and the script computes all of it from their inputs."""

import pytest
import torch
from drawn import draw
from recomputed import check_script

import clearhead as ch
from clearhead import nn


def made(build, seed=0):
    torch.manual_seed(seed)
    return build()


ROTARY = {
    "no rotary": lambda: None,
    "halves": lambda: nn.RotaryEmbedding(4),
    "some entries": lambda: nn.RotaryEmbedding(2),
    "interleaved": lambda: nn.RotaryEmbedding(4, interleaved=True),
}
INPUTS = {
    "self": lambda x, memory: (x, x, x),
    "cross": lambda x, memory: (x, memory, memory),
    "three": lambda x, memory: (x, memory, memory + 1),
}


def check_multi_head(module, inputs, at=None):
    keywords = {"mask": ch.Causal(), "align": "lower_right"}
    explanation = ch.explain(module, *inputs, **keywords, at=at)
    with pytest.raises(ch.ClearheadError, match="no call of it was recorded"):
        _ = module.attention_weights
    with torch.no_grad():
        output = module(*inputs, **keywords)[..., list(explanation.shown.queries), :]
    torch.testing.assert_close(explanation["result"], output, rtol=1e-4, atol=1e-5)
    check_script(explanation)


@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("score", [None, "additive"])
@pytest.mark.parametrize("given", INPUTS)
def test_multi_head(rotary, kv_heads, score, given):
    score = made(lambda: ch.Additive(4, 4, 3)) if score else None
    turn = ROTARY[rotary]()
    module = made(lambda: nn.MultiHeadAttention(5, 6, head_dim=4, num_kv_heads=kv_heads, rotary=turn, score=score))
    check_multi_head(module, INPUTS[given](draw(1, 3, 5), draw(1, 4, 5, seed=1)))


class Doubled(torch.nn.Module):
    def forward(self, x):
        return 2 * x


def swing(x, *, positions):
    return x * (1 + torch.sin(positions[:, None, :, None].to(x)))


YARN = nn.RotaryScaling.yarn(4.0, 16)
OPTIONS = {
    "norms": lambda: {
        "query_norm": torch.nn.RMSNorm(4),
        "key_norm": torch.nn.LayerNorm(4),
        "rotary": nn.RotaryEmbedding(4),
    },
    "own parts": lambda: {
        "query_norm": Doubled(),
        "key_norm": Doubled(),
        "rotary": swing,
        "temperature": torch.rand(6) + 1,
    },
    "own norm alone": lambda: {"query_norm": Doubled(), "sinks": True, "score_bias": ch.ALiBi(6)},
    "scaled rotary": lambda: {"rotary": nn.RotaryEmbedding(2, scaling=YARN), "scale": 0.7, "gate": "headwise"},
    "dynamic rotary": lambda: {
        "rotary": nn.RotaryEmbedding(4, scaling=nn.RotaryScaling.dynamic(2.0, 2)),
        "temperature": 2.0,
    },
    "scales": lambda: {
        "scale": torch.nn.Parameter(torch.rand(6)),
        "temperature": torch.rand(()),
        "gate": "elementwise",
    },
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("at", [None, (0, slice(0, 5, 2), slice(0, 3, 2))], ids=["all", "some"])
def test_options(name, kv_heads, given, at):
    module = made(lambda: nn.MultiHeadAttention(5, 6, head_dim=4, num_kv_heads=kv_heads, **OPTIONS[name]()))
    inputs = INPUTS[given](draw(1, 3, 5), draw(1, 4, 5, seed=1))
    check_multi_head(module, inputs, at)
    if module.rotary is not None:
        at, key_at = torch.tensor([5, 0, 2]), torch.arange(inputs[1].shape[1]) + 3
        explanation = ch.explain(module, *inputs, positions=at, key_positions=key_at)
        with torch.no_grad():
            output = module(*inputs, positions=at, key_positions=key_at)
        torch.testing.assert_close(explanation["result"], output, rtol=1e-4, atol=1e-5)
        check_script(explanation)


def test_options_with_a_cache_of_unequal_lengths():
    module = made(lambda: nn.MultiHeadAttention(5, 6, head_dim=4, gate="headwise", **OPTIONS["norms"]()))
    cache, x, new = nn.KeyValueCache(), draw(2, 3, 5), draw(2, 1, 5, seed=1)
    with torch.no_grad():
        module(x, x, x, mask=ch.Causal(), cache=cache, new_lens=[3, 1])
        second = ch.explain(module, new, new, new, mask=ch.Causal(), cache=cache, at=1)
        output = module(new, new, new, mask=ch.Causal(), cache=cache)
    torch.testing.assert_close(second["result"], output[1:], rtol=1e-4, atol=1e-5)
    check_script(second)


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("batched", [True, False], ids=["batch", "no batch"])
@pytest.mark.parametrize("at", [(1, 2), (slice(0, 4, 2),), 5], ids=str)
def test_some_heads_and_queries(given, batched, at):
    module = made(lambda: nn.MultiHeadAttention(5, 6, head_dim=4, num_kv_heads=2, rotary=ROTARY["halves"]()))
    x, memory = draw(2, 3, 5), draw(2, 4, 5, seed=1)
    if not batched:
        return check_multi_head(module, INPUTS[given](x[0], memory[0]), at)
    index = at if isinstance(at, tuple) else (at,)
    inputs = INPUTS[given](x, memory)
    explanation = ch.explain(module, *inputs, at=(1, *index))
    with torch.no_grad():
        output = module(*inputs)[1:, list(explanation.shown.queries)]
    torch.testing.assert_close(explanation["result"], output, rtol=1e-4, atol=1e-5)
    check_script(explanation)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["self", "cross", "other widths"])
@pytest.mark.parametrize("batched", [True, False], ids=["batch", "no batch"])
def test_torch_s_module(batch_first, bias, kind, batched):
    width = 7 if kind == "other widths" else None
    module = made(lambda: torch.nn.MultiheadAttention(8, 2, bias=bias, batch_first=batch_first, kdim=width, vdim=width))
    x, memory = draw(2, 3, 8), draw(2, 4, width or 8, seed=1)
    if not batched:
        x, memory = x[0], memory[0]
    elif not batch_first:
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    hidden = torch.tensor([[False, False, False, True], [False, False, True, True]])
    if kind == "self":
        inputs, keywords = (x, x, x), {"attn_mask": torch.ones(3, 3, dtype=torch.bool).triu(1)}
    else:
        inputs, keywords = (x, memory, memory), {"key_padding_mask": hidden if batched else hidden[0]}
    explanation = ch.explain(module, *inputs, **keywords)
    with torch.no_grad():
        output = module(*inputs, **keywords)[0]
    if batched and not batch_first:
        output = output.transpose(0, 1)
        assert "(L, B, E); here the batch comes first" in str(explanation)
    torch.testing.assert_close(explanation["result"], output, rtol=1e-4, atol=1e-5)
    check_script(explanation)


def test_dropout_of_a_module_in_training_is_shown_and_adds_up():
    module = made(lambda: nn.MultiHeadAttention(8, 2, dropout=0.5))
    x = draw(1, 4, 8)
    torch.manual_seed(1)
    explanation = ch.explain(module, x, x, x)
    torch.manual_seed(1)
    with torch.no_grad():
        torch.testing.assert_close(explanation["result"], module(x, x, x), rtol=1e-4, atol=1e-5)
    assert "probability 0.5" in str(explanation)
    check_script(explanation)


def test_additive_attention_with_lengths():
    module = made(lambda: nn.AdditiveAttention(8))
    query, key, value = draw(2, 1, 20), draw(2, 10, 2, seed=1), draw(2, 10, 4, seed=2)
    explanation = ch.explain(module, query, key, value, valid_lens=[2, 6])
    with torch.no_grad():
        output = module(query, key, value, valid_lens=[2, 6])
    torch.testing.assert_close(explanation["output"], output, rtol=1e-4, atol=1e-5)
    check_script(explanation)


def test_dot_product_attention():
    query = draw(2, 3, 4)
    explanation = ch.explain(nn.DotProductAttention(), query, query, query, mask=ch.Causal())
    output = ch.attention(query, query, query, mask=ch.Causal())
    torch.testing.assert_close(explanation["output"], output, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rotary", ["no rotary", "halves"])
def test_keys_of_a_cache_are_given_and_the_cache_stays(rotary):
    module = made(lambda: nn.MultiHeadAttention(8, 2, rotary=ROTARY[rotary]()))
    cache, x = nn.KeyValueCache(), draw(2, 3, 8)
    with torch.no_grad():
        module(x, x, x, mask=ch.Causal(), cache=cache)
    new = draw(2, 1, 8, seed=1)
    explanation = ch.explain(module, new, new, new, mask=ch.Causal(), cache=cache)
    assert len(cache) == 3
    with torch.no_grad():
        output = module(new, new, new, mask=ch.Causal(), cache=cache)
    torch.testing.assert_close(explanation["result"], output, rtol=1e-4, atol=1e-5)
    check_script(explanation)


def test_prepared_keys_are_given():
    module = made(lambda: nn.MultiHeadAttention(8, 2))
    x, memory = draw(2, 3, 8), draw(2, 4, 8, seed=1)
    with torch.no_grad():
        prepared = module.prepare(memory, memory)
        explanation = ch.explain(module, x, prepared)
        torch.testing.assert_close(explanation["result"], module(x, prepared), rtol=1e-4, atol=1e-5)
    check_script(explanation)


POSITIONAL = {
    "sines": lambda: nn.SinusoidalPositionalEncoding(6),
    "sines of an odd width": lambda: nn.SinusoidalPositionalEncoding(7),
    "learnt": lambda: nn.LearnedPositionalEncoding(32, 6),
    "rotary": lambda: nn.RotaryEmbedding(4),
    "rotary, interleaved": lambda: nn.RotaryEmbedding(6, interleaved=True),
}


@pytest.mark.parametrize("kind", POSITIONAL)
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("length", [5, 12])
def test_positions(kind, lead, length):
    module = made(POSITIONAL[kind])
    x = draw(*lead, length, 7 if "odd" in kind else 6)
    explanation = ch.explain(module, x, offset=3)
    with torch.no_grad():
        output = module(x, offset=3)[..., :8, :]
    torch.testing.assert_close(explanation["result"], output, rtol=1e-5, atol=1e-5)
    check_script(explanation)
    torch.testing.assert_close(
        ch.explain(module, x, offset=3, at=2)["result"], output[..., 2:3, :], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "module",
    [nn.RotaryEmbedding(4, scaling=YARN), nn.SinusoidalPositionalEncoding(4), nn.LearnedPositionalEncoding(9, 4)],
    ids=lambda module: type(module).__name__,
)
@pytest.mark.parametrize("positions", [[0, 1, 0], [[0, 1, 0], [5, 6, 7]]], ids=["(L,)", "(B, L)"])
def test_positions_as_given(module, positions):
    x = draw(2, 3, 4)
    explanation = ch.explain(module, x, positions=positions)
    with torch.no_grad():
        torch.testing.assert_close(explanation["result"], module(x, positions=positions), rtol=1e-5, atol=1e-5)
    check_script(explanation)


def test_rotary_at_positions_of_each_sequence():
    rotary, x, offset = nn.RotaryEmbedding(4), draw(2, 3, 1, 4), torch.tensor([5, 9])
    explanation = ch.explain(rotary, x, offset=offset)
    torch.testing.assert_close(explanation["result"], rotary(x, offset=offset), rtol=1e-5, atol=1e-5)


def test_a_module_of_another_kind_is_an_error_that_says_what_to_do():
    with pytest.raises(ch.ClearheadError, match="not a Linear"):
        ch.explain(torch.nn.Linear(2, 2), draw(2, 2))


def test_a_lazy_module_stays_lazy_and_is_explained_as_its_first_call_will_be():
    module = nn.AdditiveAttention(8)
    query, key = draw(2, 1, 20), draw(2, 10, 2, seed=1)
    torch.manual_seed(3)
    explanation = ch.explain(module, query, key, key)
    assert "Uninitialized" in type(module.W_q.weight).__name__
    with torch.no_grad():
        torch.testing.assert_close(explanation["output"], module(query, key, key), rtol=1e-4, atol=1e-5)


def test_a_module_in_training_draws_nothing():
    module, x = made(lambda: nn.MultiHeadAttention(8, 2, dropout=0.5)), draw(1, 4, 8)
    state = torch.random.get_rng_state()
    ch.explain(module, x, x, x)
    assert torch.equal(torch.random.get_rng_state(), state)


class Twice(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Thrice(nn.MultiHeadAttention):
    def forward(self, *inputs, **keywords):
        return 3 * super().forward(*inputs, **keywords)


class TorchThrice(torch.nn.MultiheadAttention):
    def forward(self, *inputs, **keywords):
        return 3 * super().forward(*inputs, **keywords)[0], None


def with_layer(name, layer):
    module = nn.MultiHeadAttention(8, 2)
    setattr(module, name, layer)
    return module


def with_hook():
    module = nn.MultiHeadAttention(8, 2)
    module.W_v.register_forward_hook(lambda layer, given, output: 2 * output)
    return module


CHANGED = {
    "a layer of another kind": lambda: with_layer("W_q", Twice(8, 8)),
    "no layer": lambda: with_layer("W_o", torch.nn.Identity()),
    "a hook": with_hook,
    "a forward of its own": lambda: Thrice(8, 2),
    "a module of torch's": lambda: TorchThrice(8, 2),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_a_module_that_computes_more_than_its_weights_say_is_an_error(kind):
    x = draw(1, 3, 8)
    with pytest.raises(ch.UnsupportedError, match="computes something else"):
        ch.explain(CHANGED[kind](), x, x, x)


def test_weights_by_a_parametrization_are_those_that_count():
    module = made(lambda: nn.MultiHeadAttention(8, 2))
    torch.nn.utils.parametrizations.weight_norm(module.W_q)
    check_multi_head(module, (draw(1, 3, 8),) * 3)


@pytest.mark.parametrize("gradients", [False, True])
def test_autocast_leaves_the_steps_in_float32(gradients):
    module, x = made(lambda: nn.MultiHeadAttention(8, 2)), draw(2, 3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        explanation = ch.explain(module, x, x, x, gradients=gradients)
        additive = ch.explain(x, x, x, score=made(lambda: ch.Additive(8, 8, 3)), gradients=gradients)
    assert {step.value.dtype for step in (*explanation.steps, *additive.steps)} == {torch.float32}
    check_script(explanation)
    check_script(additive)
    if not gradients:
        torch.testing.assert_close(explanation["result"], module(x, x, x).detach(), rtol=0.05, atol=0.05)


def test_keys_are_named_as_keys_in_self_attention():
    module, x = made(lambda: nn.MultiHeadAttention(4, 2, rotary=nn.RotaryEmbedding(2))), draw(1, 3, 4)
    explanation = ch.explain(module, x, x, x)
    axes = {step.name: step.axes for step in explanation.steps}
    assert axes["query"] == ("B", "H", "Lq", "E")
    assert axes["key"] == axes["key_partners"] == ("B", "H", "Lk", "E")
    assert axes["value"] == ("B", "H", "Lk", "Ev")
    formulas = {step.name: step.formula for step in explanation.steps}
    assert formulas["key_angles"].startswith("key_angles[j, d] = key_positions[j]")


@pytest.mark.parametrize("tool", [ch.explain, ch.diagnose, ch.plan])
def test_a_module_of_too_few_inputs_is_told_what_to_pass(tool):
    x = torch.rand(1, 3, 8)
    said = rf"Pass its query, key and value; for self-attention: ch.{tool.__name__}\(module, x, x, x\)\."
    for module, fewest in (
        (torch.nn.MultiheadAttention(8, 2, batch_first=True), 3),
        (nn.DotProductAttention(), 3),
        (nn.MultiHeadAttention(8, 2), 2),  # prepared keys hold values too
    ):
        for few in range(fewest):
            with pytest.raises(ch.ClearheadError, match=said):
                tool(module, *[x] * few)
        tool(module, x, x, x)
