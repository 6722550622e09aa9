"""plan() of a module is the plan of the call that it makes."""

import copy

import pytest
import torch

import clearhead as ch
from clearhead import nn

X = torch.rand(2, 50, 16, generator=torch.Generator().manual_seed(0))
MODULES = {
    "multi-head": lambda: nn.MultiHeadAttention(16, 4, num_kv_heads=2, score=ch.Gaussian()),
    "dot product": nn.DotProductAttention,
    "additive": lambda: nn.AdditiveAttention(8),
    "torch's": lambda: torch.nn.MultiheadAttention(16, 4, batch_first=True),
    "torch's, ours": lambda: nn.TorchMultiheadAttention(16, 4, batch_first=True),
}


@pytest.mark.parametrize("name", MODULES)
def test_the_plan_of_a_module_is_that_of_its_call(name):
    module = MODULES[name]().eval()
    of_torch = isinstance(module, torch.nn.MultiheadAttention)
    mask = (
        {"key_padding_mask": torch.arange(50) >= torch.tensor([[30], [50]])} if of_torch else {"valid_lens": [30, 50]}
    )
    plan = ch.plan(module, X, X, X, **mask)
    with ch.watch(module, values=True) as seen, torch.no_grad():
        module(X, X, X, **mask)
    (call,) = seen
    shapes = {side: tuple(getattr(call, side).shape) for side in ("query", "key", "value")}
    assert {side: shape[-2:] for side, shape in plan.shapes.items()} == {s: shape[-2:] for s, shape in shapes.items()}
    assert plan.pairs == call.shape[0] * call.shape[1] * 50 * 50
    if name in ("multi-head", "additive"):
        assert plan.engine == "native" and "the score is no dot product" in plan.declined["sdpa"][0]


def test_the_plan_leaves_the_module_as_it_is():
    module, cache, generator = nn.MultiHeadAttention(16, 4, dropout=0.5), nn.KeyValueCache(), torch.get_rng_state()
    plan = ch.plan(module, X, X, X, mask=ch.Causal(), cache=cache)
    assert "dropout" in plan.declined["sdpa"][0] and not len(cache.lengths or ())
    with pytest.raises(ch.ClearheadError, match="no call of it was recorded"):
        _ = module.attention_weights
    assert torch.equal(generator, torch.get_rng_state())
    with pytest.raises(ch.ClearheadError, match="no call of it was recorded"):
        _ = copy.deepcopy(module).attention_weights


def test_what_plan_cannot_take_is_one_clear_error():
    with pytest.raises(
        ch.ClearheadError, match=r"plan knows the attention modules .* got a Linear. For a model, record"
    ):
        ch.plan(torch.nn.Linear(16, 16), X)
    with pytest.raises(ch.ClearheadError, match=r"plan calls MultiHeadAttention with the other arguments: missing"):
        ch.plan(nn.MultiHeadAttention(16, 4), X)
    with pytest.raises(TypeError, match=r"plan\(\) takes the arguments of attention\(\), or a module and its inputs: "):
        ch.plan(X, X)


def test_the_memory_is_said_to_be_the_forward_passs():
    assert "  extra memory  0 bytes, forward alone\n" in str(ch.plan(X, X, X, engine="sdpa"))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_plan_of_nested_tensors(layout):
    nested = torch.nested.as_nested_tensor([X[0, :3], X[1]], layout=layout)
    plan = ch.plan(nested, nested, nested)
    assert plan.shapes["key"] == (2, "j", 16) and repr(plan).startswith("plan: query (2, j, 16), ")
    with pytest.raises(ch.ClearheadError, match="query is nested"):
        ch.diagnose(nested, nested, nested)
