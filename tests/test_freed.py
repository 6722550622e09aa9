"""Tensors whose memory was freed: each use of one is an error in words, and no process ends."""

import random

import pytest
import torch
from apart import run

from clearhead.base.torch_state.tensor_kind import is_freed

BEGIN = """
import tempfile, torch, clearhead as ch
def free(t, size=0):
    t.untyped_storage().resize_(size)
    return t
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)
def backward(call, freed, size=0, learn=True):
    # one call, with tensors that are no leaves; one of them, or the output, is freed before the backward pass
    given = {name: torch.rand(1, 8, 20, 16).requires_grad_(learn) * 1 for name in "qkv"}
    given |= {"bias": torch.rand(1, 8, 20, 20).requires_grad_() * 1, "sinks": torch.rand(8).requires_grad_() * 1}
    given |= {"keep": torch.rand(20, 20) > 0.3, "grad": torch.ones(())}
    output = eval(call, globals() | given)
    given["output"], given["grad"] = output, torch.ones_like(output)
    free(given[freed].data, size)
    output.backward(given["grad"])
def run(text):
    names = globals() | {"x": torch.rand(1, 8, 20, 16), "q": free(torch.rand(1, 8, 20, 16)), "few": free(torch.rand(8))}
    names["whole"] = torch.rand(3, 1, 8, 20, 16)
    names["parts"] = list(names["whole"])
    names["keep"] = torch.rand(20, 20) > 0.5
    names["recorded"] = recorded = Model()
    with ch.watch(recorded, values=True) as seen:
        recorded(names["x"])
    names["seen"] = seen
    exec(text, names)
"""
# what dies, or gives other memory's numbers, where it is not refused
CASES = [
    "ch.attention(q, x, x)",
    "ch.attention(x, x, q, mask=ch.Causal())",
    "free(whole); ch.attention(*parts)",
    "free(whole); ch.attention(x, x, parts[2], engine='tiled')",
    "ch.partial(x, q, x)",
    "ch.plan(q, x, x)",
    "ch.weights(q, x)[0, 0, 0]",
    "ch.weights(x, q).entropy()",
    "y = x.clone(); w = ch.weights(y, y); w.dense(); free(y); w.dense()",
    "y = x.clone(); w = ch.weights(y, y); w.dense(); free(y, 100); w.dense()",
    "ch.diagnose(x, q, x)",
    "ch.explain(x, x, q)",
    "ch.masked_softmax(q)",
    "ch.attention(x, x, x, mask=free(keep))",
    "ch.attention(x, x, x, mask=free(keep, 100))",
    "m = ch.DenseMask(keep); ch.attention(x, x, x, mask=m); free(keep); ch.attention(x, x, x, mask=m)",
    "m = ch.DenseMask(keep); free(keep); m.dense(20, 20)",
    "m = ch.Lengths([3]); free(m.valid_lens); ch.attention(x, x, x, mask=m)",
    "m = ch.Padding(keep[:1]); free(m.keep); ch.attention(x, x, x, mask=m)",
    "m = ch.Documents(torch.arange(20)[None] // 9); free(m.ids); ch.attention(x, x, x, mask=m)",
    "ch.attention(x, x, x, mask=ch.Causal(), align=free(torch.tensor([3])))",
    "b = ch.ALiBi(8); free(b.slopes); ch.attention(x, x, x, bias=b)",
    "b = ch.RelativeBias(8); free(b.weight.data); ch.attention(x, x, x, bias=b)",
    "s = ch.Additive(16, 16, 8); free(s.W_q.data); ch.attention(x, x, x, score=s)",
    "ch.attention(x, x, x, sinks=free(torch.rand(8)))",
    "t = torch.rand(20); m = ch.MaskFunction(lambda b, h, i, j: t[j] > 0.5); ch.attention(x, x, x, mask=m); free(t); "
    "ch.attention(x, x, x, mask=m)",
    "one = ch.edits.ForceMask(keep); free(keep)\nwith ch.edit(recorded, one): recorded(x)",
    "one = ch.edits.AddBias(x[0, 0]); free(one.bias)\nwith ch.edit(recorded, one): recorded(x)",
    "free(seen.calls[0].query); seen.calls[0].weights.dense()",
    # PyTorch's repr of such a tensor ends the process, and errors name wrong arguments
    "ch.attention(x, x, x, scale=few)",
    "ch.attention(x, x, x, engine=few)",
    "ch.attention(x, x, x, mask=[few])",
    "ch.nn.MultiHeadAttention(few, 2)",
    "ch.weights(x, x)[few]",
    "ch.watch(recorded, layers=few)",
    "ch.edits.Knockout(few)",
    "free(seen.calls[0].query); seen.write(tempfile.mktemp('.safetensors'))",
]
# Autograd keeps tensors from the forward pass for the backward pass: (a call, the tensors that may be freed between)
TRAINED = [
    ("ch.attention(q, k, v{}, engine='native')", "q k v output grad"),
    ("ch.attention(q, k, v{}, engine='tiled')", "q k v output grad"),
    ("ch.attention(q, k, v, bias=bias{}, engine='native')", "q k v bias output"),
    ("ch.attention(q, k, v, sinks=sinks{}, engine='tiled')", "q k v sinks output"),
    ("ch.attention(q, k, v, score=ch.Gaussian(){})", "q k v output grad"),
    ("ch.attention(q, k, v, mask=keep)", "q k v keep output"),
    ("ch.attention(q, k, v, mask=ch.DenseMask(keep), engine='tiled')", "q k v keep"),
    ("ch.attention(q, k, v, engine='sdpa')", "q k v output grad"),
    ("ch.partial(q, k, v{}).output", "q k v"),
    ("ch.weights(q, k{}).entropy()", "q k grad"),
    ("torch.compile(ch.attention, backend='aot_eager')(q, k, v{}, engine='native')", "q k v output"),
]


def trained(number):
    rng = random.Random(number)
    call, names = TRAINED[number % len(TRAINED)]
    call = call.format(
        rng.choice(["", ", mask=ch.Causal()", ", mask=ch.SlidingWindow(before=5)", ", mask=ch.Lengths([3])"])
    )
    return f"backward({call!r}, {rng.choice(names.split())!r}, {rng.choice([0, 24])})"


def check(cases):
    """Each case is an error in words, in one process: it is told before each case, so a death is told too."""
    lines = "\n".join(
        f"print('at', {i}, flush=True)\ntry:\n    run({text!r})\n    print('silent', flush=True)\n"
        "except Exception as e:\n    kind = ch.ClearheadError if isinstance(e, ch.ClearheadError) else type(e)\n"
        "    print(kind.__name__, 'no memory' in str(e), flush=True)"
        for i, text in enumerate(cases)
    )
    done = run("import torch\ntorch.set_num_threads(1)\n" + BEGIN + lines)
    lines = done.out.splitlines()
    wrong = [f"{cases[int(a.split()[1])]}: {b}" for a, b in zip(lines[::2], lines[1::2], strict=False)
             if b != "ClearheadError True"]  # fmt: skip
    assert lines, done.errors[-800:]
    assert done.status == 0, f"the process ended in {cases[int(lines[-1].split()[1])]}: {done.errors[-800:]}"
    assert len(lines) == 2 * len(cases) and not wrong, "\n".join(wrong)


def test_each_use_is_an_error_in_words():
    check(CASES)


@pytest.mark.parametrize(("first", "stop"), [(0, 10), (10, 60)])
def test_what_is_freed_between_forward_and_backward_is_an_error_in_words(first, stop):
    check([trained(number) for number in range(first, stop)])


@pytest.mark.parametrize("number", range(20))
def test_random_views_are_told_from_freed_ones(number):
    """A view is refused exactly where its last number lies beyond what the storage holds."""
    rng = random.Random(number)
    whole = torch.zeros(6, 7, 8)
    view = whole.transpose(*rng.sample(range(3), 2))[rng.randrange(3) :, :: rng.choice([1, 2])]
    view = view[:, :1].expand(-1, 4, -1) if rng.random() < 0.3 else view
    last = view.storage_offset() + sum(s * (n - 1) for s, n in zip(view.stride(), view.shape, strict=True))
    for held in (0, 4 * last, 4 * last + 4, 4 * last + 40):
        whole.untyped_storage().resize_(held)
        assert is_freed(view) == (held <= 4 * last), (view.shape, view.stride(), held)
