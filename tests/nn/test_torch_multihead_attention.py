"""TorchMultiheadAttention against torch's own, alone and inside torch's Transformer layers, wherever they call it."""

import copy
import io
import itertools
import pickle
import warnings

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.nn import MultiHeadAttention, TorchMultiheadAttention

E, H, B, LQ, LK = 12, 4, 3, 5, 7
KINDS = {
    "plain": {},
    "without bias": {"bias": False},
    "other widths": {"kdim": 6, "vdim": 10},
    "other widths without bias": {"kdim": 6, "bias": False},
}
PADDING = torch.arange(LK) >= torch.tensor([3, LK, 1])[:, None]  # True: may not
torch.manual_seed(0)
NOT_ALLOWED = torch.rand(B * H, LQ, LK) > 0.6
NOT_ALLOWED[..., 0] = False
MASKS = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "float padding": {"key_padding_mask": torch.zeros(B, LK).masked_fill(PADDING, -torch.inf)},
    "added padding": {"key_padding_mask": torch.randn(B, LK)},
    "two dimensions": {"attn_mask": NOT_ALLOWED[0]},
    "three dimensions": {"attn_mask": NOT_ALLOWED},
    "added": {"attn_mask": torch.randn(B * H, LQ, LK)},
    "added and blocked": {"attn_mask": torch.randn(LQ, LK).masked_fill(NOT_ALLOWED[0], -torch.inf)},
    "both": {"attn_mask": NOT_ALLOWED, "key_padding_mask": PADDING},
    "both added": {"attn_mask": torch.randn(LQ, LK), "key_padding_mask": torch.randn(B, LK)},
    "a kind each": {
        "attn_mask": torch.randn(LQ, LK),
        "key_padding_mask": torch.zeros(B, LK).masked_fill(PADDING, -torch.inf),
    },
}


def theirs(kind="plain", **options):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, **{"batch_first": True} | KINDS[kind] | options)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "bias" in name:
                parameter.normal_()
    return module


def inputs(module, batched=True):
    torch.manual_seed(1)
    shapes = ((LQ, E), (LK, module.kdim), (LK, module.vdim))
    tensors = [torch.randn(B, *shape) for shape in shapes]
    if not batched:
        return [t[0] for t in tensors]
    return tensors if module.batch_first else [t.transpose(0, 1) for t in tensors]


def close(ours, expected, atol=1e-5):
    for one, other in zip(ours, expected, strict=True):
        if other is None:
            assert one is None
        else:
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_call_is_torchs(kind, batch_first, mask):
    module = theirs(kind, batch_first=batch_first)
    ours = TorchMultiheadAttention.from_torch(module)
    for need, average, grad in itertools.product((True, False), repeat=3):
        for each in (module, ours):
            each.train(grad)
        with torch.set_grad_enabled(grad):
            given = inputs(module), MASKS[mask] | {"need_weights": need, "average_attn_weights": average}
            close(ours(*given[0], **given[1]), module(*given[0], **given[1]))
    per_head = module(*inputs(module), **MASKS[mask], average_attn_weights=False)[1]
    torch.testing.assert_close(ours.attention_weights.dense(), per_head, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("batch_first", [True, False])
def test_without_a_batch(batch_first):
    module = theirs(batch_first=batch_first)
    ours = TorchMultiheadAttention.from_torch(module)
    given = inputs(module, batched=False)
    for masks in (
        {},
        {"key_padding_mask": PADDING[0]},
        {"attn_mask": NOT_ALLOWED[0]},
        {"attn_mask": NOT_ALLOWED[:H], "key_padding_mask": PADDING[0]},
    ):
        for average in (True, False):
            close(
                ours(*given, **masks, average_attn_weights=average),
                module(*given, **masks, average_attn_weights=average),
            )


def test_is_causal_is_a_hint():
    module = theirs()
    ours = TorchMultiheadAttention.from_torch(module)
    x = inputs(module)[0]
    causal = nn.Transformer.generate_square_subsequent_mask(LQ)
    for mask, need, padding in itertools.product((causal, causal.isinf()), (True, False), (None, PADDING[:, :LQ])):
        options = {"attn_mask": mask, "is_causal": True, "need_weights": need, "key_padding_mask": padding}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            close(ours(x, x, x, **options), module(x, x, x, **options))
    ours(x, x, x, attn_mask=causal, is_causal=True, need_weights=False)
    assert "Causal" in repr(ours.attention_weights)
    with pytest.raises(ch.ClearheadError, match=r"attn_mask, which is None.*\n?.*generate_square"):
        ours(x, x, x, is_causal=True)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_torchs(kind):
    module = theirs(kind)
    ours = TorchMultiheadAttention.from_torch(module)
    found = []
    for each in (module, ours):
        tensors = [t.requires_grad_() for t in inputs(module)]
        output, weights = each(*tensors, key_padding_mask=PADDING)
        (output.square().sum() + weights.square().sum()).backward()
        found.append([t.grad for t in tensors] + [p.grad for p in each.parameters()])
    close(found[1], found[0], atol=1e-4)
    learnt = torch.randn(LQ, LK, requires_grad=True)
    gradients = []
    for each in (module, ours):
        each(*inputs(module), attn_mask=learnt)[0].square().sum().backward()
        gradients.append(learnt.grad.clone())
        learnt.grad = None
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_a_query_that_sees_nothing():
    module = theirs()
    ours = TorchMultiheadAttention.from_torch(module)
    nothing = torch.ones(B, LK, dtype=torch.bool)
    output, weights = ours(*inputs(module), key_padding_mask=nothing)
    torch.testing.assert_close(output, module.out_proj.bias.expand_as(output))
    assert (weights == 0).all()
    close(
        ours(*inputs(module), key_padding_mask=nothing, need_weights=False),
        module(*inputs(module), key_padding_mask=nothing, need_weights=False),
    )


def test_dropout_is_for_training():
    ours = TorchMultiheadAttention.from_torch(theirs(dropout=0.5))
    tensors = inputs(ours)
    outputs = [ours(*tensors)[0] for _ in range(300)]
    expected = ours.eval()(*tensors)[0]
    assert (outputs[0] - outputs[1]).abs().max() > 0.01
    mean, spread = torch.stack(outputs).mean(0), torch.stack(outputs).std(0)
    assert ((mean - expected).abs() < 5 * spread / 300**0.5).all()


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_load_either_way(kind):
    module = theirs(kind)
    ours = TorchMultiheadAttention(E, H, batch_first=True, **KINDS[kind])
    ours.load_state_dict(module.state_dict(), strict=True)
    close(ours(*inputs(module)), module(*inputs(module)))
    fresh = nn.MultiheadAttention(E, H, batch_first=True, **KINDS[kind])
    buffer = io.BytesIO()
    torch.save(ours.state_dict(), buffer)
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer), strict=True)
    close(fresh(*inputs(module)), module(*inputs(module)))


def test_what_from_torch_carries():
    module = theirs(dropout=0.3, batch_first=False).double().eval()
    module.in_proj_weight.requires_grad_(False)
    state = torch.get_rng_state()
    ours = TorchMultiheadAttention.from_torch(module, record_gradients=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert (ours.dropout, ours.batch_first, ours.training, ours.record_gradients) == (0.3, False, False, True)
    assert not ours.in_proj_weight.requires_grad and ours.in_proj_bias.requires_grad
    assert ours.out_proj.weight.dtype == torch.float64
    pointers = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert not pointers & {p.untyped_storage().data_ptr() for p in ours.parameters()}
    assert isinstance(ours, nn.MultiheadAttention)  # what looks for attention in a model finds it
    assert isinstance(MultiHeadAttention.from_torch(ours), MultiHeadAttention)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies(how):
    ours = TorchMultiheadAttention.from_torch(theirs())
    expected = ours(*inputs(ours))
    other = how(ours)
    assert ours.attention_weights is not None
    with pytest.raises(ch.ClearheadError, match="no call of it was recorded"):
        _ = other.attention_weights
    close(other(*inputs(ours)), expected)
    assert len(other._forward_pre_hooks) == 1


def test_record_gradients():
    ours = TorchMultiheadAttention(E, H, batch_first=True, record_gradients=True)
    ours(*inputs(ours), need_weights=False)
    ours.attention_weights[...].square().sum().backward()
    assert ours.in_proj_weight.grad.abs().sum() > 0
    plain = TorchMultiheadAttention(E, H, batch_first=True)
    plain(*inputs(ours))
    assert not plain.attention_weights[...].requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    module = theirs()
    exact = module(*inputs(module), key_padding_mask=PADDING)
    ours = TorchMultiheadAttention.from_torch(module.to(dtype))
    found = ours(*(t.to(dtype) for t in inputs(module)), key_padding_mask=PADDING)
    assert all(t.dtype == dtype for t in found)
    close([t.float() for t in found], exact, atol=0.03)


@pytest.mark.parametrize("mask", MASKS)
def test_autocast(mask):
    module = theirs()
    ours = TorchMultiheadAttention.from_torch(module)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (each(*inputs(module), **MASKS[mask]) for each in (ours, module))
    assert found[0].dtype == expected[0].dtype
    close([t.float() for t in found], [t.float() for t in expected], atol=0.03)


@pytest.mark.parametrize(
    ("mask", "need"),
    [("none", True), ("added and blocked", False), ("both", True)],
)
def test_compiled(mask, need):
    ours = TorchMultiheadAttention.from_torch(theirs())
    expected = ours(*inputs(ours), **MASKS[mask], need_weights=need)
    before = ours.attention_weights
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    close(compiled(*inputs(ours), **MASKS[mask], need_weights=need), expected)
    exported = torch.export.export(ours, tuple(inputs(ours)), MASKS[mask] | {"need_weights": need}).module()
    close(exported(*inputs(ours), **MASKS[mask], need_weights=need), expected)
    assert ours.attention_weights is before


# Inside torch's layers


def swapped(model):
    """A copy whose attention is clearhead's."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.MultiheadAttention:
                setattr(module, name, TorchMultiheadAttention.from_torch(child))
    assert any(isinstance(m, TorchMultiheadAttention) for m in model.modules())
    return model


def randomised(model):
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_(std=0.3)
    return model


LAYER = {"dim_feedforward": 20, "dropout": 0.0}
CAUSAL = nn.Transformer.generate_square_subsequent_mask(LK)
SOURCE_MASKS = {
    "none": {},
    "padding": {"src_key_padding_mask": PADDING},
    "padding with holes": {"src_key_padding_mask": torch.tensor([[0, 1, 0, 0, 1, 0, 0]] * B).bool()},
    "causal": {"mask": CAUSAL},
    "causal and said": {"mask": CAUSAL, "is_causal": True},
    "bool": {"mask": NOT_ALLOWED[0, :1].expand(LK, LK)},
    "causal and padding": {"mask": CAUSAL.isinf(), "src_key_padding_mask": PADDING},
}
MODES = {"training": (True, True), "evaluation with gradients": (False, True), "evaluation": (False, False)}


@pytest.mark.filterwarnings("ignore:.*nested tensor:UserWarning", "ignore:enable_nested_tensor:UserWarning")
@pytest.mark.parametrize("mask", SOURCE_MASKS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [True, False])
def test_encoders(batch_first, norm_first, mode, mask):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, batch_first=batch_first, norm_first=norm_first, **LAYER)
    encoder = randomised(nn.TransformerEncoder(layer, 2))
    ours, (training, grad) = swapped(encoder), MODES[mode]
    x = torch.randn(B, LK, E)
    x = x if batch_first else x.transpose(0, 1)
    options = SOURCE_MASKS[mask]
    with torch.set_grad_enabled(grad):
        expected, found = (each.train(training)(x, **options) for each in (encoder, ours))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    attention = ours.layers[1].self_attn
    assert attention.attention_weights.shape[:2] == (B, H)  # the fused path would call no module
    if mask in ("padding", "causal and padding"):
        assert (attention.attention_weights.received()[0, :, 3:] == 0).all()
    one, other = (each.layers[0].train(training) for each in (encoder, ours))
    given = {"src_mask" if name == "mask" else name: value for name, value in options.items()}
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(other(x, **given), one(x, **given), atol=1e-5, rtol=1e-5)
    built = [nn.TransformerEncoder(each, 1).train(training) for each in (one, other)]  # which copies the layer
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(built[1](x, **options), built[0](x, **options), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [True, False])
def test_decoders(batch_first, norm_first, mode):
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(E, H, batch_first=batch_first, norm_first=norm_first, **LAYER)
    decoder = randomised(nn.TransformerDecoder(layer, 2))
    ours, (training, grad) = swapped(decoder), MODES[mode]
    x, memory = torch.randn(B, LQ, E), torch.randn(B, LK, E)
    given = (x, memory) if batch_first else (x.transpose(0, 1), memory.transpose(0, 1))
    causal = nn.Transformer.generate_square_subsequent_mask(LQ)
    for options in (
        {},
        {"tgt_mask": causal},
        {"tgt_mask": causal, "tgt_is_causal": True, "memory_key_padding_mask": PADDING},
        {"tgt_mask": causal.isinf(), "tgt_key_padding_mask": PADDING[:, :LQ], "memory_mask": NOT_ALLOWED[0]},
    ):
        with torch.set_grad_enabled(grad):
            expected, found = (each.train(training)(*given, **options) for each in (decoder, ours))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert ours.layers[1].multihead_attn.attention_weights.shape == (B, H, LQ, LK)


@pytest.mark.filterwarnings("ignore:.*nested tensor:UserWarning", "ignore:enable_nested_tensor:UserWarning")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm_first", [False, True])
def test_transformers(norm_first, mode):
    torch.manual_seed(0)
    model = randomised(nn.Transformer(E, H, 2, 2, batch_first=True, norm_first=norm_first, **LAYER))
    ours, (training, grad) = swapped(model), MODES[mode]
    source, target = torch.randn(B, LK, E), torch.randn(B, LQ, E)
    options = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(LQ),
        "src_key_padding_mask": PADDING,
        "memory_key_padding_mask": PADDING,
        "tgt_is_causal": True,
    }
    with torch.set_grad_enabled(grad):
        expected, found = (each.train(training)(source, target, **options) for each in (model, ours))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    ours.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(ours.state_dict(), strict=True)


def test_training_a_layer_is_torchs():
    torch.manual_seed(0)
    layer = randomised(nn.TransformerEncoderLayer(E, H, batch_first=True, **LAYER))
    ours, x = swapped(layer), torch.randn(B, LK, E)
    for each in (layer, ours):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.05)
        for _ in range(5):
            optimizer.zero_grad()
            each(x, src_key_padding_mask=PADDING).square().mean().backward()
            optimizer.step()
    for (name, one), (_, other) in zip(layer.named_parameters(), ours.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_a_watched_decoder():
    layer = nn.TransformerDecoderLayer(E, H, batch_first=True, **LAYER).eval()
    x, memory = torch.randn(B, LK, E), torch.randn(B, LK, E)
    records = []
    for model in (layer, swapped(layer)):
        with torch.no_grad(), ch.watch(model) as seen:
            model(x, memory, memory_key_padding_mask=PADDING)
        records.append(seen.calls)
    assert [(c.name, c.kind) for c in records[0]] == [(c.name, c.kind) for c in records[1]]
    for theirs_, ours in zip(*records, strict=True):
        torch.testing.assert_close(ours.weights.dense(), theirs_.weights.dense(), atol=1e-6, rtol=1e-5)


WRONG = {
    "heads": (lambda: TorchMultiheadAttention(5, 6), ch.ClearheadError, ["embed_dim is 5", "MultiHeadAttention(5, 6"]),
    "bias_kv": (lambda: TorchMultiheadAttention(4, 2, add_bias_kv=True), ch.UnsupportedError, ["add_bias_kv"]),
    "a mask of ours": (lambda m, *x: m(*x, attn_mask=ch.Causal()), ch.ClearheadError, ["Causal", "MultiHeadAttention"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name):
    call, kind, says = WRONG[name]
    module = TorchMultiheadAttention.from_torch(theirs())
    with pytest.raises(kind) as caught:
        call(module, *inputs(module)) if call.__code__.co_argcount else call()
    assert all(word in str(caught.value) for word in says), caught.value
