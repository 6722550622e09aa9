"""torch.nn.MultiheadAttention and the Transformer layers: their outputs stay, and records equal their own weights."""

import itertools

import pytest
import torch
from drawn import draw
from torch import nn
from torch.utils.checkpoint import checkpoint

import clearhead as ch

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested")

PADDING = torch.tensor([[0] * 6, [0, 0, 0, 0, 1, 1]]).bool()  # True: padding
CAUSAL = torch.ones(6, 6).triu(1).bool()  # True: not allowed


def float_mask(mask):
    return torch.zeros(mask.shape).masked_fill(mask, -torch.inf)


def multihead(seed=0, **options):
    torch.manual_seed(seed)
    module = nn.MultiheadAttention(16, 4, **options).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    return module


BY_HEAD = (draw(8, 6, 6, seed=3) > 0.5) & ~torch.eye(6, dtype=torch.bool)
MASKS = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "float padding": {"key_padding_mask": float_mask(PADDING)},
    "padding that adds": {"key_padding_mask": draw(2, 6, seed=4)},
    "causal": {"attn_mask": CAUSAL},
    "causal, hinted": {"attn_mask": CAUSAL, "is_causal": True},
    "float causal": {"attn_mask": float_mask(CAUSAL)},
    "bias": {"attn_mask": draw(6, 6, seed=5)},
    "a mask a head": {"attn_mask": BY_HEAD},
    "a bias a head": {"attn_mask": draw(8, 6, 6, seed=6)},
    "causal and padding": {"attn_mask": CAUSAL, "key_padding_mask": PADDING},
    "causal, hinted, and padding": {"attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": PADDING},
    "bias and padding that adds": {"attn_mask": draw(6, 6, seed=5), "key_padding_mask": draw(2, 6, seed=4)},
}
MODULES = {
    "batch first": {"batch_first": True},
    "sequence first": {},
    "no bias": {"batch_first": True, "bias": False},
    "a learnt key": {"batch_first": True, "add_bias_kv": True},
    "a key of zeros": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
}


def check(module, *inputs, **options):
    """Watching changes no output; the one record has the module's own weights."""
    for need_weights, grad, training in itertools.product((True, False), (True, False), (True, False)):
        module.train(training)
        with torch.set_grad_enabled(grad):
            plain = module(*inputs, need_weights=need_weights, **options)[0]
            with ch.watch(module) as seen:
                watched = module(*inputs, need_weights=need_weights, **options)[0]
        assert torch.equal(plain, watched) and plain.requires_grad == watched.requires_grad
        (call,) = seen.calls
        weights = module(*inputs, need_weights=True, average_attn_weights=False, **options)[1]
        recorded = call.weights.dense()
        if "is_causal" in options and "key_padding_mask" not in options and recorded.shape[-1] > 6 and not need_weights:
            assert (recorded[..., 6:] == 0).all()  # the kernel's flag hides the keys that the module adds
            continue
        torch.testing.assert_close(recorded if weights.ndim == 4 else recorded[0], weights, atol=1e-5, rtol=0)
        assert call.name == "MultiheadAttention" and not call.query.requires_grad and not call.key.requires_grad
    return call


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("kind", MODULES)
def test_multihead_attention(kind, masks):
    x = draw(2, 6, 16) if MODULES[kind].get("batch_first") else draw(6, 2, 16)
    call = check(multihead(**MODULES[kind]), x, x, x, **MASKS[masks])
    assert call.kind == "self" and call.query.shape == (2, 4, 6, 4)


@pytest.mark.parametrize("batch_first", [True, False])
def test_cross_attention_with_other_widths(batch_first):
    module = multihead(kdim=10, vdim=12, batch_first=batch_first)
    query, key, value = draw(2, 6, 16), draw(2, 5, 10, seed=1), draw(2, 5, 12, seed=2)
    inputs = [t if batch_first else t.transpose(0, 1) for t in (query, key, value)]
    call = check(module, *inputs, key_padding_mask=torch.tensor([[0] * 5, [0, 0, 1, 1, 1]]).bool())
    assert call.kind == "cross" and call.weights.shape == (2, 4, 6, 5)
    module = multihead(batch_first=batch_first)
    same = inputs[0]
    assert check(module, same, same, same * 2).kind == "self"
    assert check(module, same, same * 2, same).kind == "cross"


def test_weights_that_are_computed_and_the_function_called_without_the_module():
    module, x = multihead(), draw(6, 2, 16)
    nn.utils.parametrizations.weight_norm(module, "in_proj_weight")
    with ch.watch(nn.Sequential(module)) as seen:
        own = module(x, x, x, average_attn_weights=False)[1]
    assert seen.names == ["0"]
    torch.testing.assert_close(seen.calls[0].weights.dense(), own, atol=1e-5, rtol=0)

    class Pool(nn.Module):  # as in CLIP's ResNet: the mean looks at every place
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

        def forward(self, x, need_weights=False):
            biases = torch.cat([self.q.bias, self.k.bias, self.v.bias])
            rest = None, biases, None, None, False, 0.0, self.out.weight, self.out.bias
            projections = {f"{name}_proj_weight": getattr(self, name).weight for name in "qkv"}
            options = {"use_separate_proj_weight": True, "average_attn_weights": False, "need_weights": need_weights}
            query = x.mean(0, keepdim=True)
            return nn.functional.multi_head_attention_forward(query, x, x, 16, 4, *rest, **projections, **options)

    pool = Pool()
    with ch.watch(pool) as seen:
        pool(x)
    assert seen.calls[0].kind == "cross" and seen.names == ["Pool"]
    torch.testing.assert_close(seen.calls[0].weights.dense(), pool(x, True)[1], atol=1e-5, rtol=0)


def test_unbatched():
    x, padding = draw(6, 16), PADDING[1]
    assert check(multihead(batch_first=True), x, x, x, key_padding_mask=padding).query.shape == (1, 4, 6, 4)
    check(multihead(), x, x, x, attn_mask=BY_HEAD[:4])


def test_the_masks_of_the_modules_become_intervals():
    module, x = multihead(batch_first=True), draw(2, 6, 16)
    with torch.no_grad(), ch.watch(module) as seen:
        module(x, x, x, key_padding_mask=PADDING)
        module(x, x, x, key_padding_mask=float_mask(PADDING))
        module(x, x, x, attn_mask=CAUSAL)
    assert [type(call.mask).__name__ for call in seen.calls] == ["Intervals"] * 3
    assert all(call.problem.bias is None for call in seen.calls) and seen.calls[0].mask is seen.calls[1].mask


def encoder(depth=2, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, **{"batch_first": True, "dropout": 0.1, **options})
    model = nn.TransformerEncoder(layer, depth).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5)
    return model


def own_weights(model, x, mask, padding):
    """Each layer's need_weights=True weights, on the path without nested tensors."""
    found, layers = [], model.layers
    for layer in layers:
        inside = layer.norm1(x) if layer.norm_first else x
        options = {"attn_mask": mask, "key_padding_mask": padding, "average_attn_weights": False}
        found.append(layer.self_attn(inside, inside, inside, **options)[1])
        x = layer(x, mask, padding)
    return found


@pytest.mark.parametrize("padding", [None, PADDING, PADDING.flip(1)], ids=["no padding", "right", "left"])
@pytest.mark.parametrize("mask", [None, CAUSAL, BY_HEAD], ids=["no mask", "causal", "by head"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_transformer_encoder(batch_first, norm_first, mask, padding):
    model = encoder(batch_first=batch_first, norm_first=norm_first)
    x = draw(2, 6, 16) if batch_first else draw(6, 2, 16)
    own = own_weights(model, x, mask, padding)
    for grad, training in itertools.product((False, True), (False, True)):
        model.train(training)
        with torch.set_grad_enabled(grad):
            torch.manual_seed(1)  # of the dropout
            plain = model(x, mask, padding)
            torch.manual_seed(1)
            with ch.watch(model) as seen:
                watched = model(x, mask, padding)
        assert torch.equal(plain.nan_to_num(7), watched.nan_to_num(7)), "watching changed the output"
        assert [call.name for call in seen.calls] == ["layers.0.self_attn", "layers.1.self_attn"]
        fast = batch_first and not grad and not training
        assert {"fwd" in call.backend for call in seen.calls} == {fast}
        assert {call.kind for call in seen.calls} == {"self"}
        if training:
            continue
        for call, weights in zip(seen.calls, own, strict=True):
            recorded, rows = call.weights.dense(), torch.ones(2, 4, 6, dtype=torch.bool)
            if type(call.mask) is ch.Lengths:  # nested: what is padding was not computed
                rows = ~PADDING[:, None].expand(2, 4, 6)
                assert (recorded[~rows] == 0).all()
            rows = rows & ~weights.isnan().any(-1)  # that see nothing
            assert rows.sum() > 24
            torch.testing.assert_close(recorded[rows], weights[rows], atol=1e-5, rtol=0)


def test_padded_batches_stay_nested_and_their_outputs_zero_at_padding():
    model, x = encoder(), draw(2, 6, 16)
    with torch.no_grad(), ch.watch(model) as seen:
        output = model(x, src_key_padding_mask=PADDING)
    assert (output[1, 4:] == 0).all() and all(isinstance(call.mask, ch.Lengths) for call in seen.calls)
    assert seen.calls[0].weights[1, 0].shape == (6, 6)
    torch.testing.assert_close(seen.calls[0].weights[1, 0].sum(-1), torch.tensor([1.0, 1, 1, 1, 0, 0]))


def test_a_layer_given_a_nested_tensor():
    layer = encoder(1, norm_first=True).layers[0]
    rows = [draw(6, 16), draw(4, 16, seed=1)]
    with torch.no_grad(), ch.watch(layer) as seen:
        layer(torch.nested.nested_tensor(rows))
    for row, got in zip(rows, seen.calls[0].weights.dense(), strict=True):
        x = layer.norm1(row)
        want = layer.self_attn(x, x, x, average_attn_weights=False)[1]
        torch.testing.assert_close(got[:, : len(row), : len(row)], want, atol=1e-5, rtol=0)


def test_the_fast_path_takes_a_float_mask_for_a_bool_one_and_so_does_its_record():
    # torch.nn.TransformerEncoderLayer, in eval and without gradients: what is not 0 is not allowed
    layer, x = encoder(1).layers[0], draw(2, 6, 16)
    bias = torch.zeros(6, 6)
    bias[0, 1] = -0.5
    with torch.no_grad(), ch.watch(layer) as seen:
        biased = layer(x, bias)
        blocked = layer(x, bias != 0)
    assert torch.equal(biased, blocked)
    assert seen.calls[0].weights[0, 0, 0, 1] == 0 and seen.calls[0].problem.bias is None
    with ch.watch(layer) as seen:
        layer(x, bias)
    assert seen.calls[0].weights[0, 0, 0, 1] > 0 and seen.calls[0].problem.bias is not None


def test_transformer_decoder_and_whole_transformer():
    torch.manual_seed(0)
    model = nn.Transformer(16, 4, 1, 2, 32, dropout=0.0, batch_first=True).eval()
    source, target = draw(2, 6, 16), draw(2, 5, 16, seed=1)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    inputs = {"tgt_mask": mask, "src_key_padding_mask": PADDING, "memory_key_padding_mask": PADDING}
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            plain = model(source, target, **inputs)
            with ch.watch(model) as seen:
                watched = model(source, target, **inputs)
        assert torch.equal(plain, watched)
        names = [name.removesuffix("_attn").removesuffix("head") for name in seen.names]
        assert names == ["encoder.layers.0.self"] + [
            f"decoder.layers.{i}.{k}" for i in (0, 1) for k in ("self", "multi")
        ]
        assert [call.kind for call in seen.calls] == ["self", "self", "cross", "self", "cross"]
        cross = seen["decoder.layers.0.multihead_attn"][0]
        assert cross.weights.shape == (2, 4, 5, 6) and (cross.weights[1, :, :, 4:] == 0).all()
    layer = model.decoder.layers[0]
    memory = model.encoder(source, src_key_padding_mask=PADDING)
    x = layer.self_attn(target, target, target, attn_mask=mask, average_attn_weights=False)
    torch.testing.assert_close(seen.calls[1].weights.dense(), x[1], atol=1e-5, rtol=0)
    x = layer.norm1(target + x[0])
    own = layer.multihead_attn(x, memory, memory, key_padding_mask=PADDING, average_attn_weights=False)[1]
    torch.testing.assert_close(cross.weights.dense(), own, atol=1e-5, rtol=0)


def test_a_query_that_may_see_nothing_has_weights_0():
    layer, x = encoder(1).layers[0], draw(2, 6, 16)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), ch.watch(layer) as seen:
            layer(x, src_key_padding_mask=torch.ones(2, 6, dtype=torch.bool))
        assert (seen.calls[0].weights.dense() == 0).all()


def test_autocast_and_gradients():
    module, x = multihead(batch_first=True).train(), draw(2, 6, 16)
    gradients = []
    for watched in (False, True):
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            if watched:
                with ch.watch(module) as seen:
                    output = module(x, x, x)[0]
            else:
                output = module(x, x, x)[0]
        output.float().square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert seen.calls[0].query.dtype == torch.bfloat16


def test_the_report_of_a_padded_batch(tmp_path):
    model, x = encoder(), draw(2, 6, 16)
    with torch.no_grad(), ch.watch(model) as seen:
        model(x, src_key_padding_mask=PADDING)
    for layer, call in zip(seen.layers(list("abcdef"), sequence=1, error=0), seen.calls, strict=True):
        assert layer.name == call.name and layer.query_tokens == list("abcd")  # those that are no padding
        torch.testing.assert_close(torch.as_tensor(layer.received), call.weights.received()[1, :, :4])
        assert layer.stop[0].tolist() == [4, 4, 4, 4]
    page = seen.view(tokens=list("abcdef"), sequence=1).write(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "layers.1.self_attn" in page


def entropies(weights, words):
    """The mean entropy of each head over the queries that are words, from a module's own weights (B, H, Lq, Lk)."""
    found = torch.special.entr(weights.detach().double()).sum(-1)
    return [float(found[:, head][words].mean()) for head in range(weights.shape[1])]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("padding", [PADDING, PADDING.flip(1), float_mask(PADDING)], ids=["right", "left", "float"])
def test_padding_of_an_encoder_is_no_part_of_its_table(padding, batch_first, grad):
    model, words = encoder(batch_first=batch_first), padding == 0
    x = draw(2, 6, 16) if batch_first else draw(6, 2, 16)
    with torch.set_grad_enabled(grad), ch.watch(model) as seen:
        model(x, src_key_padding_mask=padding)
    with torch.enable_grad():  # off the fast path, which leaves padding out
        own = own_weights(model, x, None, padding)
    assert all(torch.equal(side, words) for call in seen.calls for side in call.padding)
    found = [row["Entropy (nats)"] for row in seen.table()]
    assert found == pytest.approx([one for weights in own for one in entropies(weights, words)], abs=1e-5)


def test_padding_of_a_decoder_and_of_attention_alone():
    torch.manual_seed(0)
    layer, memory, x = nn.TransformerDecoderLayer(16, 4, 32, batch_first=True).eval(), draw(2, 6, 16), draw(2, 5, 16)
    target = torch.tensor([[0, 0, 0, 1, 1], [0] * 5]).bool()
    with ch.watch(layer) as seen:
        layer(x, memory, tgt_key_padding_mask=target, memory_key_padding_mask=PADDING)
    own, cross = seen.calls
    assert torch.equal(own.padding.queries, ~target) and torch.equal(own.padding.keys, ~target)
    assert torch.equal(cross.padding.queries, ~target) and torch.equal(cross.padding.keys, ~PADDING)
    whole = nn.Transformer(16, 4, 1, 1, 32, batch_first=True).eval()
    with ch.watch(whole) as seen:
        whole(memory, x, tgt_key_padding_mask=target)
    assert [call.padding is None for call in seen.calls] == [True, False, False]
    assert seen.calls[2].padding.keys is None and torch.equal(seen.calls[2].padding.queries, ~target)
    module, x = multihead(batch_first=True), draw(2, 6, 16)
    one = x[1]
    for attention in (module, ch.nn.TorchMultiheadAttention.from_torch(module).eval()):
        with ch.watch(attention) as seen:
            attention(x, x, x, key_padding_mask=PADDING)
            attention(x, memory, memory, key_padding_mask=PADDING)
            attention(one, one, one, key_padding_mask=PADDING[1])
            attention(x, x, x, key_padding_mask=draw(2, 6, seed=4) * PADDING)  # a number that is added to a score
            attention(x, x, x)
        own, cross, alone, added, plain = (call.padding for call in seen.calls)
        assert torch.equal(own.queries, ~PADDING) and torch.equal(own.keys, ~PADDING)
        assert cross.queries is None and torch.equal(cross.keys, ~PADDING)
        assert torch.equal(alone.queries, ~PADDING[1:]) and added is None and plain is None


def test_padding_of_self_attention_whose_inputs_are_equal_views():
    """Three views of one tensor, as `x.transpose(0, 1)` makes them, are one sequence: its padding is of queries too."""
    torch.manual_seed(0)
    x, hidden = torch.rand(2, 5, 8), torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]).bool()
    module = nn.MultiheadAttention(8, 2).eval()
    with torch.no_grad(), ch.watch(module) as seen:
        module(*(x.transpose(0, 1) for _ in range(3)), key_padding_mask=hidden)
        _, weights = module(*[x.transpose(0, 1)] * 3, key_padding_mask=hidden, average_attn_weights=False)
    for call in seen:
        assert call.kind == "self" and all(torch.equal(side, ~hidden) for side in call.padding)
    for head, row in enumerate(seen.table()[:2]):
        own = torch.cat([weights[i, head].diagonal()[~hidden[i]] for i in range(2)])
        assert row["itself"] == pytest.approx(float(own.mean()), abs=1e-6)


@pytest.mark.parametrize("recorded", [ch.watch, ch.models.monitor])
def test_a_checkpoint_runs_again_what_ran_before(recorded):
    layer, x = nn.TransformerEncoderLayer(16, 4, 16, 0.0, batch_first=True), draw(2, 6, 16).requires_grad_()

    def gradient():
        return torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), x)[0]

    expected = gradient()
    with recorded(layer):
        assert torch.equal(gradient(), expected)


def test_an_empty_batch():
    module, x = multihead(batch_first=True), torch.rand(0, 6, 16)
    masks = {"key_padding_mask": torch.zeros(0, 6).bool(), "attn_mask": torch.zeros(0, 6, 6).bool()}
    with ch.watch(module, gradients=True) as seen, ch.edit(module, ch.edits.ScaleHeads(heads=1)):
        module(x, x, x, **masks)[0].sum().backward()
    assert seen[0].weights.dense().shape == seen[0].gradients.dense().shape == (0, 4, 6, 6)
