"""What is printed: a repr raises nothing and computes nothing large, whatever a class of one's own does."""

import contextlib
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import clearhead as ch
from clearhead.masks.intervals import Intervals
from clearhead.testing import check_mask

METHODS = ["title", "drawn", "least", "lower", "part", "signature", "depends", "resolve"]
SHOWN = ["__repr__", "__str__", "_repr_html_"]


class Rows(ch.extend.Mask):
    """A mask of one's own that holds data, and fits no other inputs than its own."""

    def __init__(self, length):
        self.keep = torch.arange(length) % 2 == 0

    def lower(self, sizes):
        start = torch.zeros(1, 1, 1, dtype=torch.int64, device=sizes.device)
        return ch.extend.Spans(start, start + sizes.keys, lambda b, h, q, k: self.keep[torch.arange(sizes.keys)[k]])

    @classmethod
    def example(cls, sizes):
        return cls(sizes.keys)


class Named(Rows):
    def title(self):
        raise KeyError("title")


class OwnScore(ch.extend.Score):
    def __init__(self):
        """It leaves out super().__init__()."""

    def tile(self, query, key):
        return query @ key.mT


class OwnBias(ch.extend.Bias):
    def extra_repr(self):
        raise RuntimeError("extra_repr")

    def lower(self, sizes):
        raise RuntimeError("lower")


def raising(draw):
    """A mask of one's own of which some methods raise."""

    def fail(*_):
        raise draw.choice([RuntimeError, IndexError, KeyError, NotImplementedError])("a method of one's own")

    return type("Raising", (ch.extend.Mask,), dict.fromkeys([*draw.sample(METHODS, 3), "lower"], fail))()


def mask(draw, depth=0):
    length, batch = draw.choice([0, 1, 3, 7, 40]), draw.choice([0, 1, 2, 5])
    keep = torch.rand(batch, length) < 0.5
    makers = [
        ch.Causal,
        lambda: ch.Padding(keep),
        lambda: ch.Padding(keep.long()),
        lambda: ch.Lengths(keep.sum(-1)),
        lambda: ch.Documents(keep.long()),
        lambda: ch.Documents.from_cu_seqlens([0, 2, length + 2], [0, 3, length + 3]),
        lambda: ch.PrefixLM(keep.sum(-1)),
        lambda: Intervals(keep.long() * 0, keep.long()),
        lambda: ch.DenseMask(torch.rand(batch, 1, length, length) < 0.5),
        lambda: ch.MaskFunction(lambda b, h, q, k: q >= k),
        lambda: ch.MaskFunction(lambda b, h, q, k: keep[b, k]),
        lambda: ch.MaskFunction(lambda b, h, q, k: 1 / 0),
        lambda: ch.SlidingWindow(before=draw.choice([0, 2, 10**15])),
        lambda: Rows(length),
        lambda: Named(length),
        lambda: raising(draw),
    ]
    if depth < 2:
        makers += [lambda: ~mask(draw, depth + 1), lambda: mask(draw, depth + 1) & mask(draw, depth + 1)]
        makers += [lambda: mask(draw, depth + 1) | mask(draw, depth + 1)]
    return draw.choice(makers)()


def part(draw):
    x = torch.rand(1, 2, 4, 4)
    return draw.choice(
        [
            ch.Dot,
            lambda: ch.Dot(scale=torch.tensor(2.0), softcap=3.0),
            lambda: ch.Gaussian(torch.tensor(2.0)),
            lambda: ch.Additive(3, 4, 5),
            OwnScore,
            OwnBias,
            lambda: ch.ALiBi(4) + OwnBias(),
            lambda: ch.RelativeBias(4),
            lambda: ch.DenseBias(x),
            lambda: ch.edits.AddBias(bias=OwnBias()),
            lambda: ch.edits.AddBias(bias=x),
            lambda: ch.edits.ForceMask(mask=mask(draw)),
            lambda: ch.edits.Knockout(heads=[1], queries=range(3), keys=-1),
            lambda: ch.reductions.Output(x),
            lambda: ch.reductions.Mass(torch.tensor([0, 1, 1, 0])),
            ch.nn.KeyValueCache,
            lambda: cached(x, capacity=8),
            lambda: cached(x, window=2, first=1),
            lambda: cached(x),
            ch.models.Means,
        ]
    )()


def cached(x, **options):
    """A cache that has been written to twice."""
    attend, cache = ch.nn.MultiHeadAttention(4, 2), ch.nn.KeyValueCache(**options)
    with torch.no_grad():
        attend(x[0], x[0], x[0], cache=cache)
        attend(x[0], x[0], x[0], cache=cache)
    return cache


class Attends(torch.nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, x):
        return ch.attention(x, x, x, mask=self.mask)


def call(draw):
    """What is made of attention under some mask that works."""
    own, x = draw.choice([None, Rows(4), Named(4), ch.Causal(), ~Named(4) & ch.Causal()]), torch.rand(1, 2, 4, 4)
    model = Attends(own)
    with ch.watch(model) as seen:
        model(x)
    with ch.models.statistics(model, [ch.reductions.Entropy()]) as kept:
        model(x)
    module, cache, unequal = ch.nn.MultiHeadAttention(4, 2), ch.nn.KeyValueCache(), ch.nn.KeyValueCache()
    module(x[0], x[0], x[0], cache=cache)
    module(x[0], x[0], x[0], cache=unequal, new_lens=[4, 1])
    audit = ch.audit(seen, ch.Causal())
    found = [seen, seen[0], seen.runs, seen.diagnose(), kept, kept[0], audit, audit.tests, seen.compare(seen)]
    found += [ch.plan(x, x, x, mask=own), weights := ch.weights(x, x, mask=own), weights.gradients(x, x)]
    found += [ch.partial(x, x, x, mask=own), ch.explain(x, x, x, mask=own), ch.diagnose(x, x, x, mask=own)]
    found += [module, module.attention_weights, cache, unequal, module.prepare(x[0], x[0])]
    found += [cached(x, capacity=8), cached(x, window=2, first=1)]
    return found


SURROUNDINGS = {
    "none": contextlib.nullcontext,
    "fake": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "meta": lambda: torch.device("meta"),
    "double": torch.inference_mode,
}


def printed(one):
    for how in SHOWN:
        if hasattr(one, how):
            said = getattr(one, how)()
            assert isinstance(said, str) and (said or isinstance(one, str))


@pytest.mark.parametrize("made", SURROUNDINGS)
@pytest.mark.parametrize("shown", SURROUNDINGS)
def test_random_reprs(made, shown):
    draw = random.Random(f"{made} {shown}")
    tried = 0
    for _ in range(120):
        with SURROUNDINGS[made]():
            try:
                one = draw.choice([mask, mask, part])(draw)
            except (ch.ClearheadError, RuntimeError, IndexError, KeyError, NotImplementedError):
                continue  # it cannot be made here
        tried += 1
        with SURROUNDINGS[shown]():
            printed(one)
    assert tried > 20


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # asked for by PyTorch's own conversion to fake tensors, once
@pytest.mark.parametrize("shown", SURROUNDINGS)
def test_reprs_of_what_is_made_of_a_call(shown):
    draw = random.Random(shown)
    for _ in range(4):
        for one in call(draw):
            with SURROUNDINGS[shown]():
                printed(one)


def test_a_mask_of_ones_own_that_holds_data():
    why = "not drawn at 6 × 6: IndexError: index 4 is out of bounds for dimension 0 with size 4"
    assert repr(Rows(4)) == f"Rows()\n{why}"
    assert repr(Rows(6)).splitlines()[1] == "■ · ■ · ■ ·"
    assert repr(ch.Causal() & Named(4)) == f"Causal() & Named()\n{why}"
    assert Rows(4)._repr_html_() == f"<div><p><code>Rows()</code></p><pre>{why}</pre></div>"
    check_mask(Rows)
    assert repr(OwnScore()) == "OwnScore()" and repr(OwnBias()) == "OwnBias()"
    assert "OwnBias()" in repr(ch.ALiBi(2) + OwnBias())


def test_the_error_of_a_mask_of_ones_own_is_shown():
    class Broken(ch.extend.Mask):
        def lower(self, sizes):
            raise TypeError("query_offset() missing 'who'\nin a second line")

    said = "not drawn at 6 × 6: TypeError: query_offset() missing 'who'"
    assert repr(Broken()) == f"Broken()\n{said}"
    assert repr(~Broken() & ch.Causal()) == f"~Broken() & Causal()\n{said}"
    rule = ch.MaskFunction(lambda b, h, i, j: 1 / 0)
    assert repr(rule) == "MaskFunction(<lambda>)\nnot drawn at 6 × 6: ZeroDivisionError: division by zero"
    assert repr(ch.DenseMask(torch.ones(3, 3, dtype=torch.bool, device="meta"))) == "DenseMask(<3×3>)"


def test_compiled_code_may_print():
    said = []

    def run(x):
        said.append(repr(ch.Causal() & Rows(4)))
        return x + 1

    assert torch.compile(run, backend="eager")(torch.zeros(2)).sum() == 2
    assert said == [
        "Causal() & Rows()\nnot drawn at 6 × 6: IndexError: index 4 is out of bounds for dimension 0 with size 4"
    ]


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: ~m, lambda m: m & ch.Causal(), lambda m: m | ch.Causal()])
def test_a_large_matrix_is_read_no_further_than_it_is_drawn(wrap, monkeypatch):
    """By a count of the numbers that any operation gives, not by a clock."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            given = function(*args, **kwargs or {})
            written = isinstance(given, torch.Tensor) and not function.is_view
            if written:
                self.most = max(self.most, given.untyped_storage().nbytes())
            return given

    large = wrap(ch.DenseMask(torch.rand(1, 2, 6000, 6000) < 0.5))
    with Count() as count:
        first = repr(large)
        large._repr_html_()
    assert "the first 1024 of 6000 queries" in first
    assert 0 < count.most <= 2 * 8 * 1024 * 1024


LONG = torch.rand(1, 2, 300, 8)
# They are made to be read: a table, a picture or a page of text, whose length does not grow with the tensors
READ = {"results.Plan", "distributed.RankPlan", "explanation.Explanation", "explanation.Diagnosis"}
READ |= {"models.Recording", "models.Table", "models.Differences", "models.Sweep", "models.Monitor", "models.Survey"}
READ |= {"models.LogitAttribution", "models.Statistics", "models.Generation", "models.AuditReport"}


class Keeps(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = ch.nn.MultiHeadAttention(8, 2)

    def forward(self, x):
        return self.attend(x, x, x)


def holding():
    """Objects of public classes that hold long tensors, and more that hold none."""
    extend, edits, reductions, nn = ch.extend, ch.edits, ch.reductions, ch.nn
    weights, keep = ch.weights(LONG, LONG), torch.rand(300, 300) < 0.5
    model, x = Keeps(), torch.rand(1, 300, 8)
    with ch.watch(model, values=True) as seen:
        model(x)
    with ch.models.statistics(model, [reductions.Entropy()]) as kept:
        model(x)
    cache, attend = nn.KeyValueCache(), nn.MultiHeadAttention(8, 2, rotary=nn.RotaryEmbedding(4), score=ch.Cosine())
    attend(x, x, x, cache=cache)
    grad = torch.rand_like(LONG)
    yield from (
        extend.Pairwise("mul", LONG, LONG, torch.rand(8)),
        extend.Added(dense=LONG @ LONG.mT, given=ch.ALiBi(2)),
    )
    yield from (
        weights.problem,
        extend.Summary(factors=torch.rand(1, 1, 300)),
        extend.Partial(LONG, LONG[..., 0], None),
    )
    yield from (
        ch.Causal().spans(300, 300),
        extend.Sizes(1, 2, 300, 300),
        extend.Cost(1, 2),
        extend.Found(entropy=LONG),
    )
    yield from (reductions.Output(LONG), reductions.Mass(torch.arange(300)), reductions.Received(torch.rand(300)))
    yield from (reductions.Pool(8), reductions.TopK(2), weights, weights.gradients(LONG, grad))
    yield from (ch.partial(LONG, LONG, LONG), seen[0].weights, seen[0], kept[0], cache, attend.prepare(x, x))
    yield from (ch.DenseBias(LONG @ LONG.mT), ch.RelativeBias(300, 8), ch.ALiBi(64), ch.BiasFunction(lambda *_: LONG))
    yield from (
        ch.Dot(scale=2.0),
        ch.Additive(8, 8, 300),
        ch.Bilinear(300, 300),
        ch.Gaussian(),
        ch.Cosine(),
    )
    yield from (edits.AddBias(LONG @ LONG.mT), edits.ForceMask(keep), edits.Patch(LONG), edits.Freeze(weights.dense()))
    yield from (
        edits.Ablate(0, kind="mean", over=seen[0]),
        edits.Knockout(heads=1, keys=range(9)),
        edits.MapWeights(torch.sqrt, heads=1),
        edits.ScaleHeads(0, 1),
    )
    yield from (nn.DotProductAttention(), nn.AdditiveAttention(300), nn.SinusoidalPositionalEncoding(8))
    yield from (nn.LearnedPositionalEncoding(300, 8), nn.RotaryEmbedding(300), ch.models.Means(), Rows(300))
    yield from (ch.DenseMask(keep), ch.Padding(keep), ch.Lengths(range(300)), ch.Documents(torch.arange(300) // 50))
    yield from (ch.PrefixLM(range(300)), ch.MaskFunction(lambda *_: keep), ch.SlidingWindow(before=9), ch.Causal())


def test_what_holds_tensors_prints_their_shapes_alone():
    """A title of at most 200 characters: a mask has its picture under it, and a module its parts."""
    for one in holding():
        title = repr(one).split("\n")[0] if isinstance(one, ch.extend.Mask) else repr(one)
        # a module of modules is PyTorch's text, a line for each part
        longest = max(map(len, title.split("\n"))) if isinstance(one, torch.nn.Module) else len(title)
        assert longest <= 200 and "tensor(" not in title and "at 0x" not in title, (len(title), title)


def test_tensors_are_named_by_shape_and_dtype():
    assert repr(ch.extend.Pairwise("mul", LONG, LONG)) == (
        "Pairwise(phi='mul', query=<1×2×300×8 float32>, key=<1×2×300×8 float32>)"
    )
    assert repr(ch.extend.Added(relative=torch.zeros(1, 1, 9).half())) == "Added(relative=<1×1×9 float16>)"
    assert repr(ch.reductions.Mass(torch.arange(4).numpy())) == "Mass(groups=<4 int64>)"
    assert repr(ch.reductions.Pool((3, 4), queries=torch.zeros(5))) == "Pool(size=(3, 4), queries=<5 float32>)"
    assert repr(ch.reductions.Entropy()) == "Entropy()" and repr(ch.reductions.TopK(2)) == "TopK(k=2)"


def test_every_public_class_that_holds_values_is_printed_here():
    """Dataclasses and named tuples would print every number of their tensors."""
    import dataclasses
    import inspect

    from test_house import PUBLIC

    printed = {type(one) for one in holding()}
    reductions = {cls for name, cls in PUBLIC.items() if name.startswith("reductions.")}  # one repr for all
    for name, cls in PUBLIC.items():
        if not inspect.isclass(cls) or name in READ or cls in printed | reductions:
            continue
        made = dataclasses.is_dataclass(cls) and hasattr(cls.__repr__, "__wrapped__")  # by the decorator
        if made or (issubclass(cls, tuple) and "outlined" not in f"{cls.__repr__}{cls.__repr__.__code__.co_names}"):
            hints = " ".join(map(str, getattr(cls, "__annotations__", {}).values()))
            assert "Tensor" not in hints, f"{name} would print its tensors: __repr__ = outlined"
