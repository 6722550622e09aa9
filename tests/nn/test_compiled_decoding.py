"""Decoding step by step in compiled code: the numbers of eager code, in a number of graphs that does not grow."""

import copy

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

import clearhead as ch
from clearhead.base.torch_state.torch_private import cached_code
from clearhead.nn import KeyValueCache, LearnedPositionalEncoding, MultiHeadAttention, RotaryEmbedding

PROMPT, STEPS = 3, 66
GROUPED = {"num_kv_heads": 2, "rotary": RotaryEmbedding(4)}
CASES = {
    "groups": ({"num_kv_heads": 2}, ch.Causal(), None),
    "rotary": ({"rotary": RotaryEmbedding(4)}, ch.Causal(), None),
    "unequal prompts": (GROUPED, ch.Causal() & ch.SlidingWindow(before=7), [3, 1]),
}


def counting(backend):
    """The backend, and how many graphs it was given."""
    graphs, inner = [], lookup_backend(backend)

    def compiler(graph, inputs):
        graphs.append(graph)
        return inner(graph, inputs)

    return compiler, graphs


def check(name, backend, steps=STEPS, dynamic=None):
    options, mask, lens = CASES[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    attend, x = MultiHeadAttention(16, 4, **options).eval(), torch.randn(2, PROMPT + steps, 16)
    compiler, graphs = counting(backend)
    compiled = torch.compile(attend, fullgraph=True, backend=compiler, dynamic=dynamic)
    prompt, cache = x[:, :PROMPT], KeyValueCache()
    with torch.no_grad():
        attend(prompt, prompt, prompt, mask, cache=cache, new_lens=lens)
        eager, after = copy.copy(cache), []
        for token in x[:, PROMPT:].split(1, 1):
            want = attend(token, token, token, mask, cache=eager)
            torch.testing.assert_close(compiled(token, token, token, mask, cache=cache), want, atol=1e-5, rtol=1e-5)
            after.append(len(graphs))
    assert cache.lengths == eager.lengths
    torch.testing.assert_close(cache._state.key, eager._state.key)
    return after


@pytest.mark.parametrize("steps", [4, STEPS])
def test_each_step_is_that_of_eager_code(steps):
    after = check("unequal prompts", "eager", steps)
    assert after[-1] <= 6 and after[34:] == after[-1:] * len(after[34:])  # the room grows once more after that


def test_unequal_prompts_leave_the_compiled_code_to_be_read():
    torch._dynamo.reset()
    attend, x, caches = MultiHeadAttention(8, 2).eval(), torch.randn(2, 3, 8), (KeyValueCache(), KeyValueCache())
    compiled = torch.compile(attend, backend="eager")
    with torch.no_grad():
        outputs = [
            run(x, x, x, cache=one, new_lens=[3, 1]) for run, one in zip((attend, compiled), caches, strict=True)
        ]
    torch.testing.assert_close(outputs[1][1, :1], outputs[0][1, :1])
    assert caches[0].lengths == caches[1].lengths == (3, 1)


def test_through_autograds_compiler():
    assert check("rotary", "aot_eager")[-1] <= 6


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
def test_inductor(inductor_cache):
    """The first step, the next ones, and the one that grows the buffer; inductor may begin one of them anew."""
    check("groups", "inductor", 16, dynamic=True)
    assert len(cached_code(MultiHeadAttention.forward.__code__)) == 3


class Stack(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        attends = (MultiHeadAttention(8, 2, rotary=RotaryEmbedding(4)) for _ in range(layers))
        self.layers = torch.nn.ModuleList(attends)

    def forward(self, x, mask, cache):
        for number, attend in enumerate(self.layers):
            x = x + attend(x, x, x, mask, cache=cache.of(number))
        return x


def check_stack(layers, mask, backend, eager_prompt):
    """Decode with a model of several layers; the number of graphs after each step."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    stack, x, cache = Stack(layers).eval(), torch.randn(2, PROMPT + 3, 8), KeyValueCache()
    compiler, graphs = counting(backend)
    compiled = torch.compile(stack, fullgraph=True, backend=compiler)
    with torch.no_grad():
        outputs = [(stack if eager_prompt else compiled)(x[:, :PROMPT], mask, cache)]
        outputs += [compiled(token, mask, cache) for token in x[:, PROMPT:].split(1, 1)]
        torch.testing.assert_close(torch.cat(outputs, 1), stack(x, mask, KeyValueCache()), atol=1e-5, rtol=1e-5)
    return graphs


@pytest.mark.parametrize("mask", [ch.Causal(), ch.Causal() & ch.SlidingWindow(before=2)], ids=["causal", "window"])
def test_a_model_of_several_layers(mask):
    # inductor leaves one of two numbers undefined that a graph holds equal; so each layer has one, its length
    graph = check_stack(2, mask, "eager", True)[-1]
    last = list(graph.graph.nodes)[-1]
    given = [n.meta["example_value"] for n in graph.graph.nodes if n.op == "placeholder"]
    made = [n.meta["example_value"] for n in last.args[0]]
    numbers = [value for value in given if isinstance(value, torch.SymInt) and value.node.hint == PROMPT + 1]
    assert len(numbers) == 2 and not numbers[0].node.shape_env.replacements
    assert [str(value) for value in made if isinstance(value, torch.SymInt)] == [f"{n} + 1" for n in numbers]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize(("layers", "eager_prompt"), [(2, False), (3, True)])
def test_a_model_of_several_layers_under_inductor(inductor_cache, layers, eager_prompt):
    mask = ch.Causal() if layers == 2 else ch.Causal() & ch.SlidingWindow(before=2)
    assert len(check_stack(layers, mask, "inductor", eager_prompt)) <= 3


def test_a_learnt_table_of_positions():
    encode = LearnedPositionalEncoding(99, 4)
    compiler, graphs = counting("eager")
    compiled = torch.compile(encode, fullgraph=True, backend=compiler)
    x = torch.randn(2, 1, 4)
    for at in range(70):
        torch.testing.assert_close(compiled(x, offset=at), encode(x, offset=at))
    assert len(graphs) <= 3


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler's own look at tensors with a graph
def test_with_gradients():
    torch._dynamo.reset()
    torch.manual_seed(0)
    attend, x, losses = MultiHeadAttention(8, 2, rotary=RotaryEmbedding(2)), torch.randn(2, 12, 8), []
    compiler, graphs = counting("eager")
    for run in (attend, torch.compile(attend, backend=compiler)):
        cache, attend.W_k.weight.grad = KeyValueCache(), None
        outputs = [run(token, token, token, ch.Causal(), cache=cache) for token in x.split(1, 1)]
        torch.cat(outputs, 1).square().sum().backward()
        losses.append(attend.W_k.weight.grad)
    torch.testing.assert_close(*losses)
    assert len(graphs) <= 4


def test_what_eager_code_recorded_is_still_right_after_compiled_steps():
    torch.manual_seed(0)
    attend, x, cache = MultiHeadAttention(8, 2).eval(), torch.randn(2, 6, 8), KeyValueCache()
    compiled = torch.compile(attend, backend="aot_eager")
    with torch.no_grad():
        attend(x[:, :4], x[:, :4], x[:, :4], ch.Causal(), cache=cache)
        weights, before = attend.attention_weights, attend.attention_weights.dense().clone()
        for token in x[:, 4:].split(1, 1):
            compiled(token, token, token, ch.Causal(), cache=cache)
    assert torch.equal(weights.dense(), before)
