"""attention_weights: the weights of the last call as it was, or an error; never others."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

import clearhead as ch
from clearhead.nn import AdditiveAttention, DotProductAttention, KeyValueCache, MultiHeadAttention

MODULES = {
    "dot": DotProductAttention,
    "additive": lambda: AdditiveAttention(4),
    "heads": lambda: MultiHeadAttention(6, 2),
    "heads with a score": lambda: MultiHeadAttention(6, 2, score=ch.Bilinear(3, 3)),
}


@pytest.fixture(params=MODULES)
def attend(request):
    torch.manual_seed(0)
    return MODULES[request.param]()


def inputs():
    torch.manual_seed(1)
    return [torch.randn(2, length, 6) for length in (4, 5, 5)]


def test_nothing_before_a_call_then_the_last_call(attend):
    assert attend.attention_weights is None
    query, key, value = inputs()
    attend(query, key, value)
    attend(query, key, value, valid_lens=[1, 3])
    weights = attend.attention_weights
    assert isinstance(weights, ch.Weights) and weights is attend.attention_weights
    assert weights.shape[-2:] == (4, 5)
    assert (weights.received()[0, ..., 1:] == 0).all() and (weights.received()[1, ..., :3] > 0).all()
    attend(query, key[:, :2], value[:, :2])
    assert attend.attention_weights.shape[-2:] == (4, 2)
    assert weights.shape[-2:] == (4, 5)


def test_no_gradient_is_held(attend):
    query, key, value = (t.requires_grad_() for t in inputs())
    attend(query, key, value)
    assert not attend.attention_weights.dense().requires_grad
    assert not attend.attention_weights.problem.needs_grad


def test_an_optimizer_step_changes_nothing(attend):
    query, key, value = inputs()
    attend(query, key, value)
    expected = attend.attention_weights.dense().clone()
    if list(attend.parameters()):
        attend(query, key, value).square().sum().backward()
        torch.optim.SGD(attend.parameters(), lr=100.0).step()
    early = attend.attention_weights  # first looked at after the step
    torch.testing.assert_close(early.dense(), expected)
    with torch.no_grad():
        for parameter in attend.parameters():
            parameter.fill_(7.0)
    torch.testing.assert_close(early.dense(), expected)
    if expected.ndim == 4:
        value = value[:, None].expand(-1, 2, -1, -1)
    torch.testing.assert_close(early @ value, expected @ value)


@pytest.mark.parametrize("looked", [False, True], ids=["unread", "read before"])
@pytest.mark.parametrize("which", [0, 1])
def test_an_input_written_to(attend, which, looked):
    tensors = inputs()
    attend(*tensors)
    expected = attend.attention_weights.dense().clone()
    attend(*tensors)
    handed_out = attend.attention_weights if looked else None
    tensors[which].mul_(2.0)
    if not isinstance(attend, DotProductAttention):  # the projections are of the module alone
        torch.testing.assert_close(attend.attention_weights.dense(), expected)
        return
    name = ("query", "key")[which]
    with pytest.raises(
        ch.ClearheadError, match=rf"{name} of the recorded call, shape .*modified in place.*(?s:.)*clone"
    ):
        _ = attend.attention_weights
    if handed_out is not None:
        for use in (lambda w: w.dense(), lambda w: w[0], lambda w: w @ tensors[2], lambda w: w.entropy()):
            with pytest.raises(ch.ClearheadError, match="modified in place"):
                use(handed_out)
    attend(*tensors)
    assert attend.attention_weights is not None  # a new call, a new record


def masks():
    """(what is written to, the mask that reads it, whether its spans say it all)"""
    keep = torch.ones(4, 5).bool()
    yield keep, keep, True
    yield keep, ch.DenseMask(keep), True
    yield keep, ~(ch.Lengths([3, 5]) & ch.DenseMask(keep)) | ch.Lengths([1, 1]), True
    holes = torch.tensor([1, 0, 1, 1, 1]).bool().expand(4, 5).clone()
    yield holes, holes, False
    yield holes, ch.MaskFunction(lambda b, h, i, j: holes[i, j]), False
    added = torch.zeros(4, 5)
    yield added, added, False


@pytest.mark.parametrize("case", range(6))
def test_a_mask_written_to(case):
    written, mask, spans_alone = list(masks())[case]
    query, key, value = inputs()
    attend = MultiHeadAttention(6, 2)
    attend(query, key, value, mask)
    expected = attend.attention_weights.dense()
    attend(query, key, value, mask)
    written.fill_(0)
    if spans_alone:
        torch.testing.assert_close(attend.attention_weights.dense(), expected)
        return
    with pytest.raises(ch.ClearheadError, match=r"the (mask|bias, or float mask,) of the recorded call"):
        _ = attend.attention_weights


def test_a_bias_written_to_or_trained():
    query, key, value = inputs()
    attend = MultiHeadAttention(6, 2)
    raw = torch.zeros(4, 5)
    attend(query, key, value, bias=raw)
    raw.add_(1)
    with pytest.raises(ch.ClearheadError, match="the bias, or float mask, of the recorded call"):
        _ = attend.attention_weights
    buffer = torch.zeros(4, 5)
    attend(query, key, value, bias=ch.DenseBias(buffer))
    buffer.add_(1)
    with pytest.raises(ch.ClearheadError, match="the bias, or float mask, of the recorded call"):
        _ = attend.attention_weights
    parameter = torch.nn.Parameter(torch.zeros(4, 5))
    for learnt in (ch.DenseBias(parameter), ch.DenseBias(parameter) + ch.ALiBi(2)):
        attend(query, key, value, bias=learnt, align="lower_right")
        expected = attend.attention_weights.dense()
        attend(query, key, value, bias=learnt, align="lower_right")
        with torch.no_grad():
            parameter.copy_(torch.randn(4, 5))
        torch.testing.assert_close(attend.attention_weights.dense(), expected)
    needs = torch.zeros(4, 5).requires_grad_()
    attend(query, key, value, bias=ch.DenseBias(needs * 1))
    assert not attend.attention_weights.dense().requires_grad


def test_inference_mode_copies_what_it_cannot_watch(attend):
    with torch.inference_mode():
        query, key, value = (t.clone() for t in inputs())
        attend(query, key, value)
        expected = attend.attention_weights.dense().clone()
        attend(query, key, value)
        query.zero_(), key.zero_()
    torch.testing.assert_close(attend.attention_weights.dense(), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_cache_goes_on(mode):
    attend, cache, x = MultiHeadAttention(6, 2).eval(), KeyValueCache(), torch.randn(1, 30, 6)
    with mode():
        whole = []
        for t in x.split(1, 1):
            attend(t, t, t, ch.Causal(), cache=cache)
            whole.append(attend.attention_weights)
        attend(x, x, x, ch.Causal())
        expected = attend.attention_weights.dense()
    for i, weights in enumerate(whole):  # looked at when the cache is long past
        torch.testing.assert_close(weights.dense()[0, :, 0], expected[0, :, i, : i + 1], atol=1e-6, rtol=1e-5)


def test_a_write_into_the_cache_is_noticed():
    attend, cache, x = MultiHeadAttention(6, 2).eval(), KeyValueCache(), torch.randn(1, 3, 6)
    with torch.inference_mode():
        attend(x, x, x, cache=cache)
        attend(x, x, x, cache=cache)
        key, _ = cache.append(torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 3))
        assert attend.attention_weights is not None
        key.zero_()
    with pytest.raises(ch.ClearheadError, match="the key of the recorded call"):
        _ = attend.attention_weights


def test_it_is_in_no_copy_and_no_state(attend):
    query, key, value = inputs()
    attend(query, key, value)
    names, size = set(attend.state_dict()), len(pickle.dumps(attend))
    attend(torch.randn(2, 4000, 6), key, value)
    assert attend.attention_weights is not None
    assert set(attend.state_dict()) == names and len(pickle.dumps(attend)) == size
    for other in (copy.deepcopy(attend), copy.copy(attend), pickle.loads(pickle.dumps(attend))):
        assert other.attention_weights is None
    assert attend.attention_weights.shape[-2] == 4000
    assert len(list(attend.modules())) == len(list(copy.deepcopy(attend).modules()))


def test_compiled_calls_are_not_recorded(attend):
    query, key, value = inputs()
    expected = attend(query, key, value)
    assert attend.attention_weights is not None
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(query, key, value), expected)
    assert attend.attention_weights is None
    attend(query, key, value)
    assert attend.attention_weights is not None


def test_it_keeps_no_matrix(attend):
    """What is kept of a long call is of the size of its inputs."""
    x = torch.randn(1, 3000, 6)
    attend(x, x, x)
    problem = attend.attention_weights.problem
    assert problem.value is None and problem.bias is None and problem.visible is None
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (problem.query, problem.key)}
    assert sum(kept.values()) <= 2 * x.numel() * 4


@pytest.mark.parametrize("kind", ["multi-head", "additive"])
def test_a_loss_on_the_weights_trains_where_their_graph_is_kept(kind):
    """Guided attention (Tachibana et al. 2018): weights far from the diagonal are penalised."""
    torch.manual_seed(0)
    made = {
        "multi-head": lambda **given: MultiHeadAttention(16, 2, **given),
        "additive": lambda **given: AdditiveAttention(16, **given),
    }[kind]
    x = torch.randn(2, 10, 16)
    place = torch.arange(10) / 10
    far = 1 - torch.exp(-((place[:, None] - place) ** 2) / 0.02)

    attend = made()
    attend(x, x, x)
    assert not attend.attention_weights[0].requires_grad and "detached" in repr(attend.attention_weights)

    attend = made(record_gradients=True)
    attend(x, x, x)
    assert "with gradients" in repr(attend.attention_weights)
    optimizer = torch.optim.Adam(attend.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        attend(x, x, x)
        loss = (attend.attention_weights[...] * far).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    if kind == "additive":  # its score reads the parameters, which the step has changed; the heads kept their queries
        with pytest.raises(ch.ClearheadError, match="modified in place"):
            attend.attention_weights[0]


def test_the_graph_is_kept_until_the_next_call():
    attend, x = DotProductAttention(record_gradients=True), torch.randn(1, 4, 8, requires_grad=True)
    hidden = x * 2
    kept = weakref.ref(hidden)
    attend(hidden, hidden, hidden)
    del hidden
    gc.collect()
    assert kept() is not None and attend.attention_weights[0].requires_grad
    attend(x, x, x)
    gc.collect()
    assert kept() is None
