"""Problems without sequences, heads, queries, keys or widths: zeros, and no error, whatever is asked of them."""

import random

import pytest
import torch

import clearhead as ch

SCORES = {
    "dot": lambda e: None,
    "bilinear": lambda e: ch.Bilinear(e, e),
    "cosine": lambda e: ch.Cosine(),
    "additive": lambda e: ch.Additive(e, e, 3),
    "gaussian": lambda e: ch.Gaussian(),
    "tile": lambda e: lambda q, k: (q @ k.mT).sin(),
}
MASKS = {
    "none": lambda b, lk: None,
    "causal": lambda b, lk: ch.Causal(),
    "window": lambda b, lk: ch.SlidingWindow(before=2) | ch.Lengths([min(1, lk)] * b),
    "rule": lambda b, lk: ch.MaskFunction(lambda b, h, i, j: (i + j) % 2 == 0),
}
BIASES = {
    "none": lambda h, lq, lk: None,
    "relative": lambda h, lq, lk: ch.RelativeBias(h),
    "alibi": lambda h, lq, lk: ch.ALiBi(h),
    "dense": lambda h, lq, lk: ch.DenseBias(torch.nn.Parameter(torch.zeros(1, h, lq, lk))),
    "both": lambda h, lq, lk: ch.RelativeBias(h) + ch.ALiBi(h),
    "function": lambda h, lq, lk: ch.BiasFunction.example(None),
    "with a function": lambda h, lq, lk: ch.RelativeBias(h) + ch.BiasFunction.example(None),
}
REDUCTIONS = [
    ch.reductions.Entropy(),
    ch.reductions.LogSumExp(),
    ch.reductions.MaxScore(),
    ch.reductions.Received(),
    ch.reductions.MeanDistance(),
    ch.reductions.TopK(1),
    ch.reductions.Pool(2),
]


class Empty:
    """A call at least one of whose sizes is 0."""

    def __init__(self, seed):
        self.r = r = random.Random(seed)
        zero = {r.choice(["queries", "keys", "batch"]), *r.sample(["queries", "keys", "batch"], r.choice([0, 1]))}
        b, lq, lk = (0 if name in zero else r.choice([1, 3]) for name in ("batch", "queries", "keys"))
        h, e, ev = r.choice([1, 2, 4]), 3, r.choice([0, 2])
        self.engine = r.choice([None, "native", "sdpa", "tiled", "reference"])
        self.kinds = kinds = [r.choice([*names]) for names in (SCORES, MASKS, BIASES)]
        self.options = {
            "score": SCORES[kinds[0]](e),
            "mask": MASKS[kinds[1]](b, lk),
            "bias": BIASES[kinds[2]](h, lq, lk),
            "sinks": torch.zeros(h, requires_grad=True) if r.random() < 0.3 else None,
            "align": 0,
        }
        key_heads = r.choice([1, h])
        shapes = (b, h, lq, e), (b, key_heads, lk, e), (b, key_heads, lk, ev)
        self.inputs = [torch.randn(s, requires_grad=True) for s in shapes]
        self.learnt = [*self.inputs, *([] if self.options["sinks"] is None else [self.options["sinks"]])]
        for part in (self.options["score"], self.options["bias"]):
            self.learnt += part.parameters() if isinstance(part, torch.nn.Module) else []

    def __str__(self):
        return f"{[tuple(x.shape) for x in self.inputs]} {self.kinds} {self.engine}"

    def attend(self, *inputs):
        return ch.attention(*inputs, **self.options, engine=self.engine)


def zeros(tensors):
    return all(not t.any() for t in tensors if t is not None)


def derivatives(outputs, learnt):
    """First and second derivatives of all that an output may be multiplied by."""
    for output in outputs:
        grad = torch.zeros_like(output, requires_grad=True)
        if not output.requires_grad:
            continue
        first = torch.autograd.grad(output, learnt, grad, create_graph=True, allow_unused=True)
        assert zeros(first)
        followed = [g for g in first if g is not None and g.requires_grad]
        if followed:
            given = [torch.ones_like(g) for g in followed]
            assert zeros(torch.autograd.grad(followed, [*learnt, grad], given, allow_unused=True))


@pytest.mark.parametrize("first", range(0, 300, 60))
def test_whatever_is_asked(first):
    for seed in range(first, first + 60):
        torch.manual_seed(seed)
        case = Empty(seed)
        try:
            output = case.attend(*case.inputs)
        except ch.UnsupportedError:  # by an engine that was asked for
            assert case.engine in ("native", "sdpa"), str(case)
            continue
        assert output.shape == (*case.inputs[0].shape[:3], case.inputs[2].shape[-1]) and zeros([output]), str(case)
        ask(case, output)


def ask(case, output):
    query, key, value = case.inputs
    options, engine = case.options, None if case.engine == "sdpa" else case.engine  # it gives the output alone
    derivatives([output], case.learnt)
    ch.plan(*case.inputs, **options, engine=case.engine)
    found = ch.partial(query, key, value, **{n: x for n, x in options.items() if n != "sinks"}, engine=engine)
    assert bool((found.logsumexp == -torch.inf).all()) and zeros([found.output]), str(case)
    derivatives([found.output], case.learnt)
    weights = ch.weights(query, key, **options, engine=engine)
    assert weights.dense().shape == (*query.shape[:3], key.shape[2])
    weights[:, :, :1], weights @ value, weights.logsumexp()
    reductions = [
        one for one in REDUCTIONS if key.shape[2] or not isinstance(one, ch.reductions.TopK | ch.reductions.Pool)
    ]
    for reduction in reductions:
        result = weights.reduce(reduction)
        derivatives(
            [t for t in (result if isinstance(result, tuple) else [result]) if t.dtype.is_floating_point], case.learnt
        )
    if case.engine in (None, "tiled", "reference"):
        plain = [x.detach() for x in case.inputs]
        torch.func.jvp(case.attend, tuple(plain), tuple(plain))
        torch.func.grad(lambda *x: case.attend(*x).sum(), argnums=(0, 1, 2))(*plain)


@pytest.mark.parametrize("sizes", [(0, 3), (2, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("twice", [False, True])
def test_modules(sizes, twice):
    batch, length = sizes
    for module in (
        ch.nn.MultiHeadAttention(8, 2),
        ch.nn.TorchMultiheadAttention(8, 2, batch_first=True),
        ch.nn.DotProductAttention(),
        ch.nn.AdditiveAttention(4),
    ):
        x = torch.zeros(batch, length, 8, requires_grad=True)
        output = module(x, x, x)
        output = output[0] if isinstance(output, tuple) else output
        assert output.shape == (batch, length, 8)
        learnt = [x, *module.parameters()]
        grad = torch.zeros_like(output, requires_grad=True)
        first = torch.autograd.grad(output, learnt, grad, create_graph=twice, allow_unused=True)
        followed = [g for g in first if g is not None and g.requires_grad]
        if twice and followed:
            torch.autograd.grad(followed, [*learnt, grad], [torch.ones_like(g) for g in followed], allow_unused=True)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 0), (0,), (3, 0, 2)], ids=str)
def test_masked_softmax(shape):
    scores = torch.zeros(shape, requires_grad=True)
    for given in (None, torch.zeros(shape, dtype=torch.bool)):
        found = ch.masked_softmax(scores, given)
        assert found.shape == shape
        (first,) = torch.autograd.grad(found.sum(), scores, create_graph=True)
        assert first.shape == shape


@pytest.mark.parametrize("bias", [ch.RelativeBias(2), ch.ALiBi(2)], ids=repr)
def test_no_sequence_each_of_which_stands_elsewhere(bias):
    """Then there are distances for each sequence, of which there is none, and not for all."""
    query, key = torch.zeros(0, 2, 3, 4, requires_grad=True), torch.zeros(0, 2, 5, 4, requires_grad=True)
    output = ch.attention(query, key, key, bias=bias, align=torch.zeros(0, dtype=torch.int64))
    assert output.shape == (0, 2, 3, 4)
    output.sum().backward()
    assert query.grad.shape == query.shape
