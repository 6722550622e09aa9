"""Nested tensors in modules: each sequence is as the module computes it alone, in a batch of one."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.nn import (
    AdditiveAttention,
    DotProductAttention,
    LearnedPositionalEncoding,
    MultiHeadAttention,
    RotaryEmbedding,
    RotaryScaling,
    SinusoidalPositionalEncoding,
    TorchMultiheadAttention,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor:UserWarning"
)
E, H = 16, 4
LENGTHS, MORE = [3, 9, 0, 1, 5], [4, 2, 3, 0, 5]
LONGEST = max(LENGTHS)
LAYOUTS = [torch.jagged, torch.strided]


def parts(lengths, width=E, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, width, generator=generator, dtype=dtype).requires_grad_() for n in lengths]


def nested(sequences, layout=torch.jagged):
    return torch.nested.as_nested_tensor(sequences, layout=layout)


def compare(module, inputs, call, alone, layout=torch.jagged, atol=2e-6, rtol=1e-4, **options):
    """Output, weights and gradients of nested inputs, beside those of each sequence; `alone(n)`: its own options."""
    given = {id(one): nested(one, layout) for one in inputs}
    query, key, value = (given[id(one)] for one in inputs)
    output = call(module, query, key, value, **options)
    assert output.layout == layout and output.is_nested
    if layout is torch.jagged:
        assert output.shape[:-1] == query.shape[:-1]  # the length that varies is the query's own
    found, weights = output.unbind(), module.attention_weights
    full = weights[...]
    wanted = []
    for n, (q, k, v) in enumerate(zip(*inputs, strict=True)):
        wanted.append(call(module, q[None], k[None], v[None], **alone(n))[0])
        torch.testing.assert_close(
            full[n, ..., : len(q), : len(k)], module.attention_weights[...][0], atol=atol, rtol=rtol
        )
        assert not full[n, ..., len(q) :, :].any() and not full[n, ..., len(k) :].any()
    grads = [torch.randn_like(one) for one in wanted]
    leaves = [*{id(t): t for one in inputs for t in one}.values(), *module.parameters()]
    slopes = [
        torch.autograd.grad(sum((o * g).sum() for o, g in zip(outputs, grads, strict=True)), leaves, allow_unused=True)
        for outputs in (found, wanted)
    ]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=rtol)
    for one, other, leaf in zip(*slopes, leaves, strict=True):
        one, other = (torch.zeros_like(leaf) if t is None else t for t in (one, other))
        torch.testing.assert_close(one, other, atol=10 * atol, rtol=10 * rtol)


def plainly(module, query, key, value, **options):
    return module(query, key, value, **options)


def prepared(module, query, key, value, **options):
    return module(query, module.prepare(key, value), **options)


BOOL = torch.rand(5, H, LONGEST, LONGEST, generator=torch.Generator().manual_seed(1)) > 0.3
NUMBERS = torch.randn(5, H, LONGEST, LONGEST, generator=torch.Generator().manual_seed(2))
SEEN = [2, 9, 0, 0, 4]


def rule(n):
    return ch.MaskFunction(lambda b, h, i, j: (i + 2 * j + (b if n is None else n) + h) % 3 > 0)


# the options of a nested call, and those of sequence n of this length
MASKS = {
    "none": ({}, lambda n, length: {}),
    "causal": ({"mask": ch.Causal()}, lambda n, length: {"mask": ch.Causal()}),
    "gaps": (
        {"mask": ~ch.SlidingWindow(before=1) | ch.Causal()},
        lambda n, length: {"mask": ~ch.SlidingWindow(before=1) | ch.Causal()},
    ),
    "lengths": (
        {"mask": ch.Causal() & ch.Lengths(SEEN)},
        lambda n, length: {"mask": ch.Causal() & ch.Lengths([SEEN[n]])},
    ),
    "valid_lens": ({"valid_lens": SEEN}, lambda n, length: {"valid_lens": [SEEN[n]]}),
    "bool": ({"mask": BOOL}, lambda n, length: {"mask": BOOL[n : n + 1, :, :length, :length]}),
    "function": ({"mask": rule(None)}, lambda n, length: {"mask": rule(n)}),
    "bias": ({"bias": NUMBERS}, lambda n, length: {"bias": NUMBERS[n : n + 1, :, :length, :length]}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, layout):
    torch.manual_seed(0)
    whole, alone = MASKS[mask]
    x = parts(LENGTHS)
    compare(MultiHeadAttention(E, H), (x, x, x), plainly, lambda n: alone(n, LENGTHS[n]), layout, **whole)


OPTIONS = {
    "grouped": lambda: {"num_kv_heads": 2, "head_dim": 6},
    "rotary": lambda: {"rotary": RotaryEmbedding(4)},
    "rotary of one's own": lambda: {"rotary": lambda x, positions: x * (1 + 0.1 * positions[:, None, :, None])},
    "norms": lambda: {"query_norm": nn.RMSNorm(4), "key_norm": nn.LayerNorm(4)},
    "sinks": lambda: {"sinks": True},
    "elementwise gate": lambda: {"gate": "elementwise"},
    "headwise gate": lambda: {"gate": "headwise", "num_kv_heads": 1},
    "temperature": lambda: {"temperature": nn.Parameter(torch.rand(H) + 0.5)},
    "ALiBi": lambda: {"score_bias": ch.ALiBi(H)},
    "relative bias": lambda: {"score_bias": ch.RelativeBias(H)},
    "bias function": lambda: {"score_bias": ch.BiasFunction(lambda b, h, i, j: 0.1 * (i - j + h))},
    "additive": lambda: {"score": ch.Additive(4, 4, hidden_dim=3)},
    "changed score": lambda: {"score": ch.Dot().then(lambda s, b, h, i, j: s / (1 + (i - j).abs()) + i)},
    "by tile": lambda: {"score": lambda q, k: (q @ k.mT).tanh()},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options(option):
    torch.manual_seed(0)
    module = MultiHeadAttention(E, H, **OPTIONS[option]())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x = parts(LENGTHS)
    compare(module, (x, x, x), plainly, lambda n: {"mask": ch.Causal()}, mask=ch.Causal())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", [plainly, prepared])
@pytest.mark.parametrize("align", ["upper_left", "lower_right", 1])
def test_other_keys_than_queries(align, call, layout):
    torch.manual_seed(0)
    module = MultiHeadAttention(E, H, kdim=6, vdim=6, rotary=RotaryEmbedding(4), score_bias=ch.ALiBi(H))
    key = parts(MORE, 6, seed=1)
    options = {"align": align, "mask": ch.Causal()}
    compare(module, (parts(LENGTHS), key, key), call, lambda n: options, layout, **options)


@pytest.mark.parametrize("call", [plainly, prepared])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "module", [AdditiveAttention(6, query_dim=E, key_dim=6), DotProductAttention()], ids=["A", "D"]
)
def test_modules_without_heads(module, layout, call):
    key = parts(MORE, E if isinstance(module, DotProductAttention) else 6, seed=1)
    if call is plainly or isinstance(module, AdditiveAttention):
        compare(module, (parts(LENGTHS), key, parts(MORE, 5, seed=2)), call, lambda n: {}, layout)
    seen = {"valid_lens": [2, 1, 3, 0, 5]}
    compare(module, (parts(LENGTHS), key, key), plainly, lambda n: {"valid_lens": [seen["valid_lens"][n]]}, **seen)


def test_a_lazy_module_takes_its_widths_from_nested_inputs():
    module = AdditiveAttention(6)
    module(*[nested(parts([2, 3], 5), torch.strided)] * 3)
    assert module.W_q.weight.shape == (6, 5)


def test_heads_in_a_module_without_projections():
    x = [torch.randn(n, 2, 4) for n in (3, 1)]
    q = nested(x).transpose(1, 2)
    for one, found in zip(x, DotProductAttention()(q, q, q, mask=ch.Causal()).unbind(), strict=True):
        one = one.transpose(0, 1)[None]
        wanted = nn.functional.scaled_dot_product_attention(one, one, one, is_causal=True)
        torch.testing.assert_close(found, wanted[0])


def by_torch(module, query, key, value, **options):
    padded = not query.is_nested and not module.batch_first  # nested tensors have the batch first in every module
    inputs = (t.transpose(0, 1) if padded else t for t in (query, key, value))
    output, weights = module(*inputs, **options)
    if weights is not None and query.is_nested:
        torch.testing.assert_close(weights, module.attention_weights[...].mean(1))
    return output.transpose(0, 1) if padded else output


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", ["none", "bool", "float", "of each head", "padding", "float padding"])
def test_torchs_call(mask, batch_first, need_weights):
    torch.manual_seed(0)
    masks = {"bool": ~BOOL[0, 0], "float": NUMBERS[0, 0], "of each head": ~BOOL.flatten(0, 1)}
    padding = {"padding": ~BOOL[:, 0, 0], "float padding": NUMBERS[:, 0, 0]}.get(mask)
    found = masks.get(mask)

    def alone(n):
        if padding is not None:
            return {"key_padding_mask": padding[n : n + 1, : LENGTHS[n]], "need_weights": need_weights}
        if found is None:
            return {"need_weights": need_weights}
        own = found[n * H : (n + 1) * H] if found.ndim == 3 else found
        return {"attn_mask": own[..., : LENGTHS[n], : LENGTHS[n]], "need_weights": need_weights}

    module = TorchMultiheadAttention(E, H, batch_first=batch_first)
    x = parts(LENGTHS)
    compare(module, (x, x, x), by_torch, alone, attn_mask=found, key_padding_mask=padding, need_weights=need_weights)
    theirs = nn.MultiheadAttention(E, H, batch_first=True)
    theirs.load_state_dict(module.state_dict())
    wanted = theirs(x[1][None], x[1][None], x[1][None])[0][0]
    torch.testing.assert_close(module(*[nested(x)] * 3)[0].unbind()[1], wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "encode",
    [SinusoidalPositionalEncoding(E), LearnedPositionalEncoding(64, E), RotaryEmbedding(8)],
    ids=["S", "L", "R"],
)
def test_encodings(encode, layout):
    x = parts(LENGTHS)
    many = torch.randint(0, 64, (5, LONGEST))
    starts = torch.tensor([1, 5, 3, 2, 9])
    for given, own in (
        ({}, lambda n: {}),
        ({"offset": 3}, lambda n: {"offset": 3}),
        ({"offset": starts}, lambda n: {"offset": int(starts[n])}),
        ({"positions": many[0]}, lambda n: {"positions": many[0, : LENGTHS[n]]}),
        ({"positions": many}, lambda n: {"positions": many[n, : LENGTHS[n]]}),
    ):
        found = encode(nested(x, layout), **given)
        assert found.layout == layout
        for n, (one, sequence) in enumerate(zip(found.unbind(), x, strict=True)):
            torch.testing.assert_close(one, encode(sequence, **own(n)))


def test_rotary_of_heads():
    x = torch.randn(5, 2, 8)
    heads = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, 5])).transpose(1, 2)
    found = RotaryEmbedding(8)(heads)
    torch.testing.assert_close(found.unbind()[1], RotaryEmbedding(8)(x[3:].transpose(0, 1)))


def test_positions_of_a_call():
    torch.manual_seed(0)
    module, x, y = MultiHeadAttention(E, H, rotary=RotaryEmbedding(4)), parts(LENGTHS), parts(MORE, seed=1)
    of_queries, of_keys = torch.randint(0, 50, (5, LONGEST)), torch.randint(0, 50, (5, max(MORE)))

    def alone(n):
        own = {"positions": of_queries, "key_positions": of_keys}
        return {
            name: table[n : n + 1, : counts[n]]
            for (name, table), counts in zip(own.items(), (LENGTHS, MORE), strict=True)
        }

    compare(module, (x, y, y), plainly, alone, positions=of_queries, key_positions=of_keys)


def test_a_rotation_that_depends_on_the_length_follows_the_longest_sequence():
    """As in the padded batch."""
    torch.manual_seed(0)
    scaling = RotaryScaling.dynamic(factor=4, original_length=4)
    module = MultiHeadAttention(E, H, rotary=RotaryEmbedding(4, scaling=scaling))
    x = nested(parts(LENGTHS))
    padded = x.to_padded_tensor(0.0)
    wanted = module(padded, padded, padded, valid_lens=LENGTHS)
    for one, row in zip(module(x, x, x).unbind(), wanted, strict=True):
        torch.testing.assert_close(one, row[: len(one)], atol=1e-6, rtol=1e-5)


def test_nothing_is_padded(monkeypatch):
    """The layers and the engines are given the vectors of the sequences alone."""
    sizes, run = [], ch._attention.run
    monkeypatch.setattr(
        ch._attention, "run", lambda problem, *rest: sizes.append(problem.sizes.shape) or run(problem, *rest)
    )
    for module in (MultiHeadAttention(E, H), TorchMultiheadAttention(E, H)):
        for part in module.modules():
            if isinstance(part, nn.Linear):
                part.register_forward_hook(lambda layer, given, output: sizes.append(tuple(given[0].shape)))
        module(
            *[nested(parts(LENGTHS))] * 3, **({} if isinstance(module, MultiHeadAttention) else {"need_weights": False})
        )
    total = sum(LENGTHS)
    assert (1, total, E) in sizes and (1, H, total, total) in sizes
    assert set(sizes) == {(1, total, E), (1, H, total, total)}


@pytest.mark.parametrize("lengths", [[4], [0], [0, 0], [1, 1, 1], [300, 2, 150]])
def test_any_lengths(lengths):
    torch.manual_seed(0)
    x = parts(lengths)
    compare(
        MultiHeadAttention(E, H, rotary=RotaryEmbedding(4)),
        (x, x, x),
        plainly,
        lambda n: {"mask": ch.Causal()},
        mask=ch.Causal(),
        atol=1e-5,
    )


def test_no_sequence_and_room_between_sequences():
    module = MultiHeadAttention(E, H)
    none = torch.nested.nested_tensor_from_jagged(torch.zeros(0, E), torch.tensor([0]))
    assert module(none, none, none).size(0) == 0
    values = torch.randn(9, E).requires_grad_()
    with torch.no_grad():
        values[[3, 4, 8]] = torch.nan
    x = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 5, 9]), lengths=torch.tensor([3, 3]))
    output = module(x, x, x)
    for one, rows in zip(output.unbind(), (slice(0, 3), slice(5, 8)), strict=True):
        torch.testing.assert_close(one, module(*[values[rows][None]] * 3)[0])
    (slope,) = torch.autograd.grad(sum(one.sum() for one in output.unbind()), values)
    assert slope.isfinite().all() and not slope[[3, 4, 8]].any()


def test_low_precision():
    torch.manual_seed(0)
    module, x = MultiHeadAttention(E, H, rotary=RotaryEmbedding(4)), parts(LENGTHS)
    wanted = [module(one[None], one[None], one[None])[0] for one in x]
    with torch.autocast("cpu", torch.bfloat16):
        found = module(*[nested(x)] * 3)
    assert found.dtype == torch.bfloat16
    low = copy.deepcopy(module).bfloat16()(*[nested([one.bfloat16() for one in x])] * 3)
    for one, other, exact in zip(found.unbind(), low.unbind(), wanted, strict=True):
        torch.testing.assert_close(one.float(), exact, atol=0.03, rtol=0.03)
        torch.testing.assert_close(other.float(), exact, atol=0.03, rtol=0.03)


def test_records():
    torch.manual_seed(0)
    module, x = MultiHeadAttention(E, H, score_bias=ch.RelativeBias(H), record_gradients=True), parts([3, 5])
    module(*[nested(x)] * 3, ch.Causal())
    weights = module.attention_weights
    assert weights.shape == (2, H, 5, 5) and weights.entropy().shape == (2, H, 5)
    slopes = torch.autograd.grad(weights[...].square().sum(), [*x, module.score_bias.weight])
    wanted = 0
    for one in x:
        module(one[None], one[None], one[None], ch.Causal())
        wanted = wanted + module.attention_weights[...].square().sum()
    for one, other in zip(slopes, torch.autograd.grad(wanted, [*x, module.score_bias.weight]), strict=True):
        torch.testing.assert_close(one, other)
    module.record_gradients = False
    module(*[nested(x)] * 3, rule(None))
    weights = module.attention_weights
    torch.testing.assert_close(pickle.loads(pickle.dumps(weights))[...], weights[...])
    with torch.no_grad():
        module.W_q.weight.add_(1.0)  # the record has its own queries
    assert weights[1, 0].shape == (5, 5)


def test_a_function_of_positions_counts_in_each_sequence():
    x = parts(LENGTHS, 4)
    score = ch.Dot().then(lambda s, b, h, i, j: s * 0.3 * (i - 2 * j) + b)
    rows, documents = torch.cat(x), ch.Documents.from_cu_seqlens(torch.tensor([0, *LENGTHS]).cumsum(0))
    packed = ch.attention(rows, rows, rows, score=score, mask=documents)
    torch.testing.assert_close(packed, ch.attention(*[nested(x)] * 3, score=score).values())
    for found, n in zip(packed.split(LENGTHS), range(5), strict=True):
        i, j = torch.arange(LENGTHS[n])[:, None], torch.arange(LENGTHS[n])
        scores = x[n] @ x[n].T / 2
        torch.testing.assert_close(found, (scores * 0.3 * (i - 2 * j) + n).softmax(-1) @ x[n], atol=1e-5, rtol=1e-4)


class Block(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, x):
        output = self.attend(x, x, x)
        return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize(
    "attend", [MultiHeadAttention(E, H), TorchMultiheadAttention(E, H, batch_first=True), DotProductAttention()]
)
def test_watched_and_edited_as_the_padded_batch(attend):
    x = parts([3, 5])
    model = Block(attend).eval()
    plain = model(nested(x))
    with torch.no_grad(), ch.watch(model) as seen:
        output = model(nested(x))
    torch.testing.assert_close(output.values(), plain.values())
    (call,) = seen.calls
    assert call.weights.shape[0] == 2 and call.weights.shape[-2:] == (5, 5)
    for n, one in enumerate(x):
        model(one[None])
        wanted = attend.attention_weights[...][0]
        torch.testing.assert_close(call.weights[n][..., : len(one), : len(one)], wanted.reshape(-1, len(one), len(one)))
    edit = ch.edits.Knockout(seen[0].name, queries=[2], keys=[0])
    with torch.no_grad(), ch.edit(model, edit):
        edited = model(nested(x)).unbind()
        weights = attend.attention_weights[...]
        alone = [model(one[None])[0] for one in x]
    assert not weights[:, ..., 2, 0].any()
    for one, other in zip(edited, alone, strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.allclose(edited[0], plain.unbind()[0])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_torchs_encoder(training, norm_first):
    """In evaluation, without gradients, it makes nested tensors of a padded batch; the outputs are torch's."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 20, dropout=0.0, batch_first=True, norm_first=norm_first)
    theirs = nn.TransformerEncoder(layer, 2).train(training)
    ours = copy.deepcopy(theirs)
    for one in ours.layers:
        one.self_attn = TorchMultiheadAttention.from_torch(one.self_attn)
    x, padding = torch.randn(3, 6, E), torch.arange(6) >= torch.tensor([[4], [6], [1]])
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            found, wanted = (model(x, src_key_padding_mask=padding) for model in (ours, theirs))
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        weights = ours.layers[1].self_attn.attention_weights
        assert weights.shape == (3, H, 6, 6) and not weights[0, :, :4, 4:].any()
    rows = [row[~hidden] for row, hidden in zip(x, padding, strict=True)]
    for layout in LAYOUTS:  # and nested inputs of one's own
        with torch.no_grad():
            found = ours.layers[0](nested(rows, layout)).unbind()
        for one, row in zip(found, rows, strict=True):
            torch.testing.assert_close(one, theirs.layers[0](row[None])[0], atol=1e-5, rtol=1e-5)


MODULE, ROTARY = MultiHeadAttention(E, H), MultiHeadAttention(E, H, rotary=RotaryEmbedding(4))
DROP_IN = TorchMultiheadAttention(E, H)
X, Y = nested(parts([3, 5])), nested(parts([3, 4]))
with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)
    ROWS = nested(parts([3, 5]), torch.strided)
PADDED = torch.randn(2, 5, E)
WRONG = {
    "value alone": (lambda: MODULE(PADDED, PADDED, ROWS), ["value is nested"]),
    "nested mask": (lambda: MODULE(X, X, X, ROWS), ["mask is nested", "expected a Mask"]),
    "nested attn_mask": (lambda: DROP_IN(X, X, X, attn_mask=ROWS), ["attn_mask is a nested tensor"]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_refused(wrong):
    call, words = WRONG[wrong]
    with pytest.raises(ch.ClearheadError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_hint_that_a_mask_is_causal():
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    found = DROP_IN(X, X, X, attn_mask=causal, is_causal=True, need_weights=False)[0]
    wanted = DROP_IN(X, X, X, attn_mask=causal)[0]
    torch.testing.assert_close(found.values(), wanted.values())


def test_what_prepared_keys_say():
    made = MODULE.prepare(X, X)
    assert repr(made) == "PreparedKeys(key (2, 4, j, 4), value (2, 4, j, 4))" and len(made) == 5
    assert repr(MODULE.prepare(ROWS, ROWS)) == repr(made)


def test_a_diagnosis_names_places_in_the_sequences():
    found = ch.diagnose(MODULE, X, X, X, mask=ch.Lengths([0, 5]))
    assert "queries 0, 1 and 2" in str(found) or "sequence 0" in str(found)
