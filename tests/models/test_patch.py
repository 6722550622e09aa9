"""Patches and ablations, against hooks of our own in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import OWN_EAGER, SIZES, pair
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    GPTNeoXConfig,
    GPTNeoXModel,
    LlamaConfig,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)

import clearhead as ch

IDS = torch.tensor([[1, 5, 9, 2, 7, 3], [4, 4, 8, 6, 0, 11]])
OTHER = torch.tensor([[2, 3, 4, 8, 1, 1], [7, 0, 0, 5, 6, 12]])
HEADS, WIDTH = 4, 8


class Plain(nn.Module):
    """Two layers of grouped attention, with every part in reach of the oracle: `change` is given layer and parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.layers = nn.ModuleList(PlainLayer() for _ in range(2))

    def forward(self, ids: Tensor, change: Any = None, seen: Any = None) -> Tensor:
        x = self.embed(ids)
        for n, layer in enumerate(self.layers):
            x = x + layer(x, (lambda name, t, n=n: change(n, name, t)) if change else None, n, seen)
        return x


class PlainLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(32, 32), nn.Linear(32, 32)
        self.k, self.v = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x: Tensor, change: Any, n: int, seen: Any) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if change is None and seen is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:  # the oracle: one query head at a time, so that a group's heads may differ
            k, v = (t.repeat_interleave(2, 1) for t in (k, v))
            at = change or (lambda name, t: t)
            q, k, v = at("query", q), at("key", k), at("value", v)
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            w = (q @ k.mT / WIDTH**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
            w = at("weights", w)
            out = at("output", w @ v)
            if seen is not None:
                seen[n] = {"query": q, "key": k, "value": v, "weights": w, "output": out}
        return self.o(out.transpose(1, 2).flatten(2))


@pytest.fixture(scope="module")
def plain() -> tuple[Plain, Any, dict[int, dict[str, Tensor]]]:
    torch.manual_seed(0)
    model = Plain().double().eval()
    kept: dict[int, dict[str, Tensor]] = {}
    with torch.no_grad():
        model(OTHER, seen=kept)
        with ch.watch(model, values=True) as seen:
            model(OTHER)
    return model, seen, kept


PLACES = {
    "query": ([1, 4], None),
    "output": ([1, 4], None),
    "weights": ([1, 4], None),
    "key": (None, [0, 3]),
    "value": (None, [0, 3]),
}


@torch.no_grad()
def test_a_patched_value_of_some_queries_alone(plain: Any) -> None:
    model, seen, kept = plain

    def change(n: int, name: str, tensor: Tensor) -> Tensor:
        if n or name != "output":
            return tensor
        new, value = tensor.clone(), kept["here"].clone()
        value[:, 2, 3] = kept[0]["value"][:, 2, 3]
        new[:, 2, 5] = (kept["weights"] @ value)[:, 2, 5]
        return new

    here: dict[int, dict[str, Tensor]] = {}
    model(IDS, seen=here)
    kept = {**kept, "here": here[0]["value"], "weights": here[0]["weights"]}
    with ch.edit(model, ch.edits.Patch(seen, 0, 2, "value", queries=5, keys=3)):
        found = model(IDS)
    assert (found - model(IDS, change)).abs().max() < 1e-12


@torch.no_grad()
def test_positions_pair_texts_of_different_lengths(plain: Any) -> None:
    model, _, _ = plain
    longer = torch.tensor([[9, 2, 3, 4, 8, 1, 1, 3]])
    kept: dict[int, dict[str, Tensor]] = {}
    model(longer, seen=kept)
    with ch.watch(model, values=True) as seen:
        model(longer)
    pairs = ([0, 2, 5], [1, 4, 7])

    def change(n: int, name: str, tensor: Tensor) -> Tensor:
        new = tensor.clone()
        if name == "output":
            new[:, :, pairs[0]] = kept[n]["output"][:, :, pairs[1]]
        return new

    with ch.edit(model, ch.edits.Patch(seen, positions=pairs)):
        found = model(IDS)
    assert (found - model(IDS, change)).abs().max() < 1e-12
    with pytest.raises(ch.ShapeError, match="positions="), ch.edit(model, ch.edits.Patch(seen)):
        model(IDS)


def rotary_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": 20, "num_hidden_layers": 1}
    if kind == "clearhead":
        return RotaryBlock().eval()
    return {"Llama": lambda: LlamaModel(LlamaConfig(**sizes)), "GPTNeoX": lambda: GPTNeoXModel(GPTNeoXConfig(**sizes))}[
        kind
    ]().eval()  # type: ignore[no-any-return]


class RotaryBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        self.attend = ch.nn.MultiHeadAttention(32, 4, rotary=ch.nn.RotaryEmbedding(8))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.attend(x, x, x, ch.Causal())  # type: ignore[no-any-return]


def shifted(kind: str) -> tuple[nn.Module, Any, tuple[range, range]]:
    """A model of one layer, a run of it on `IDS` behind two other tokens, and the positions that correspond."""
    model = rotary_model(kind)
    with ch.watch(model, values=True) as seen:
        model(torch.cat([OTHER[:, :2], IDS], 1))
    return model, seen, (range(6), range(2, 8))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Llama", "GPTNeoX", "clearhead"])
def test_vectors_that_were_turned_for_another_position_are_refused(kind: str) -> None:
    """The first layer's query, key and value are made of the token and its position alone: the right ones of another
    run change nothing."""
    model, seen, pairs = shifted(kind)
    plain = hidden(model(IDS))
    for part in ("query", "key"):
        patch = ch.edits.Patch(seen, 0, part=part, positions=pairs)  # type: ignore[arg-type]
        with pytest.raises(ch.UnsupportedError, match="position 0 with position 2"), ch.edit(model, patch):
            model(IDS)
    with ch.edit(model, ch.edits.Patch(seen, 0, part="value", positions=pairs)):
        assert (hidden(model(IDS)) - plain).abs().max() < 1e-5
    with ch.watch(model, values=True) as same:
        model(IDS)
    for part in ("query", "key"):
        with ch.edit(model, ch.edits.Patch(same, 0, part=part, positions=([1, 4], [1, 4]))):  # type: ignore[arg-type]
            assert (hidden(model(IDS)) - plain).abs().max() < 1e-5


@torch.no_grad()
def test_a_tensor_that_was_turned_for_this_text_is_taken_as_it_is() -> None:
    model, seen, pairs = shifted("Llama")
    angles = torch.outer(torch.arange(8.0), 1e4 ** -(torch.arange(4) / 4)).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    partner = lambda t: torch.cat([-t[..., 4:], t[..., :4]], -1)
    key = seen[0].key
    unturned = key * cos - partner(key) * sin
    here = unturned[:, :, 2:]
    turned = here * cos[:6] + partner(here) * sin[:6]
    plain = hidden(model(IDS))
    for source, places, near in ((turned, (range(6), range(6)), True), (key, pairs, False)):
        with ch.edit(model, ch.edits.Patch(source, 0, part="key", positions=places)):
            assert ((hidden(model(IDS)) - plain).abs().max() < 1e-5) == near


@torch.no_grad()
def test_a_model_that_turns_nothing_takes_a_key_from_another_position(plain: Any) -> None:
    model, _, kept = plain
    gpt2 = GPT2Model(GPT2Config(vocab_size=20, n_embd=32, n_layer=1, n_head=HEADS, n_positions=16)).eval()
    for one in (model, gpt2):
        with ch.watch(one, values=True) as seen:
            one(OTHER)
        with ch.edit(one, ch.edits.Patch(seen, 0, part="key", positions=([0, 2], [3, 1]))):
            found = hidden(one(IDS))
        if one is model:

            def change(n: int, name: str, tensor: Tensor) -> Tensor:
                new = tensor.clone()
                if n == 0 and name == "key":
                    new[:, :, [0, 2]] = kept[0]["key"][:, :, [3, 1]]
                return new

            assert (found - model(IDS, change)).abs().max() < 1e-12
        assert (found - hidden(one(IDS))).abs().max() > 1e-4


class Decoder(nn.Module):
    """Self attention that turns queries and keys, and cross attention that turns them where `turned`."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.block = RotaryBlock()
        self.cross = ch.nn.MultiHeadAttention(32, 4, rotary=ch.nn.RotaryEmbedding(8) if turned else None)

    def forward(self, ids: Tensor, memory: Tensor) -> Tensor:
        return self.cross(self.block(ids), memory, memory)  # type: ignore[no-any-return]


@torch.no_grad()
def test_keys_of_cross_attention_that_turns_nothing_are_taken_from_another_position() -> None:
    torch.manual_seed(0)
    memory = torch.rand(1, 4, 32)
    for turned in (False, True):
        model = Decoder(turned).eval()
        with ch.watch(model, values=True) as seen:
            model(IDS[:1], memory.roll(1, 1))
        pairs = (range(4), [1, 2, 3, 0])
        patches = [ch.edits.Patch(seen, 1, part="key", positions=pairs)]
        if turned:
            with pytest.raises(ch.UnsupportedError, match="position 0 with position 1"), ch.edit(model, *patches):
                model(IDS[:1], memory)
        else:
            with ch.edit(model, *patches):
                found = model(IDS[:1], memory)
            torch.testing.assert_close(found, model(IDS[:1], memory))


def hidden(output: Any) -> Tensor:
    return getattr(output, "last_hidden_state", output)  # type: ignore[no-any-return]


@torch.no_grad()
def test_the_mean_of_an_ablation_is_of_words_alone() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=20, n_embd=32, n_layer=2, n_head=HEADS, bos_token_id=1, eos_token_id=2)
    ).eval()
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    with ch.watch(model, values=True) as seen:
        model(input_ids=OTHER, attention_mask=mask)
    with ch.watch(model, values=True) as short:
        model(input_ids=OTHER[:1, :4])
    with ch.watch(model, values=True) as full:
        model(input_ids=OTHER[1:])
    both = torch.cat([one[0].output for one in (short, full)], 2)
    with ch.edit(model, ch.edits.Ablate(0, 1, "mean", seen)), ch.watch(model, values=True) as ran:
        model(input_ids=IDS)
    assert torch.allclose(ran[0].output[:, 1], both[:, 1].mean(1).expand(2, 6, -1), atol=1e-6)
    with ch.edit(model, ch.edits.Ablate(0, 1, "position mean", seen)), ch.watch(model, values=True) as ran:
        model(input_ids=IDS)
    wanted = full[0].output[0, 1].clone()
    wanted[:4] = (wanted[:4] + short[0].output[0, 1]) / 2  # the last two are padding in the first text
    assert torch.allclose(ran[0].output[:, 1], wanted.expand(2, 6, -1), atol=1e-6)
    with ch.watch(model, values=True) as empty:
        model(input_ids=OTHER, attention_mask=torch.tensor([[1, 1, 1, 1, 1, 0]] * 2))
    unknown = ch.edits.Ablate(0, 1, "position mean", empty)
    with pytest.raises(ch.ClearheadError, match="position 5 is padding in every"), ch.edit(model, unknown):
        model(input_ids=IDS)


@torch.no_grad()
def test_cross_attention_of_another_source() -> None:
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=20, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=HEADS)
    ).eval()
    words = IDS[:, :3]
    with ch.watch(model, values=True) as seen:
        model(input_ids=OTHER, decoder_input_ids=words)
    edits = [ch.edits.Patch(seen, "decoder *, cross", part=part) for part in ("key", "value")]
    with ch.edit(model, *edits):
        found = model(input_ids=IDS, decoder_input_ids=words).logits
    assert torch.allclose(found, model(input_ids=OTHER, decoder_input_ids=words).logits, atol=1e-5)


@torch.no_grad()
def test_edits_of_one_head_apply_in_turn(plain: Any) -> None:
    model, seen, kept = plain
    patch, half = ch.edits.Patch(seen, 1, 2), ch.edits.ScaleHeads(1, 2, 0.5)
    unedited = model(IDS)

    def change(factor: float) -> Any:
        def inner(n: int, name: str, tensor: Tensor) -> Tensor:
            new = tensor.clone()
            if n == 1 and name == "output":
                new[:, 2] = factor * kept[1]["output"][:, 2]
            return new

        return inner

    with ch.edit(model, patch, half):
        assert (model(IDS) - model(IDS, change(0.5))).abs().max() < 1e-12
    with ch.edit(model, half, patch):
        assert (model(IDS) - model(IDS, change(1.0))).abs().max() < 1e-12
    with ch.edit(model, patch), ch.edit(model, half):  # nested: the inner ones come after
        assert (model(IDS) - model(IDS, change(0.5))).abs().max() < 1e-12
    with ch.edit(model, half), ch.edit(model, patch):
        assert (model(IDS) - model(IDS, change(1.0))).abs().max() < 1e-12
    assert torch.equal(model(IDS), unedited)


@torch.no_grad()
@pytest.mark.parametrize("inside", [False, True], ids=["watch around", "watch inside"])
@pytest.mark.parametrize("part", list(PLACES))
def test_a_patched_run_is_recorded_as_it_ran(plain: Any, part: str, inside: bool) -> None:
    model, seen, kept = plain
    heads = [2, 3] if part == "value" else [1, 2]  # a record has one value for each key head
    edit = ch.edits.Patch(seen, 1, heads, part, PLACES[part][0], PLACES[part][1])
    if inside:
        with ch.edit(model, edit), ch.watch(model, values=True) as ran:
            model(IDS)
    else:
        with ch.watch(model, values=True) as ran, ch.edit(model, edit):
            model(IDS)
    call, value = ran[1], ran[1].value.repeat_interleave(2, 1)
    if part == "output":  # an output is no product of weights
        assert torch.allclose(call.output[:, heads][:, :, [1, 4]], kept[1]["output"][:, heads][:, :, [1, 4]])
        return
    assert (call.weights.dense() @ value - call.output).abs().max() < 1e-12
    if part == "weights":
        assert torch.allclose(call.weights.dense()[:, heads][:, :, [1, 4]], kept[1]["weights"][:, heads][:, :, [1, 4]])


@torch.no_grad()
def test_frozen_weights_of_a_scaled_run_keep_its_factor(plain: Any) -> None:
    model, _, kept = plain
    with ch.edit(model, ch.edits.ScaleHeads(1, [1, 3], 0.5, queries=[1, 4])), ch.watch(model) as scaled:
        model(OTHER)

    def change(n: int, name: str, tensor: Tensor) -> Tensor:
        if n != 1 or name != "weights":
            return tensor
        new = tensor.clone()
        for head in (1, 2):
            new[:, head, 1:] = kept[1]["weights"][:, head, 1:]
        new[:, 1, [1, 4]] *= 0.5
        return new

    with ch.edit(model, ch.edits.Freeze(scaled, 1, [1, 2], queries=range(1, 6))):
        found = model(IDS)
    assert (found - model(IDS, change)).abs().max() < 1e-12
    with ch.edit(model, ch.edits.Freeze(scaled, 1, [1, 2])), ch.watch(model, values=True) as ran:
        model(IDS)
    value = ran[1].value.repeat_interleave(2, 1)
    assert (ran[1].weights.dense() @ value - ran[1].output).abs().max() < 1e-12


@torch.no_grad()
def test_what_a_record_cannot_hold_is_said(plain: Any) -> None:
    model, seen, _ = plain
    for edit in (ch.edits.Patch(seen, 1, 2, "value", keys=0), ch.edits.Patch(seen, 1, [2, 3], "value", queries=1)):
        with pytest.warns(UserWarning, match="not in the record.*value"):  # noqa: SIM117
            with ch.edit(model, edit), ch.watch(model, values=True) as ran:
                model(IDS)
        with pytest.raises(ch.ClearheadError, match="value"):
            ran["layers.1"]
        with ch.edit(model, edit), ch.watch(model) as ran:
            model(IDS)
        assert len(ran.calls) == 2


@torch.no_grad()
@pytest.mark.parametrize("heads", [None, [1, 2]])
def test_frozen_weights_of_a_model_with_sinks_that_returns_its_weights(heads: Any) -> None:
    model = pair("GptOss", OWN_EAGER["GptOss"])[0]
    with ch.watch(model, values=True) as seen:
        model(input_ids=OTHER)
    with ch.edit(model, ch.edits.Freeze(seen, 1, heads)), ch.watch(model, values=True) as ran:
        model(input_ids=IDS)
    some = slice(None) if heads is None else heads
    assert torch.allclose(ran[1].weights.dense()[:, some], seen[1].weights.dense()[:, some], atol=1e-6)
    value = ran[1].value.repeat_interleave(2, 1)
    assert torch.allclose(ran[1].weights.dense() @ value, ran[1].output, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["patch", "mean", "resample"])
def test_outputs_of_a_module_that_mixes_its_heads(kind: str) -> None:
    torch.manual_seed(0)
    block, x, other = nn.MultiheadAttention(16, 4, batch_first=True).eval(), torch.rand(2, 5, 16), torch.rand(2, 5, 16)
    with ch.watch(block, values=True) as seen:
        block(other, other, other)

    def heads(given: Tensor) -> Tensor:
        sides = F.linear(given, block.in_proj_weight, block.in_proj_bias).chunk(3, -1)
        q, k, v = (side.unflatten(-1, (4, -1)).transpose(1, 2) for side in sides)
        return (q @ k.mT / 2).softmax(-1) @ v

    there = heads(other)
    put = {"patch": there, "mean": there.mean((0, 2), keepdim=True).expand_as(there), "resample": there.flip(0)}[kind]
    wanted = heads(x)
    wanted[:, 1:3] = put[:, 1:3]
    edit = ch.edits.Patch(seen, heads=[1, 2]) if kind == "patch" else ch.edits.Ablate(None, [1, 2], kind, seen)
    with ch.edit(block, edit):
        found = block(x, x, x)[0]
    assert torch.allclose(found, block.out_proj(wanted.transpose(1, 2).flatten(2)), atol=1e-6)


def test_a_tensor_as_a_source_has_no_gradient(plain: Any) -> None:
    model, _, kept = plain
    for part in ("value", "weights"):
        source = kept[0][part].clone().requires_grad_()
        with ch.edit(model, ch.edits.Patch(source, 0, part=part)):
            model(IDS).sum().backward()
        assert source.grad is None
    model.zero_grad()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda seen: ch.edits.Patch(3), "expected a recording"),
        (lambda seen: ch.edits.Patch(seen, part="keys"), "expected one of"),
        (lambda seen: ch.edits.Patch(seen, keys=1), "part='key'"),
        (lambda seen: ch.edits.Patch(seen, positions=([1, 1], [2, 3])), "two lists"),
        (lambda seen: ch.edits.Patch(seen, part="weights", positions=([1], [2])), "all keys"),
        (lambda seen: ch.edits.Patch(torch.zeros(3)), r"expected \(B, H, L, E\)"),
        (lambda seen: ch.edits.Freeze(torch.ones(1, 4, 6, 6)), "sum to 1"),
        (lambda seen: ch.edits.Ablate(kind="mean"), "over=recording"),
        (lambda seen: ch.edits.Ablate(kind="zero", over=seen), "leave out over"),
        (lambda seen: ch.edits.Ablate(kind="mean", over=torch.zeros(1, 4, 6, 8)), "a tensor"),
    ],
)
def test_wrong_sources_are_refused_at_once(plain: Any, make: Any, words: str) -> None:
    with pytest.raises(ch.ClearheadError, match=words):
        make(plain[1])


@torch.no_grad()
@pytest.mark.parametrize(
    ("source", "words"),
    [
        (torch.zeros(2, 3, 6, 8, dtype=torch.float64), "4 query heads"),
        (torch.zeros(2, 4, 6, 8), "float32"),
    ],
)
def test_a_source_that_does_not_fit_is_told_before_anything_is_computed(plain: Any, source: Tensor, words: str) -> None:
    with pytest.raises(ch.ClearheadError, match=words), ch.edit(plain[0], ch.edits.Patch(source)):
        plain[0](IDS)
