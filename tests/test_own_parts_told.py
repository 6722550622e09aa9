"""What somebody who writes a first score or mask is told when a part of it is missing or has another form."""

import pytest
import torch

import clearhead as ch
from clearhead.base.positions import query_offset
from clearhead.testing import check_mask, check_score


def test_a_score_without_tile():
    class Nothing(ch.extend.Score):
        pass

    with pytest.raises(AssertionError, match=r"^Nothing has no tile\(query, key\)"):
        check_score(Nothing)


def test_an_example_without_its_widths():
    class Halved(ch.extend.Score):
        @classmethod
        def example(cls):
            return cls()

        def tile(self, query, key):
            return query @ key.mT / 2

    with pytest.raises(AssertionError, match=r"Halved.example\(\) gave Halved\(\); expected \(score, width of queries"):
        check_score(Halved)


def test_a_lowering_by_another_function():
    class Dotted(ch.extend.Score):
        def tile(self, query, key):
            return query @ key.mT

        def lower(self, query, key):
            return ch.extend.Pairwise("dot", query, key)

    x = torch.zeros(3, 4)
    with pytest.raises(
        ch.ClearheadError, match=r"lower gave Pairwise\('dot', …\); expected None, or a Pairwise whose φ"
    ):
        ch.attention(x, x, x, score=Dotted())


def test_spans_without_the_leading_dimensions():
    class Own(ch.extend.Mask):
        def title(self):
            return "Own()"

        def lower(self, sizes):
            i = torch.arange(sizes.queries)
            return ch.extend.Spans(i, i + 1)

    x = torch.zeros(3, 4)
    with pytest.raises(ch.ShapeError, match=r"(?s)lower gave start \(3,\).*Give positions \(Lq,\) as view\(1, 1, -1\)"):
        ch.attention(x, x, x, mask=Own())


class Before(ch.extend.Mask):
    """Each query sees its own place and those before."""

    positional = True

    @classmethod
    def example(cls, sizes):
        return cls()

    def title(self):
        return f"{type(self).__name__}()"

    def stop(self, sizes):
        return torch.arange(sizes.queries).view(1, 1, -1) + query_offset(sizes, "Before") + 1

    def lower(self, sizes):
        stop = self.stop(sizes).clamp(0, sizes.keys)
        return ch.extend.Spans(torch.zeros_like(stop), stop)


def test_a_mask_that_is_right():
    check_mask(Before)


def test_a_mask_that_does_not_say_that_it_is_positional():
    class Silent(Before):
        positional = False

    with pytest.raises(AssertionError, match=r"Silent\(\).*the spans depend on the alignment; set positional = True"):
        check_mask(Silent)


def test_a_mask_that_reaches_beyond_the_keys():
    class Beyond(Before):
        def lower(self, sizes):
            stop = self.stop(sizes)
            return ch.extend.Spans(torch.zeros_like(stop), stop)

    with pytest.raises(AssertionError, match="stop outside"):
        check_mask(Beyond)


def test_a_plan_says_what_a_score_with_tile_alone_costs():
    class Waves(ch.extend.Score):
        def tile(self, query, key):
            return (query @ key.mT).sin()

    x = torch.rand(1, 2, 6, 4)
    (note,) = ch.plan(x, x, x, score=Waves()).notes
    assert "has only tile()" in note and "autograd" in note and "block by block" in note and "lower()" in note
    assert ch.plan(x, x, x, score=ch.Gaussian(), engine="tiled").notes == []


class OddTile(ch.extend.Score):
    def __init__(self, odd):
        super().__init__()
        self.odd = odd

    def tile(self, query, key):
        return self.odd(query @ key.mT)


class OddPairs(ch.extend.Score):
    def __init__(self, odd, name):
        super().__init__()
        self.odd, self.name = odd, name

    def tile(self, query, key):
        return query @ key.mT

    def lower(self, query, key):
        pairs = ch.extend.Pairwise("mul", query, key, weight=torch.ones(query.shape[-1]))
        return pairs._replace(**{self.name: self.odd(getattr(pairs, self.name))})


class OddBias(ch.extend.Bias):
    def __init__(self, odd, by_function):
        super().__init__()
        self.odd, self.by_function = odd, by_function

    def lower(self, sizes):
        every = torch.zeros(sizes.shape)
        if self.by_function:
            return ch.extend.Added(function=lambda *sides: self.odd(every[sides]))
        return ch.extend.Added(dense=self.odd(every))


class OddMask(ch.extend.Mask):
    def __init__(self, odd):
        self.odd = odd

    def lower(self, sizes):
        start = torch.zeros(1, 1, 1, dtype=torch.int64)
        every = torch.ones(sizes.shape, dtype=torch.bool)
        return ch.extend.Spans(start, start + sizes.keys, lambda *sides: self.odd(every[sides]))


ODD = {
    "nested": lambda t: torch.nested.nested_tensor(list(t)) if t.ndim > 1 else torch.nested.nested_tensor([t, t]),
    "sparse": lambda t: t.to_sparse(),
    "nothing": lambda t: None,
    "array": lambda t: t.numpy(),
    "complex": lambda t: t.to(torch.complex64),
    "meta": lambda t: t.to("meta"),
}
PARTS = {
    "tile": lambda odd: {"score": OddTile(odd)},
    "query": lambda odd: {"score": OddPairs(odd, "query")},
    "key": lambda odd: {"score": OddPairs(odd, "key")},
    "weight": lambda odd: {"score": OddPairs(odd, "weight")},
    "dense": lambda odd: {"bias": OddBias(odd, False)},
    "function": lambda odd: {"bias": OddBias(odd, True)},
    "residual": lambda odd: {"mask": OddMask(odd)},
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("part", PARTS)
def test_what_is_no_dense_tensor_of_numbers(part, odd):
    """One error, which names whose part gave what, and what is expected."""
    x = torch.rand(2, 2, 6, 4)
    right = ch.attention(x, x, x, **PARTS[part](lambda t: t))
    if (part, odd) == ("weight", "nothing"):  # None means ones
        torch.testing.assert_close(ch.attention(x, x, x, **PARTS[part](ODD[odd])), right)
        return
    with pytest.raises(ch.ClearheadError, match=r"(Odd\w+\.(tile|lower)|residual of a mask's spans).* gave"):
        ch.attention(x, x, x, **PARTS[part](ODD[odd]))


def test_a_weight_that_is_wider_than_the_inputs():
    x = torch.rand(2, 2, 6, 4)
    with pytest.raises(ch.ClearheadError, match=r"OddPairs.lower gave a weight \(4,\) of torch.float64"):
        ch.attention(x, x, x, score=OddPairs(lambda t: t.double(), "weight"))


class Projected(ch.extend.Score):
    """A score of one width."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 1, bias=False)

    def tile(self, query, key):
        return self.layer(torch.tanh(query.unsqueeze(-2) - key.unsqueeze(-3))).squeeze(-1)


def test_a_score_of_one_width_is_checked_at_that_width():
    with pytest.raises(
        AssertionError, match=r"(?s)queries of width 4 and keys of width 4.*check_score\(Projected, width="
    ):
        check_score(Projected)
    check_score(Projected, width=32)
