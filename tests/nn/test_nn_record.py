"""attention_weights: the weights of the last call as it was, or an error; never others."""

import copy
import gc
import pickle
import sys
import threading
import weakref

import numpy as np
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


def test_weights_are_listed_once_there_are_some(attend):
    assert "attention_weights" not in dir(attend)
    attend(*inputs())
    assert "attention_weights" in dir(attend)
    attend.record = False
    assert "attention_weights" not in dir(attend)


def test_nothing_before_a_call_then_the_last_call(attend):
    with pytest.raises(ch.ClearheadError, match="no call of it was recorded"):
        _ = attend.attention_weights
    query, key, value = inputs()
    attend(query, key, value)
    attend(query, key, value, valid_lens=[1, 3])
    weights = attend.attention_weights
    assert isinstance(weights, ch.results.Weights) and weights is attend.attention_weights
    assert weights.shape[-2:] == (4, 5)
    assert (weights.received()[0, ..., 1:] == 0).all() and (weights.received()[1, ..., :3] > 0).all()
    attend(query, key[:, :2], value[:, :2])
    assert attend.attention_weights.shape[-2:] == (4, 2)
    assert weights.shape[-2:] == (4, 5)


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
        with pytest.raises(ch.ClearheadError, match="no call of it was recorded"):
            _ = other.attention_weights
    assert attend.attention_weights.shape[-2] == 4000
    assert len(list(attend.modules())) == len(list(copy.deepcopy(attend).modules()))


def test_compiled_calls_are_not_recorded(attend):
    query, key, value = inputs()
    expected = attend(query, key, value)
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    before = attend.attention_weights
    torch.testing.assert_close(compiled(query, key, value), expected)
    assert attend.attention_weights is before


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
    assert not attend.attention_weights[:].requires_grad and "detached" in repr(attend.attention_weights)

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
    assert kept() is not None and attend.attention_weights[:].requires_grad
    attend(x, x, x)
    gc.collect()
    assert kept() is None


def test_what_a_mask_caches_in_itself_is_no_change_of_it():
    attend, (query, key, value) = MultiHeadAttention(6, 2, record_gradients=True), inputs()
    keep = torch.ones(4, 5, dtype=torch.bool).tril()
    attend(query, key, value, keep, valid_lens=[5, 3])
    expected = attend.attention_weights.dense()
    torch.testing.assert_close(attend.attention_weights.dense(), expected)


@pytest.mark.parametrize("gradients", [False, True], ids=["detached", "with gradients"])
@pytest.mark.parametrize("where", ["mask", "float mask", "bias"])
@pytest.mark.parametrize("heads", [False, True])
def test_arrays_beside_tensors_are_copied(where, heads, gradients):
    if where == "bias" or heads:
        attend = MultiHeadAttention(6, 2, record_gradients=gradients)
    else:
        attend = DotProductAttention(record_gradients=gradients)
    array = np.ones((4, 5), dtype=np.float32)
    array[0, 2] = 0
    array = array.astype(bool) if where == "mask" else array * 2
    query, key, value = inputs()
    for look in (True, False):  # the second call is looked at after the write
        attend(query, key, value, **{where.split()[-1]: array})
        if look:
            expected = attend.attention_weights.dense()
    array[:] = 0
    array[:, 0] = 1
    torch.testing.assert_close(attend.attention_weights.dense(), expected)


@pytest.mark.parametrize("which", [0, 1])
def test_one_input_of_inference_mode(which):
    attend, tensors = DotProductAttention(), inputs()
    with torch.inference_mode():
        tensors[which] = tensors[which].clone()
    with torch.no_grad():
        attend(*tensors)
        expected = attend.attention_weights.dense()
        attend(*tensors)
    with torch.inference_mode():
        tensors[which].mul_(3.0)
    torch.testing.assert_close(attend.attention_weights.dense(), expected)


def test_threads_that_call_and_read_one_module():
    attend, wrong = MultiHeadAttention(6, 2).eval(), []

    def work(length):
        x = torch.randn(1, length, 6)
        for _ in range(300):
            with torch.no_grad():
                attend(x, x, x)
            weights = attend.attention_weights
            if not isinstance(weights, ch.results.Weights) or weights.shape[-1] not in (3, 4, 5, 6):
                wrong.append(weights)

    threads = [threading.Thread(target=work, args=(length,)) for length in (3, 4, 5, 6)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        [thread.start() for thread in threads], [thread.join() for thread in threads]
    finally:
        sys.setswitchinterval(before)
    assert not wrong


def test_copies_of_the_weights(attend):
    query, key, value = inputs()
    attend(query, key, value)
    weights = attend.attention_weights
    for other in (copy.deepcopy(weights), pickle.loads(pickle.dumps(weights))):
        assert torch.equal(other.dense(), weights.dense())
        with torch.no_grad():
            other.problem.key.zero_()
        with pytest.raises(ch.ClearheadError, match="modified in place"):
            other.dense()
    if isinstance(attend, DotProductAttention):
        query.add_(1)
        with pytest.raises(ch.ClearheadError, match="modified in place"):
            copy.deepcopy(weights).dense()


@pytest.mark.parametrize("at_call", [False, True])
def test_autocast_at_the_call_or_at_the_look(attend, at_call):
    query, key, value = inputs()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=at_call):
        attend(query, key, value)
    weights = attend.attention_weights
    value = value if len(weights.shape) == 3 else value[:, None].expand(-1, 2, -1, -1)
    expected = weights.dense() @ value
    with torch.autocast("cpu", torch.bfloat16, enabled=not at_call):
        torch.testing.assert_close(weights @ value, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(weights.reduce(ch.reductions.Output(value)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.load_state_dict({name: 2 * t for name, t in m.state_dict().items()}, assign=True),
        lambda m: [setattr(p, "data", p.data * 2) for p in m.parameters()],
        lambda m: m.score.register_parameter("weight", torch.nn.Parameter(torch.randn(3, 3))),
        lambda m: setattr(m.score, "softcap", 0.1),
    ],
    ids=["assigned", "other memory", "another parameter", "softcap"],
)
@pytest.mark.parametrize("gradients", [False, True], ids=["detached", "with gradients"])
def test_what_takes_the_place_of_a_parameter(change, gradients):
    attend = MultiHeadAttention(6, 2, score=ch.Bilinear(3, 3), record_gradients=gradients)
    attend(*inputs())
    weights, expected = attend.attention_weights, attend.attention_weights.dense().detach()
    change(attend)
    if gradients:
        for look in (lambda: attend.attention_weights, weights.dense):
            with pytest.raises(ch.ClearheadError, match="recorded call"):
                look()
    else:
        torch.testing.assert_close(weights.dense(), expected)


def test_the_mode_of_a_recorded_call_stays():
    class Dropped(ch.extend.Score):
        def __init__(self):
            super().__init__()
            self.drop = torch.nn.Dropout(0.5)

        def tile(self, query, key):
            return self.drop(query @ key.mT)

    for gradients in (False, True):
        attend = MultiHeadAttention(6, 2, score=Dropped(), record_gradients=gradients).eval()
        attend(*inputs())
        expected = attend.attention_weights.dense()
        if not gradients:
            attend.train()
        torch.testing.assert_close(attend.attention_weights.dense(), expected)


def test_a_mask_that_is_spans_is_let_go():
    attend, (query, key, value) = MultiHeadAttention(6, 2), inputs()
    for make in (lambda keep: keep, ch.DenseMask):
        keep = torch.ones(4, 5).tril().bool()
        kept = weakref.ref(keep)
        attend(query, key, value, make(keep), valid_lens=[3, 5])
        del keep
        gc.collect()
        assert kept() is None and "mask=" in repr(attend.attention_weights)


def test_gradients_to_a_value_beside_a_record_of_inference_mode(attend):
    with torch.inference_mode():
        attend(*inputs())
    weights = attend.attention_weights
    value = torch.randn(*weights.shape[:-2], 5, 3, requires_grad=True)
    (weights @ value).sum().backward()
    torch.testing.assert_close(value.grad[..., 0], weights.received())


@pytest.mark.parametrize("gradients", [False, True], ids=["detached", "with gradients"])
def test_a_call_under_autocast_read_outside_of_it(gradients):
    attend = MultiHeadAttention(6, 2, score=ch.Additive(3, 3, 4), record_gradients=gradients)
    query, key, value = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        attend(query, key, value)
        inside = attend.attention_weights.dense()
    weights = attend.attention_weights
    torch.testing.assert_close(weights.dense(), inside)
    assert weights.dense().requires_grad == gradients
    value = value[:, None].expand(-1, 2, -1, -1).double()
    torch.testing.assert_close((weights @ value).float(), weights.dense() @ value.float(), atol=1e-5, rtol=1e-5)


def test_a_tensor_of_inference_mode_in_a_call_that_keeps_its_graph():
    attend, (query, key, value) = DotProductAttention(record_gradients=True), inputs()
    with torch.inference_mode():
        query = query.clone()
    attend(query, key, value)
    expected = attend.attention_weights.dense()
    with torch.inference_mode():
        query.zero_()
    torch.testing.assert_close(attend.attention_weights.dense(), expected)
    attend = MultiHeadAttention(6, 2, score=ch.Additive(3, 3, 4), record_gradients=True)
    with torch.inference_mode():
        attend(*inputs())
    (attend.attention_weights @ torch.randn(2, 2, 5, 3, requires_grad=True)).sum().backward()
    attend.score.W_q.data = 3 * attend.score.W_q.data
    with pytest.raises(ch.ClearheadError, match="recorded call"):
        attend.attention_weights.dense()
