"""The state of PyTorch in which a call runs: a call in one, what follows in another; breaks of the graph; threads."""

import ast
import threading
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import clearhead as ch
from clearhead.base.torch_state.mode import CURRENT, get_mode

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's compiler says where it breaks the graph
SOURCES = Path(ch.__file__).parent
K, V = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
GRAD = torch.randn(1, 2, 9, 8)


def run_in_autocast(function, x):
    with torch.autocast("cpu", torch.bfloat16):
        return function(x)


def run_beside_duals(function, x):
    with forward_ad.dual_level():
        return function(x)


def run_counted(function, x):
    with FlopCounterMode(display=False):
        return function(x)


def run_compiled(function, x):
    torch.compiler.reset()
    return torch.compile(function, backend="eager")(x)


PLAIN = {
    "eager": lambda function, x: function(x),
    "autocast": run_in_autocast,
    "beside duals": run_beside_duals,
    "counted": run_counted,
    "compiled": run_compiled,
}
EVERY = PLAIN | {
    "vjp": lambda function, x: torch.func.vjp(function, x)[0],
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (torch.ones_like(x),))[0],
    "vmap": lambda function, x: torch.vmap(function)(x[None])[0],
    "traced": lambda function, x: make_fx(function)(x)(x),
}
CALLS = {
    "native": {"mask": ch.SlidingWindow(before=3)},
    "sdpa": {},
    "tiled": {"mask": ch.Causal(), "engine": "tiled"},
    "function": {"score": lambda q, k: (q @ k.mT).tanh(), "mask": ch.Causal()},
}
# `vmap` has no rule for the operation of compiled code, forward mode none for the backward pass of PyTorch's kernel,
# the compiler none for a backward pass by blocks
UNSUPPORTED = {("compiled", "vmap"): CALLS.keys(), ("eager", "compiled"): ["tiled"]}
UNSUPPORTED |= {(first, "jvp"): ["sdpa"] for first in PLAIN}


def assert_close(got, expected, modes):
    torch.testing.assert_close(got, expected, **({"atol": 0.1, "rtol": 0.1} if "autocast" in modes else {}), msg=modes)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("first", PLAIN)
def test_a_backward_pass_in_another_mode(first, call):
    query = torch.randn(1, 2, 9, 8, requires_grad=True)
    output = PLAIN[first](lambda q: ch.attention(q, K, V, **CALLS[call]), query)
    grad = GRAD.to(output.dtype)
    back = lambda g: torch.autograd.grad(output, query, g, retain_graph=True)[0]
    again = ch.attention(query, K, V, **CALLS[call])
    expected = torch.autograd.grad(again, query, GRAD)[0]
    assert_close(output.float(), again, (first,))
    for second, run in EVERY.items():
        if second == "compiled" and first != "eager":  # it takes long
            continue
        try:
            found = run(back, grad)
        except (RuntimeError, torch._dynamo.exc.TorchRuntimeError):
            assert call in UNSUPPORTED[first, second]
        else:
            assert_close(found, expected, (first, second))


@pytest.mark.parametrize("call", ["native", "function"])
@pytest.mark.parametrize("first", PLAIN)
def test_a_lazy_matrix_that_is_read_in_another_mode(first, call):
    query = torch.randn(1, 2, 9, 8)
    weights = PLAIN[first](lambda q: ch.weights(q, K, **CALLS[call]), query)
    both = lambda x: x + weights[0, :, 3:].sum(-1) * weights.entropy()[0, :, 3:]
    again = ch.weights(query, K, **CALLS[call])
    for second, run in EVERY.items():
        if second != "compiled" or (first, call) == ("eager", "native"):  # it takes long
            assert_close(run(both, torch.zeros(())), again.entropy()[0, :, 3:], (first, second))


def test_what_is_stored_has_the_mode_of_its_reader():
    weights = ch.weights(K, K)
    assert weights.problem.mode is CURRENT and weights.problem.mode.eager
    with torch.autocast("cpu", torch.bfloat16):
        assert weights.problem.mode.autocast and not ch.weights(K, K).problem._refresh_mode().mode.traced
    with forward_ad.dual_level():
        assert weights.problem.mode.forward and not weights.problem.mode.eager


@pytest.mark.parametrize("where", ["before", "inside", "after"])
def test_a_break_of_the_graph(where):
    """Code around a break is compiled in parts, and the frames of a call may be compiled or eager."""

    def tile(q, k):
        torch._dynamo.graph_break()
        return (q @ k.mT).tanh()

    def model(q):
        q = q * 2
        if where == "before":
            torch._dynamo.graph_break()
        found = ch.attention(q, K, V, score=tile if where == "inside" else None, mask=ch.Causal())
        if where == "after":
            torch._dynamo.graph_break()
        return found.square().sum()

    query = torch.randn(1, 2, 9, 8, requires_grad=True)
    torch.compiler.reset()
    got, expected = torch.compile(model, backend="aot_eager")(query), model(query)
    torch.testing.assert_close(got, expected)
    both = (torch.autograd.grad(one, query)[0] for one in (got, expected))
    torch.testing.assert_close(*both)


def test_two_threads_of_which_one_compiles():
    found, inside, done = [], threading.Event(), threading.Event()

    def wait(graph, _):
        inside.set()
        done.wait(60)
        return graph

    def compile_it():
        found.append(torch.compile(lambda q: ch.attention(q, K, V, mask=ch.Causal()), backend=wait)(K))

    torch.compiler.reset()
    thread = threading.Thread(target=compile_it)
    thread.start()
    try:
        assert inside.wait(60)
        assert get_mode().eager
        here = ch.attention(K.requires_grad_(), K, V, mask=ch.Causal())
        here.sum().backward()
    finally:
        done.set()
        thread.join()
        K.grad = None
        K.requires_grad_(False)
    torch.testing.assert_close(found[0], here.detach())


def test_few_questions_about_the_state():
    """Calls of functions of `mode.py`: a door asks once, and what it calls reads its problem's mode."""
    functions = {
        n.name
        for n in ast.parse((SOURCES / "base/torch_state/mode.py").read_text()).body
        if isinstance(n, ast.FunctionDef)
    }
    counts = dict.fromkeys(("everywhere", "engines"), 0)
    for path in SOURCES.rglob("*.py"):
        folder = path.relative_to(SOURCES).parts[0]
        if folder == "base":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions
            asked = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "CURRENT"
            counts["everywhere"] += called or asked
            counts["engines"] += (called or asked) and folder == "engines"
    assert counts["everywhere"] <= 60 and counts["engines"] <= 10, counts
