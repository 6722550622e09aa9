"""record=False and set_recording: nothing of a call outlives it. Compiled code and transforms write no record."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from clearhead.nn import AdditiveAttention, DotProductAttention, MultiHeadAttention, TorchMultiheadAttention

pytestmark = pytest.mark.usefixtures("few_to_collect")

# each attention module with all parts that keep something between calls
MODULES = {
    "dot": DotProductAttention,
    "additive": lambda **given: AdditiveAttention(4, query_dim=8, key_dim=8, **given),
    "heads": lambda **given: MultiHeadAttention(8, 2, **given),
    "heads with options": lambda **given: MultiHeadAttention(
        8, 2, rotary=ch.nn.RotaryEmbedding(4), query_norm=nn.RMSNorm(4), sinks=True, gate="headwise", **given
    ),
    "heads with a score": lambda **given: MultiHeadAttention(8, 2, score=ch.Bilinear(4, 4), **given),
    "torch": lambda **given: TorchMultiheadAttention(8, 2, batch_first=True, **given),
}


@pytest.fixture(params=MODULES)
def make(request):
    torch.manual_seed(0)
    return MODULES[request.param]


def run(module, query, key, value):
    if isinstance(module, TorchMultiheadAttention):
        return module(query, key, value, need_weights=False)[0]
    return module(query, key, value, mask=ch.Causal())


def live():
    """The bytes of all tensors that something refers to, each storage once."""
    gc.collect()
    found = [one.untyped_storage() for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def draw(length=16):
    return [torch.randn(2, length, 8) for _ in range(3)]


@pytest.mark.parametrize("gradients", [False, True])
def test_nothing_of_a_call_outlives_it(make, gradients):
    module = make(record=False)
    run(module, *draw())  # the parts that are made at a first call
    before, inputs = live(), [tensor.requires_grad_(gradients) for tensor in draw()]
    held = [weakref.ref(tensor) for tensor in inputs]
    output = run(module, *inputs)
    if gradients:
        output.sum().backward()
        module.zero_grad()
    del inputs, output
    gc.collect()
    assert [one() for one in held] == [None] * 3
    assert live() == before
    with pytest.raises(ch.ClearheadError, match=r"record=False(.|\n)*set_recording"):
        _ = module.attention_weights


def test_checkpointed_layers_keep_what_plain_code_keeps():
    """Activation checkpoints keep each layer's input; the module adds nothing to it, neither then nor afterwards."""
    attend, x = [MultiHeadAttention(8, 2, record=False) for _ in range(4)], torch.randn(2, 64, 8)
    for one in attend:
        one(x, x, x, ch.Causal())
    before, y = live(), x
    for one in attend:
        layer = lambda y, one=one: y + one(y, y, y, ch.Causal())
        y = checkpoint(layer, y, use_reentrant=False, preserve_rng_state=False)
    assert live() - before == 4 * x.nbytes  # the inputs of layers 1 to 3, and the output
    y.sum().backward()
    del y
    for one in attend:
        one.zero_grad()
    assert live() == before


def test_it_is_switched_for_a_model_and_goes_with_copies():
    model = nn.ModuleList([make() for make in MODULES.values()] + [nn.Linear(2, 2)])
    inputs, names = draw(), set(model.state_dict())
    attend = list(model)[:-1]
    for one in attend:
        run(one, *inputs)
        assert one.record and one.attention_weights.shape[-2:] == (16, 16)
    kept = weakref.ref(attend[2].attention_weights)
    ch.nn.set_recording(model, False)
    gc.collect()
    assert kept() is None
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)]
    for one in (*attend, *(one for other in others for one in list(other)[:-1])):
        run(one, *inputs)
        assert one.record is False
        with pytest.raises(ch.ClearheadError, match="set_recording"):
            _ = one.attention_weights
    assert set(model.state_dict()) == names
    ch.nn.set_recording(model, True)
    for one in attend:
        with pytest.raises(ch.ClearheadError, match="no call of it was recorded"):
            _ = one.attention_weights
        run(one, *inputs)
        assert one.attention_weights is not None
    assert all(one.record is False for other in others for one in list(other)[:-1])


def test_recording_of_gradients_goes_on_where_it_was():
    attend, x = MultiHeadAttention(8, 2, record_gradients=True), torch.randn(1, 3, 8)
    ch.nn.set_recording(attend, False)
    attend(x, x, x)
    ch.nn.set_recording(attend, True)
    attend(x, x, x)
    assert attend.attention_weights[...].requires_grad
    attend.record = False  # the attribute itself, from the next call on
    attend(x, x, x)
    assert attend._last is None


def test_what_is_no_flag_and_no_model_is_an_error(make):
    for wrong in (lambda: make(record=1), lambda: ch.nn.set_recording(make(), "no"), lambda: ch.nn.set_recording(3)):
        with pytest.raises((ch.ClearheadError, TypeError)):
            wrong()
    with pytest.raises(ch.ClearheadError, match=r"record_gradients=True .* record=False"):
        make(record=False, record_gradients=True)


@pytest.mark.parametrize("called", [False, True], ids=["first compiled", "called before"])
def test_compiled_code_with_checkpoints(make, called):
    module, inputs = make(), [tensor.requires_grad_() for tensor in draw()]
    expected = torch.autograd.grad(run(copy.deepcopy(module), *inputs).sin().sum(), inputs)
    if called:
        run(module, *inputs)
    last, kept = module.__dict__.get("_last"), set(vars(module))
    block = lambda *inputs: checkpoint(lambda *inputs: run(module, *inputs), *inputs, use_reentrant=False)
    output = torch.compile(block, fullgraph=True, backend="aot_eager")(*inputs)
    found = torch.autograd.grad(output.sin().sum(), inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert module.__dict__.get("_last") is last and set(vars(module)) == kept


def test_switching_compiles_nothing_anew(make):
    module, inputs, compiled = make(), draw(), []

    def count(graph, _):
        compiled.append(graph)
        return graph

    step = torch.compile(module, fullgraph=True, backend=count)
    with torch.no_grad():
        for record in (True, False, True):
            ch.nn.set_recording(module, record)
            run(step, *inputs) if not isinstance(module, TorchMultiheadAttention) else step(*inputs, need_weights=False)
    assert len(compiled) == 1


@pytest.mark.parametrize(
    "transform", [torch.func.grad, torch.func.vmap, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))]
)
def test_transforms_write_nothing(make, transform):
    module, inputs = make(), draw()
    run(module, *inputs)
    before = module.attention_weights
    function = lambda query: run(module, query[None] if query.ndim < 3 else query, inputs[1], inputs[2]).sum()
    transform(function)(inputs[0])
    assert module.attention_weights is before


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_second_run_of_a_checkpoint_records_nothing(make, reentrant):
    module, inputs = make(), [tensor.requires_grad_() for tensor in draw()]
    output = checkpoint(lambda *inputs: run(module, *inputs), *inputs, use_reentrant=reentrant)
    first = module.attention_weights
    output.sum().backward()
    assert module.attention_weights is first
    ch.nn.set_recording(module, False)
    ch.nn.set_recording(module, True)
    output = checkpoint(lambda *inputs: run(module, *inputs), *inputs, use_reentrant=reentrant)
    ch.nn.set_recording(module, False)
    ch.nn.set_recording(module, True)
    output.sum().backward()
    with pytest.raises(ch.ClearheadError, match="no call of it was recorded"):
        _ = module.attention_weights
