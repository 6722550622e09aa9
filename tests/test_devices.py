"""Other devices: a call must not wait for values there."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

import clearhead as ch
from clearhead.problem import problem, unseen
from clearhead.problem.guard import guard

T = torch.Tensor
READS = {
    *(T.item, T.tolist, T.numpy, T.cpu, T.__bool__, T.__int__, T.__float__, T.__index__, T.__array__, T.nonzero),
    *(torch.equal, torch.nonzero, torch.masked_select, T.masked_select),
}
MASKS = {
    "none": None,
    "causal": ch.Causal(),
    "window": ch.Causal() & ch.SlidingWindow(before=3),
    "lengths": ch.Lengths([9, 4]),
    "documents": ch.Causal() & ch.Documents.from_lengths([4, 5]),
    "or": ch.SlidingWindow(before=1) | ch.PrefixLM([2, 3]),
    "not": ~ch.SlidingWindow(before=1, after=1),
}


class NoReads(TorchFunctionMode):
    """Fails where a value is read back."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in READS, f"{func} reads values back"
        return func(*args, **(kwargs or {}))


def inputs(device="cpu"):
    return [torch.randn(2, 4, 9, w, generator=torch.Generator().manual_seed(w)).to(device) for w in (8, 8, 8)]


@pytest.mark.parametrize("engine", [None, "sdpa", "tiled", "reference"])
@pytest.mark.parametrize("name", MASKS)
def test_a_plain_mask_is_not_read_from_the_device(name, engine):
    """Tensors of the meta device have no values: whatever reads one fails."""
    query, key, value = inputs("meta")
    options = {"mask": MASKS[name], "bias": None if engine == "sdpa" else ch.ALiBi(4)}
    assert ch.attention(query, key, value, **options, engine=engine).shape == value.shape
    plan = ch.plan(query, key, value, mask=MASKS[name], engine="tiled")
    assert plan.computed == ch.plan(*inputs(), mask=MASKS[name], engine="tiled").computed  # and yet it skips


@pytest.mark.parametrize("engine", ["sdpa", "tiled"])
@pytest.mark.parametrize("name", MASKS)
def test_nothing_is_read_back(name, engine, monkeypatch):
    query, key, value = (t.requires_grad_() for t in inputs())
    run = lambda: ch.attention(query, key, value, mask=MASKS[name], engine=engine)
    want = run()  # what is remembered of the mask is read on the host, which here is the same device
    for where in ("problem.unseen.is_on_host", "base.torch_state.tensor_kind.is_on_host"):
        monkeypatch.setattr(f"clearhead.{where}", lambda tensor: False)
    with NoReads():
        output = run()
        found = torch.autograd.grad(output.sum(), (query, key, value))
    torch.testing.assert_close(output, want)
    for a, b in zip(found, torch.autograd.grad(want.sum(), (query, key, value)), strict=True):
        torch.testing.assert_close(a, b)


def test_raw_scores_of_what_no_query_sees_are_those_of_zeros():
    """The operands are left as they are until raw scores are computed."""
    query, key, _ = inputs()
    key[0, :, 6] = torch.nan
    mask = ch.Lengths([5, 9])
    want = ch.weights(query, key.nan_to_num(0.0), mask=mask).scores()
    found = problem.make_problem(query, key, mask=mask)
    assert found.key.isnan().any()
    torch.testing.assert_close(ch.weights(query, key, mask=mask).scores(), want, rtol=0, atol=0)


def test_a_problem_is_guarded_once(monkeypatch):
    """Its poison stays, where it is not known whether its operands are finite."""
    query, key, value = inputs()
    key[0, 0, 3] = torch.nan
    monkeypatch.setattr(unseen, "is_on_host", lambda tensor: False)
    once = guard(problem.make_problem(query, key, value, mask=ch.Causal()))
    assert guard(once) is once and once.poison[1].isnan().any()


def test_the_mode_sees_reads():
    with pytest.raises(AssertionError, match="reads values back"), NoReads():
        bool(torch.ones(()))
