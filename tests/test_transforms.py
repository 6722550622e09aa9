"""PyTorch's transforms, drawn at random: right, or refused in words."""

import pytest
import torch
import transformed
from torch import nn

import clearhead as ch


@pytest.mark.parametrize(("first", "stop"), [(0, 8), (8, 40), (40, 80), (80, 120), (120, 160)])
def test_random_transforms_of_random_calls(first, stop):
    outcomes = [transformed.outcome(number) for number in range(first, stop)]
    assert [o for o in outcomes if not o.startswith(("right", "refused: ", "left out: "))] == []
    assert sum(o == "right" for o in outcomes) >= (stop - first) // 4


@pytest.mark.parametrize("budget", [60, 2**21], ids=["blocks", "one block"])
def test_forward_mode_over_a_batch_of_tangents(budget, monkeypatch):
    monkeypatch.setattr(transformed.regions, "BUDGET", budget)
    query, key, value = torch.randn(3, 1, 2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def formula(query):
        seen = torch.ones(5, 5, dtype=torch.bool).tril()
        return (query @ key.mT / 3**0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ value

    given = {"vectorize": True, "strategy": "forward-mode"}
    found = torch.autograd.functional.jacobian(lambda q: ch.attention(q, key, value, mask=ch.Causal()), query, **given)
    torch.testing.assert_close(found, torch.autograd.functional.jacobian(formula, query))


@pytest.mark.parametrize("call", ["attention", "scaled_dot_product_attention"])
def test_dropout_over_a_batch_of_tangents_is_refused_in_words(call):
    x = torch.randn(1, 2, 5, 3, generator=torch.Generator().manual_seed(0))
    jacobian, hessian = torch.autograd.functional.jacobian, torch.autograd.functional.hessian

    def dropped(x):
        return getattr(ch, call)(x, x, x, dropout_p=0.3)

    with pytest.raises(ch.UnsupportedError, match="vectorize=True"):
        jacobian(dropped, x, vectorize=True, strategy="forward-mode")
    with pytest.raises(ch.UnsupportedError, match="vectorize=True"):
        hessian(lambda x: dropped(x).sum(), x, vectorize=True, outer_jacobian_strategy="forward-mode")
    assert jacobian(dropped, x, vectorize=True).isfinite().all()  # its seed is drawn once, before


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr")  # by torch.func.linearize
def test_a_linear_map_is_the_same_at_each_use():
    """Its trace keeps constants: nothing may write to them."""
    query, key, value, along = torch.randn(4, 1, 2, 5, 3, dtype=torch.float64)
    calls = {
        "output": lambda q: ch.attention(q, key, value, mask=ch.Causal()),
        "tile": lambda q: ch.attention(q, key, value, score=lambda a, b: (a @ b.mT).sin()),
        "partial": lambda q: ch.partial(q, key, value).logsumexp,
        "weights": lambda q: ch.weights(q, key, mask=ch.Causal())[:, :, 1:4],
        "top": lambda q: ch.weights(q, key).reduce(
            ch.reductions.TopK(2), ch.reductions.Entropy(), ch.reductions.Pool(2, "mean")
        )[0][0],
    }
    for name, call in calls.items():
        want = torch.func.jvp(call, (query,), (along,))[1]
        _, linear = torch.func.linearize(call, query)
        for found in (linear(along), linear(2 * along) / 2, linear(along)):
            torch.testing.assert_close(found, want, msg=name)


def learnt_scale(**given):
    """A score of one's own whose scale is a parameter."""

    class Scaled(ch.extend.Score):
        product = True

        def __init__(self):
            super().__init__()
            self.scale_of_all = nn.Parameter(torch.tensor(0.4))

        def tile(self, query, key):
            return query @ key.mT * self.scale_of_all

    if given.get("lowered"):
        Scaled.lower = lambda self, query, key: ch.extend.Pairwise("mul", query, key, scale=self.scale_of_all)
    return Scaled()


def gaussian():
    return ch.Gaussian(nn.Parameter(torch.tensor(1.3)))


NUMBERS = {
    "bandwidth": lambda: {"score": gaussian()},
    "bandwidth and softcap": lambda: {"score": ch.Gaussian(nn.Parameter(torch.tensor(1.3)), softcap=3.0)},
    "bandwidth and change": lambda: {"score": gaussian().then(lambda s, b, h, i, j: s - (i - j).abs())},
    "scale of tile": lambda: {"score": learnt_scale()},
    "scale of lower": lambda: {"score": learnt_scale(lowered=True)},
    "sinks": lambda: {"sinks": nn.Parameter(torch.tensor([0.3, -0.2]))},
    "table of a bias": lambda: {"bias": ch.RelativeBias(2)},
    "scale of a module": lambda: {"scale": nn.Parameter(torch.tensor([0.4]))},
    "temperature of a module": lambda: {"temperature": nn.Parameter(torch.tensor([0.4, 0.5]))},
    "bandwidth of a module": lambda: {"score": gaussian()},
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", NUMBERS)
def test_vmap_over_numbers_that_are_learnt(name):
    """Python compares none of them: each sample has its own."""
    torch.manual_seed(0)
    given = NUMBERS[name]()

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            for key, value in given.items():
                setattr(self, key, value)
            self.module = ch.nn.MultiHeadAttention(6, 2, **given) if name.endswith("module") else None

        def forward(self, x):
            if self.module is not None:
                return self.module(x[0], x[0], x[0], mask=ch.Causal())
            return ch.attention(x, x, x, mask=ch.Causal(), **{key: getattr(self, key) for key in given})

    layer, x = Layer(), torch.randn(2, 2, 5, 6)
    two = {key: torch.stack([p.detach(), p.detach() * 1.5]) for key, p in layer.named_parameters()}
    of = [{key: p[i] for key, p in two.items()} for i in range(2)]

    def call(parameters):
        return torch.func.functional_call(layer, parameters, x)

    def loss(parameters):
        return call(parameters).square().sum()

    torch.testing.assert_close(torch.func.vmap(call)(two), torch.stack([*map(call, of)]))
    found, want = torch.func.vmap(torch.func.grad(loss))(two), [torch.func.grad(loss)(one) for one in of]
    torch.testing.assert_close(found, {key: torch.stack([one[key] for one in want]) for key in two})


@pytest.mark.parametrize(
    "call",
    [
        lambda x, n: ch.attention(x, x, x, scale=n),
        lambda x, n: ch.scaled_dot_product_attention(x, x, x, scale=n),
        lambda x, n: ch.attention(x, x, x, mask=ch.SlidingWindow(before=n.long())),
        lambda x, n: ch.attention(x, x, x, mask=ch.FirstKeys(n.long())),
    ],
)
def test_vmap_over_numbers_that_are_read_is_an_error(call):
    with pytest.raises(ch.ClearheadError, match=r"BatchedTensor[^;]*; expected a"):
        torch.func.vmap(lambda n: call(torch.ones(1, 1, 3, 2), n))(torch.tensor([1.0, 2.0]))
