"""PyTorch's transforms, drawn at random: right, or refused in words."""

import pytest
import torch
import transformed

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
