"""Functions inside a watched model that torch.compile() made, first run before the watch and first run in it."""

import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaModel

import clearhead as ch

# PyTorch's compiler asks for it wherever it pauses at a tensor that has a history, and hides the warning by itself
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

CALLS = {
    "sdpa": lambda self, x: F.scaled_dot_product_attention(self.linear(x), x, x, is_causal=True),
    "torch.nn": lambda self, x: self.attend(x, x, x)[0],
    "attention": lambda self, x: ch.attention(self.linear(x), x, x, mask=ch.Causal()),
    "attention, plain": lambda self, x: ch.attention(self.linear(x), x, x),
}


class Model(nn.Module):
    def __init__(self, call, **options):
        super().__init__()
        self.linear, self.attend = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.step = torch.compile(lambda x: call(self, x).tanh() * 2, **options)

    def forward(self, x):
        return self.step(x) + self.step(x + 1)


@pytest.mark.parametrize(
    ("name", "before"),
    [("sdpa", True), ("sdpa", False), ("attention", True), ("torch.nn", False), ("attention, plain", True)],
)
def test_each_call_is_recorded(name, before):
    model = Model(CALLS[name], backend="aot_eager" if before else "eager").eval()
    inputs = [torch.randn(2, size, 8) for size in (5, 7)]
    eager = [CALLS[name](model, x) for x in inputs]
    want = [model(x) for x in inputs if before]
    with ch.watch(model) as seen:
        got = [model(x) for x in inputs]
    assert all(torch.equal(a, b) for a, b in zip(want or map(model, inputs), got, strict=True))
    assert [call.query.shape[2] for call in seen.calls] == [5, 5, 7, 7]
    if name != "torch.nn":
        for x, call, output in zip(inputs, seen.calls[::2], eager, strict=True):
            torch.testing.assert_close(call.weights @ x[:, None], output[:, None])


@pytest.mark.parametrize(("name", "before"), [("sdpa", True), ("attention", False)])
def test_each_call_is_recorded_in_threads(name, before):
    """They compile in turn, while others run; and run often, as each turn is one more of the compiler's limit."""
    model = Model(CALLS[name], backend="aot_eager").eval()
    inputs, start = [torch.randn(2, 5, 8) for _ in range(4)], Barrier(4)

    def run(x):
        start.wait(60)
        return [model(x) for _ in range(5)]

    want = [model(x) for x in inputs if before]
    with ch.watch(model) as seen, ThreadPoolExecutor(4) as pool:
        got = list(pool.map(run, inputs))
    for x, outputs, output in zip(inputs, got, want or map(model, inputs), strict=True):
        assert all(torch.equal(output, each) for each in outputs)
        keys = [x, x + 1]
        assert all(sum(torch.equal(call.key[:, 0], key) for call in seen.calls) == 5 for key in keys)
    assert len(seen.calls) == 40


def test_a_model_of_transformers_run_by_a_compiled_function():
    """Its tensors' attributes are read through the watch's function mode: one must not be given for another."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=50, num_hidden_layers=1, attn_implementation="sdpa", **sizes)
    model, tokens = LlamaModel(config).eval(), torch.randint(50, (2, 7))
    step = torch.compile(lambda tokens: model(tokens).last_hidden_state * 2, backend="aot_eager")
    with torch.no_grad():
        with ch.watch(model) as plain:
            model(tokens)
        with ch.watch(model) as seen:
            got = step(tokens)
        assert torch.equal(got, step(tokens))
    assert [call.name for call in seen.calls] == [call.name for call in plain.calls]
    for call, other in zip(seen.calls, plain.calls, strict=True):
        torch.testing.assert_close(call.weights.dense(), other.weights.dense())


def test_a_compiled_function_without_attention_gives_the_same_bits():
    model = Model(lambda self, x: F.gelu(self.linear(x)).softmax(-1), backend="aot_eager")
    x = torch.randn(3, 5, 8)
    want = model(x)
    with pytest.raises(ch.ClearheadError, match="made no attention call"), ch.watch(model):
        assert torch.equal(model(x), want)


def test_a_function_that_may_not_pause_says_why():
    model = Model(CALLS["sdpa"], backend="eager", fullgraph=True)
    with (
        pytest.raises(torch._dynamo.exc.Unsupported, match=r"watch\(\) records(.|\n)*fullgraph=False"),
        ch.watch(model),
    ):
        model(torch.randn(2, 5, 8))


def test_compiled_code_beside_the_model_does_not_pause():
    model, x = Model(CALLS["sdpa"], backend="eager"), torch.randn(1, 5, 8)
    beside = torch.compile(lambda x: ch.attention(x, x, x, mask=ch.Causal()) * 2, backend="eager", fullgraph=True)
    with ch.watch(model) as seen:
        got = beside(x)
        model(x)
    assert torch.equal(got, beside(x)) and len(seen.calls) == 2


FIRST = textwrap.dedent("""
    import torch, torch.nn.functional as F, clearhead as ch

    class Model(torch.nn.Module):
        def forward(self, x):
            return step(x)

    @torch.compile(backend="aot_eager")
    def step(x):
        return F.scaled_dot_product_attention(x, x, x) * 2

    for _ in range(2):
        with ch.watch(model := Model()) as seen:
            model(torch.rand(1, 2, 3, 4))
        assert len(seen.calls) == 1, seen.calls

    @torch.compile(backend="eager", fullgraph=True)
    def asks(x):
        return x if torch.overrides.has_torch_function((x,)) else x + 1

    assert asks(torch.zeros(1)) == 1
""")


def test_the_first_that_a_process_compiles():
    """What the compiler learns of PyTorch's functions then, it keeps: nothing of the watch may be in it."""
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
