"""torch.compile(fullgraph=True), torch.export, torch.func and opcheck: the same as eager code."""

import pytest
import torch
from beside import while_another_compiles

import clearhead as ch
from clearhead.base.torch_state.mode import assume_constant, get_mode
from clearhead.engines import operation
from clearhead.masks.combined import And, Or
from clearhead.scores.score_function import ScoreFunction
from clearhead.testing import Inputs, biases, masks, scores

named = {"ids": lambda x: x.__name__ if isinstance(x, type) else str(x)}
SMOOTH = lambda query, key: -torch.sqrt(1 + (query.unsqueeze(-2) - key.unsqueeze(-3)).square()).sum(-1)
name = lambda score: getattr(score, "__name__", str(score))


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


Q, K, V = draw(2, 4, 9, 8), draw(2, 4, 9, 8, seed=1), draw(2, 4, 9, 8, seed=2)


def same(function, *inputs, parameters=(), backend="aot_eager", dynamic=None):
    """Outputs and gradients, eager and compiled, of one seed."""
    found = []
    for call in (function, torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)):
        torch.manual_seed(0)
        output = call(*inputs)
        wanted = [t for t in (*inputs, *parameters) if t.requires_grad]
        found.append([output, *torch.autograd.grad(output.sin().sum(), wanted)])
    for got, eager in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, eager)


def with_gradient(output, leaf):
    return output, *torch.autograd.grad(output.sin().sum(), leaf)


# Every mask with a score that has no lowering, and every score without a mask; the gradients have the lowered ones.
BOTH = [*((ScoreFunction, mask) for mask in masks()), *((score, None) for score in scores())]


@pytest.mark.parametrize(("score", "mask"), BOTH, **named)
def test_every_score_and_mask(score, mask):
    example = score.example()
    inputs = Inputs.draw(example, (7, 9), torch.float32)
    made = None if mask is None else mask.example(inputs.sizes)
    attend = lambda *inputs: ch.attention(*inputs, score=example[0], mask=made, align="lower_right")
    with torch.no_grad():
        compiled = torch.compile(attend, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(*inputs), attend(*inputs))


# Every mask is compiled above; here those whose parts the operation takes in other places: spans, gaps, a residual.
PARTS = [None, ch.Causal, Or, ch.MaskFunction, ch.DenseMask]
PAIRS = [(score, And) for score in scores()] + [(ch.Additive, mask) for mask in PARTS]


@pytest.mark.parametrize(("score", "mask"), PAIRS, **named)
def test_gradients_of_every_score_and_of_every_part_of_a_mask(score, mask):
    example = score.example()
    inputs = Inputs.draw(example, (7, 9), torch.float32)
    made = None if mask is None else mask.example(inputs.sizes)
    leaves = [t.requires_grad_() for t in inputs]
    attend = lambda *i: ch.attention(*i, score=example[0], mask=made, align="lower_right")
    same(attend, *leaves, parameters=list(example[0].parameters()))


@pytest.mark.parametrize("bias", biases(), **named)
def test_every_bias(bias):
    inputs = Inputs.draw(ch.Dot.example(), (7, 9), torch.float32)
    made = bias.example(inputs.sizes)
    learnt = [t for t in (*made.parameters(), *made.buffers()) if t.requires_grad]
    leaves = [t.requires_grad_() for t in inputs]
    same(lambda *i: ch.attention(*i, bias=made, mask=ch.Causal(), align="lower_right"), *leaves, parameters=learnt)


MADE_INSIDE = {
    "lengths": (lambda given: ch.Lengths(given) & ch.Causal(), torch.tensor([3, 9])),
    "padding": (ch.Padding, torch.rand(2, 9, generator=torch.Generator().manual_seed(3)) > 0.5),
    "0/1 padding": (ch.Padding, torch.ones(2, 9, dtype=torch.long).triu()),
    "documents": (ch.Documents, torch.tensor([0, 0, 1, 1, 1, 0, 2, 2, 2]).expand(2, -1)),
    "prefix": (ch.PrefixLM, torch.tensor([2, 5])),
    "bool tensor": (lambda given: given, torch.ones(9, 9, dtype=torch.bool).tril(2)),
    "float tensor": (lambda given: given, torch.ones(9, 9).tril(2) / 2),
}


@pytest.mark.parametrize("name", MADE_INSIDE)
@pytest.mark.parametrize("dynamic", [None, True])
def test_masks_made_inside_compiled_code(name, dynamic):
    make, given = MADE_INSIDE[name]
    same(lambda q, k, v, given: ch.attention(q, k, v, mask=make(given)), Q, K, V, given, dynamic=dynamic)


@pytest.mark.parametrize("align", ["upper_left", "lower_right", 2, torch.tensor([0, 2])], ids=str)
def test_alignments_in_compiled_code(align):
    mask = ch.Causal() & ch.SlidingWindow(before=3)
    same(lambda q, k, v: ch.attention(q[:, :, :7], k, v, mask=mask, bias=ch.ALiBi(4), align=align), Q, K, V)


def test_values_are_asserted_when_compiled_code_runs():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def lengths(x, given):
        return ch.attention(x, x, x, mask=ch.Lengths(given))

    assert lengths(Q, torch.tensor([3, 9])).shape == Q.shape
    for wrong in ([3, 10], [-1, 3]):
        with pytest.raises(RuntimeError, match="a length is"):
            lengths(Q, torch.tensor(wrong))


def test_eager_code_is_eager_while_another_thread_compiles():
    """Its bits, its errors, and what the modules keep."""
    with torch.no_grad():
        want = ch.attention(Q, K, V)
        assert torch.equal(while_another_compiles(lambda: ch.attention(Q, K, V)), want)
    with pytest.raises(ch.ClearheadError, match="at most 9 keys"):
        while_another_compiles(lambda: ch.attention(Q, K, V, mask=ch.Lengths([3, 10])))
    attend, rotary = ch.nn.DotProductAttention(), ch.nn.RotaryEmbedding(8)
    while_another_compiles(lambda: attend(Q, K, V))
    assert attend.attention_weights is not None
    with pytest.raises(ch.ClearheadError, match="0 or more"):
        while_another_compiles(lambda: rotary(Q, offset=torch.tensor(-1)))


def test_what_runs_between_compiled_code_is_eager():
    """The compiler goes on below a frame that it skips, and compiles each function there by itself."""
    found = []

    @torch.compiler.disable(recursive=False)
    def between():
        found.append(get_mode().compiled)

    def run(x):
        between()
        return x + get_mode().compiled

    assert torch.compile(run, backend="eager")(torch.zeros(())) == 1 and found == [False]


def test_compiled_code_skips_what_the_mask_leaves_out(monkeypatch):
    """The engine inside the operation sees the spans' values: padding it is not to touch may hold anything."""
    computed = []
    run = operation.choose

    def choose(problem, engine, rows):
        found = run(problem, engine, rows)
        if problem.edges is not None:
            computed.append(found.cost(problem).pairs)
        return found

    monkeypatch.setattr(operation, "choose", choose)
    mask = ch.Lengths([3, 5])
    with torch.no_grad():
        torch.compile(lambda x: ch.attention(x, x, x, mask=mask), fullgraph=True, backend="aot_eager")(Q)
    assert computed == [4 * 9 * (3 + 5)]
    dirty = K.detach().clone()
    dirty[0, :, 3:] = torch.nan
    score = ch.Additive(8, 8, 6)
    leaves = [Q.detach().requires_grad_(), dirty.requires_grad_(), V.detach().requires_grad_()]
    same(lambda *i: ch.attention(*i, score=score, mask=mask), *leaves, parameters=list(score.parameters()))


def test_dropout_is_that_of_the_seed():
    same(lambda q, k, v: ch.attention(q, k, v, dropout_p=0.4, mask=ch.Causal()), Q, K, V)


NUMBERS = {
    "scale": (lambda x, number: ch.attention(x, x, x, scale=number), (0.5, 0.7, 0.9)),
    "a kernel's scale": (lambda x, number: ch.attention(x, x, x, mask=ch.Causal(), scale=number), (0.5, 0.7, 0.9)),
    "softcap": (lambda x, number: ch.attention(x, x, x, score=ch.Dot(softcap=number)), (2.0, 3.0, 0.5)),
    "bandwidth": (lambda x, number: ch.attention(x, x, x, score=ch.Gaussian(number)), (2.0, 3.0, 0.5)),
    "temperature": (lambda x, number: ch.attention(x, x, x, score=ch.Cosine(number)), (2.0, 3.0, 0.5)),
    "torch's signature": (lambda x, number: ch.scaled_dot_product_attention(x, x, x, scale=number), (0.5, 0.7, 0.9)),
    "lengths": (lambda x, number: ch.attention(x, x, x, valid_lens=number), ([3, 9], [4, 8], [5, 7])),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_number_that_changes_between_calls_of_compiled_code(name, dynamic):
    """The compiler makes a symbol of it."""
    call, numbers = NUMBERS[name]
    run = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for number in numbers:
        for got, want in zip(*(with_gradient(each(Q, number), Q) for each in (run, call)), strict=True):
            torch.testing.assert_close(got, want)


def test_numbers_of_a_score_that_was_made_outside_of_compiled_code():
    for score in (ch.Gaussian(), ch.Additive(8, 8, 6, softcap=2.0), ch.Dot(scale=0.5)):
        run = torch.compile(
            lambda x, score=score: ch.attention(x, x, x, score=score), fullgraph=True, dynamic=True, backend="aot_eager"
        )
        torch.testing.assert_close(run(Q), ch.attention(Q, Q, Q, score=score))


INDUCTOR = {  # what is left to the compiler, and what is one operation
    "plain": {},
    "additive, lengths": {"score": ch.Additive(8, 8, 6), "mask": ch.Lengths([3, 9])},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("name", INDUCTOR)
def test_inductor(name, inductor_cache):
    same(lambda q, k, v: ch.attention(q, k, v, **INDUCTOR[name]), Q, K, V, backend="inductor")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.score, self.bias = ch.Additive(8, 8, 6), ch.RelativeBias(4)

    def forward(self, query, key, value, lengths):
        return ch.attention(query, key, value, score=self.score, mask=ch.Lengths(lengths), bias=self.bias)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_export(strict, dynamic):
    model, lengths = Model(), torch.tensor([3, 9])
    size = torch.export.Dim("length", min=2, max=1000)
    shapes = ({2: size}, {2: size}, {2: size}, None) if dynamic else None
    exported = torch.export.export(model, (Q, K, V, lengths), dynamic_shapes=shapes, strict=strict).module()
    inputs = [(Q, K, V)] + ([tuple(draw(2, 4, 17, 8, seed=s) for s in range(3))] if dynamic else [])
    for each in inputs:
        torch.testing.assert_close(exported(*each, lengths), model(*each, lengths))


@pytest.mark.parametrize("score", [None, ch.Dot(softcap=3.0), ch.Additive(8, 8, 6), ch.Gaussian(), SMOOTH], ids=name)
@pytest.mark.parametrize("mask", [None, ch.Causal(), ch.Lengths([3, 9])], ids=lambda m: m is not None and m.title())
def test_vmap_and_grad(score, mask):
    many = draw(5, 2, 4, 9, 8).detach()
    attend = lambda x: ch.attention(x, x, x, score=score, mask=mask)
    loss = lambda x: attend(x).sin().sum()
    apart = [x.clone().requires_grad_() for x in many]
    torch.testing.assert_close(torch.vmap(attend)(many), torch.stack([attend(x) for x in apart]))
    want = torch.stack([torch.autograd.grad(loss(x), x)[0] for x in apart])
    torch.testing.assert_close(torch.func.grad(loss)(many[0]), want[0])
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(many), want)
    torch.testing.assert_close(torch.func.grad(lambda xs: torch.vmap(loss)(xs).sum())(many), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_vmap_gives_the_bits_of_a_loop(dtype):
    """Of the same engine; and of a backward pass of any engine, which `vmap` computes one by one."""
    many = draw(3, 2, 4, 40, 16).detach().to(dtype)
    for mask in (None, ch.Causal()):
        attend = lambda x, mask=mask, engine="tiled": ch.attention(x, 2 * x, x, mask=mask, engine=engine)
        assert torch.equal(torch.vmap(attend)(many), torch.stack([attend(x) for x in many]))
        x = many[0].clone().requires_grad_()
        out = attend(x, engine=None)
        pull = lambda up, x=x, out=out: torch.autograd.grad(out, x, up, retain_graph=True)[0]
        assert torch.equal(torch.vmap(pull)(many), torch.stack([pull(up) for up in many]))


def test_what_vmap_hides_is_a_clear_error():
    x = torch.rand(3, 2, 9, 8)
    with pytest.raises(ch.UnsupportedError, match="batch dimension"):
        torch.vmap(lambda a, lens: ch.attention(a, a, a, mask=ch.Lengths(lens)))(x, torch.ones(3, 2, dtype=torch.long))
    with pytest.raises(ch.UnsupportedError, match="batch dimension"):
        torch.vmap(lambda a, keep: ch.attention(a, a, a, mask=keep))(x, torch.ones(3, 9, 9, dtype=torch.bool))


# opcheck of PyTorch 2.15 reads `.grad` of its own copies, and hides the warning in a way that the filter "error" undoes
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning:torch._subclasses")
def test_opcheck():
    start, stop = torch.zeros(1, 1, 1, dtype=torch.long), torch.arange(1, 10).view(1, 1, -1)
    gaps = torch.full((1, 1, 1, 1), 2), torch.full((1, 1, 1, 1), 3)
    keep = torch.ones(1, 1, 9, 9, dtype=torch.bool).triu(-3)
    plain = (Q, K, V, None, None, None, None, start, stop, None, None, None, None, "mul", 0.3, None, 0.0)
    query, key, weight = draw(2, 4, 9, 6), draw(2, 2, 9, 6), draw(6)
    all_of_it = (
        query,
        key,
        draw(2, 2, 9, 5),
        weight,
        draw(1, 4, 9, 9),
        draw(1, 4, 17),
        draw(4),
        start,
        stop,
        *gaps,
        keep,
    )
    full = (*all_of_it, torch.tensor(5), "tanh_add", 1.0, 2.0, 0.3)
    three, seven = [True] * 3 + [False] * 4, [True] * 7
    for arguments in (
        (*plain, None, three, False),
        (*plain, "sdpa", three, False),
        (*plain, None, [False] * 7, True),
        (*full, "tiled", seven, False),
        (*full, "native", seven, True),
    ):
        torch.library.opcheck(operation.attend, arguments)
    for given, engine, rows in (
        (plain, "sdpa", False),
        (plain, None, True),
        (full, "tiled", False),
        (full, "native", True),
    ):
        detached = [t.detach() if isinstance(t, torch.Tensor) else t for t in given]
        for wanted in (seven if given is full else three, [True, False, True, False, False, False, False]):
            for expected in (wanted, [False] * 7):
                kept = operation.attend(*detached, engine, expected, rows)
                ones = torch.ones_like(kept[0]), torch.ones_like(kept[2])
                arguments = (*ones, *kept, *detached, engine, expected, rows, wanted)
                torch.library.opcheck(operation.attend_backward, arguments)


STATES = ["forward", "operations_only", "vectorized", "transforms", "compiled", "traced"]


@pytest.mark.parametrize("name", STATES)
def test_a_question_about_the_state_is_not_compiled_by_itself(name):
    """Code that the compiler leaves out calls functions that it does compile: there they would say what held then."""
    asked = lambda: bool(getattr(get_mode(), name))
    ask = torch.compiler.disable(lambda x: asked(), recursive=False)
    around = torch.compile(lambda x: (x + 1, ask(x))[1], backend="eager")
    x = torch.zeros(2)
    assert around(x) == asked()
    with torch.autograd.forward_ad.dual_level():
        assert around(x) == asked()
    torch.compiler.reset()
    with torch.autograd.forward_ad.dual_level():
        assert around(x) == asked() == (name in STATES[:2])
    assert not around(x)


AUTOCAST = [None, ch.Bilinear(8, 8), ch.Additive(8, 8, 6), ch.Cosine(), ch.Gaussian(), SMOOTH]


@pytest.mark.parametrize("score", AUTOCAST, ids=name)
@pytest.mark.parametrize("engine", [None, "tiled", "reference"])
def test_autocast_is_that_of_sdpa(score, engine):
    """Inputs become the low precision, what is computed from them has float32 at least; gradients are float32."""
    options = {"score": score, "mask": ch.Causal()}
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.nn.functional.scaled_dot_product_attention(Q, K, V).dtype == torch.bfloat16
        output = ch.attention(Q, K, V, engine=engine, **options)
        weights = ch.weights(Q.detach(), K.detach(), **options)
        shown = [weights.dense(), weights[0, 1].dense(), weights.scores(), weights.entropy(), weights.logsumexp()]
        assert ch.attention(Q.double(), K.double(), V.double(), mask=ch.Causal()).dtype == torch.float64
    assert output.dtype == torch.bfloat16 and all(t.dtype == torch.float32 for t in shown)
    wide = ch.attention(Q, K, V, **options)
    assert (output - wide).abs().max() < 0.05
    for low, high in zip(*(torch.autograd.grad(o.float().sum(), (Q, K, V)) for o in (output, wide)), strict=True):
        assert low.dtype == torch.float32 and (low - high).abs().max() < 0.1


@pytest.mark.parametrize("score", AUTOCAST, ids=name)
def test_autocast_in_compiled_code(score):
    options = {"score": score, "mask": ch.Causal()}
    same_in_compiled = torch.compile(lambda q, k, v: ch.attention(q, k, v, **options), fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(same_in_compiled(Q, K, V), ch.attention(Q, K, V, **options))


def test_the_mark_of_a_constant_is_pytorchs():
    """`assume_constant` sets it without importing the compiler."""
    theirs, ours = (lambda: 1), (lambda: 1)
    torch.compiler.assume_constant_result(theirs)
    assume_constant(ours)
    assert vars(ours) == vars(theirs) != {}


def test_a_key_of_nan_that_nobody_sees_under_a_score_without_parameters():
    key = K.clone()
    key[0, :, 3:] = torch.nan
    mask, score = ch.Lengths([3, 9]), ch.Cosine()
    run = lambda k: ch.attention(Q, k, V, score=score, mask=mask)
    for attend in (run, torch.compile(run, backend="aot_eager")):
        k = key.detach().clone().requires_grad_()
        (grad,) = torch.autograd.grad(attend(k).sum(), k)
        assert grad.isfinite().all() and (grad[0, :, 3:] == 0).all()


REDUCTIONS = ch.reductions
REDUCED = {
    "statistics": lambda q, k, v: ch.weights(q, k, mask=ch.Causal(), bias=ch.ALiBi(4)).reduce(
        *(kind() for kind in (REDUCTIONS.Entropy, REDUCTIONS.LogSumExp, REDUCTIONS.MaxScore, REDUCTIONS.MeanDistance)),
        REDUCTIONS.Output(v), REDUCTIONS.Received(), REDUCTIONS.Pool(3), REDUCTIONS.TopK(2),
    ),
    "a score by tiles": lambda q, k, v: ch.weights(q, k, score=SMOOTH).reduce(
        REDUCTIONS.Entropy(), REDUCTIONS.Received()
    ),
    "with sinks": lambda q, k, v: ch.weights(q, k, sinks=v[0, :, 0, 0]).reduce(
        REDUCTIONS.SinkShare(), REDUCTIONS.Entropy()
    ),
    "over dimensions": lambda q, k, v: [
        ch.weights(q, k).mean(-2), ch.weights(q, k).sum(1), torch.matmul(ch.weights(q, k), v)
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", REDUCED)
@pytest.mark.parametrize("wanted", [False, True], ids=["without gradients", "with gradients"])
def test_statistics_in_compiled_code(name, wanted):
    """What a loss may read of the weights compiles as one graph, and has the gradients of eager code."""
    found = []
    for change in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")):
        inputs = [tensor.detach().requires_grad_(wanted) for tensor in (Q, K, V)]
        results = torch.utils._pytree.tree_leaves(change(REDUCED[name])(*inputs))
        loss = sum(one.sin().sum() for one in results if one.requires_grad)
        given = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True) if wanted else ()
        found.append([*results, *given])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # what it leaves out of its code
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler's own look at tensors with a graph
def test_an_operator_that_the_compiler_turns_round_is_an_error_or_eager_code():
    multiply = lambda q, k, v: ch.weights(q, k) @ v
    torch.testing.assert_close(torch.compile(multiply, backend="eager")(Q, K, V), multiply(Q, K, V))
    torch._dynamo.reset()  # it left this function out of its code
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.matmul\(w, value\)"):
        torch.compile(multiply, backend="eager", fullgraph=True)(Q, K, V)
