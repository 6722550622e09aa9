"""Circuits and logit attributions, against hooks of our own in plain PyTorch on seven architectures."""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_models import MODELS, pair
from torch import nn
from transformers import (
    BertConfig,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import clearhead as ch

HEADS, WIDTH = 4, 32
SAME = {
    "vocab_size": 40,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
}
IDS = torch.tensor([[1, 5, 9, 2, 7, 3], [4, 4, 8, 6, 0, 11]])


class Read(NamedTuple):
    """What the oracle reads of an architecture, by the names of its modules."""

    make: Any
    inputs: dict[str, torch.Tensor]
    side: Any  # model, layer, "q" "k" "v" "o" -> weight
    writes: Any  # model, layer -> the module that is given the heads
    norms: Any  # model, layer -> norms that a head's result goes through
    unembed: Any  # model -> (weight, factor)


def conv(module: nn.Module, number: int) -> torch.Tensor:
    return module.weight.T.chunk(3)[number]


def of_llama(config: Any, cls: Any) -> Read:
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
    return Read(
        lambda: cls(config),
        {"input_ids": IDS},
        lambda m, n, s: getattr(m.model.layers[n].self_attn, names[s]).weight,
        lambda m, n: m.model.layers[n].self_attn.o_proj,
        lambda m, n: [m.model.norm],
        lambda m: (m.lm_head.weight, 1.0),
    )


def of_bert(m: Any, n: int, s: str) -> torch.Tensor:
    layer = m.bert.encoder.layer[n].attention
    one = {"q": layer.self.query, "k": layer.self.key, "v": layer.self.value, "o": layer.output.dense}[s]
    return one.weight


def bert_norms(m: Any, n: int) -> list[nn.Module]:
    layers = m.bert.encoder.layer
    found = [layers[n].attention.output.LayerNorm, layers[n].output.LayerNorm]
    for later in layers[n + 1 :]:
        found += [later.attention.output.LayerNorm, later.output.LayerNorm]
    return found


def of_vit(m: Any, n: int, s: str) -> torch.Tensor:
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
    return getattr(m.vit.layers[n].attention, names[s]).weight


ARCHITECTURES = {
    "llama": of_llama(LlamaConfig(**SAME, num_key_value_heads=2), LlamaForCausalLM),
    "qwen3": of_llama(Qwen3Config(**SAME, num_key_value_heads=2, head_dim=16), Qwen3ForCausalLM),
    "mixtral": of_llama(
        MixtralConfig(**SAME, num_key_value_heads=2, experts_implementation="eager"), MixtralForCausalLM
    ),
    "gpt2": Read(
        lambda: GPT2LMHeadModel(
            GPT2Config(
                vocab_size=40, n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=16, bos_token_id=1, eos_token_id=2
            )
        ),
        {"input_ids": IDS},
        lambda m, n, s: m.transformer.h[n].attn.c_proj.weight.T
        if s == "o"
        else conv(m.transformer.h[n].attn.c_attn, "qkv".index(s)),
        lambda m, n: m.transformer.h[n].attn.c_proj,
        lambda m, n: [m.transformer.ln_f],
        lambda m: (m.lm_head.weight, 1.0),
    ),
    "t5": Read(
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=40, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=2, num_heads=HEADS)
        ),
        {"input_ids": IDS, "decoder_input_ids": IDS[:, :4]},
        lambda m, n, s: getattr(m.decoder.block[n].layer[0].SelfAttention, s).weight,
        lambda m, n: m.decoder.block[n].layer[0].SelfAttention.o,
        lambda m, n: [m.decoder.final_layer_norm],
        lambda m: (m.lm_head.weight, WIDTH**-0.5 if m.config.tie_word_embeddings else 1.0),
    ),
    "bert": Read(
        lambda: BertForTokenClassification(BertConfig(**SAME, num_labels=5)),
        {"input_ids": IDS},
        of_bert,
        lambda m, n: m.bert.encoder.layer[n].attention.output.dense,
        bert_norms,
        lambda m: (m.classifier.weight, 1.0),
    ),
    "vit": Read(
        lambda: ViTForImageClassification(
            ViTConfig(
                hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=HEADS, image_size=16,
                patch_size=8, num_labels=5,
            )
        ),
        {"pixel_values": torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))},
        of_vit,
        lambda m, n: m.vit.layers[n].attention.o_proj,
        lambda m, n: [m.vit.layernorm],
        lambda m: (m.classifier.weight, 1.0),
    ),
}  # fmt: skip
BUDGET = {torch.float32: 1e-5, torch.float64: 1e-9}


def made(read: Read, dtype: torch.dtype) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    model = read.make().eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms that are not 0 and 1
            parameter += 0.1 * torch.randn_like(parameter)
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in read.inputs.items()}
    return model, inputs


def layer_name(name: str, n: int) -> int | str:
    return f"decoder {n}" if name == "t5" else n


@pytest.mark.parametrize("dtype", list(BUDGET))
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_projections_are_the_models_own(name: str, dtype: torch.dtype) -> None:
    read = ARCHITECTURES[name]
    model, inputs = made(read, dtype)
    found = ch.models.circuits(model, inputs)
    for n in range(2):
        for head in range(HEADS):
            mine = found.projections(layer_name(name, n), head)
            for side, one in zip("qkv", mine[:3], strict=True):
                weight = read.side(model, n, side)
                count = 2 if name in ("llama", "qwen3", "mixtral") and side != "q" else HEADS
                assert torch.equal(one.weight, weight.unflatten(0, (count, -1))[head * count // HEADS])
            assert torch.equal(mine.output.weight, read.side(model, n, "o").unflatten(1, (HEADS, -1))[:, head])
            # the products, their norms and their spectra against the whole matrices
            qk = mine.query.weight.double().T @ mine.key.weight.double()
            ov = mine.output.weight.double() @ mine.value.weight.double()
            for whole, low in ((qk, found.qk(layer_name(name, n), head)), (ov, found.ov(layer_name(name, n), head))):
                budget = BUDGET[dtype] * float(whole.abs().max().clamp_min(1.0)) * 10
                assert (low.dense().double() - whole).abs().max() <= budget
                rank = low.left.shape[1]
                values = torch.linalg.svdvals(whole)
                assert (low.svd().S.double() - values[:rank]).abs().max() <= budget
                assert (low.norm().double() - torch.linalg.matrix_norm(whole)).abs() <= budget
                u, s, vh = low.svd()
                assert ((u * s) @ vh - low.dense()).abs().max() <= budget
                mine_trace, theirs = low.eigenvalues().sum().real.double(), whole.trace()
                assert (mine_trace - theirs).abs() <= budget * WIDTH


@torch.no_grad()
def test_a_factor_of_the_queries_is_in_their_projection() -> None:
    """OPT multiplies its queries by 1/√E, and calls attention with a scale of 1."""
    torch.manual_seed(0)
    config = OPTConfig(vocab_size=40, hidden_size=64, ffn_dim=32, num_hidden_layers=2, num_attention_heads=HEADS,
                       word_embed_proj_dim=64, max_position_embeddings=16)  # fmt: skip
    model = OPTForCausalLM(config).eval().double()
    kept: list[torch.Tensor] = []
    attend = model.model.decoder.layers[1].self_attn
    for parameter in attend.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    attend.register_forward_pre_hook(lambda module, args, given: kept.append(given["hidden_states"]), with_kwargs=True)
    with ch.watch(model, values=True) as seen:
        model(IDS)
    found = ch.models.circuits(seen)
    x, call = kept[0], seen[1]
    scale = call.problem.scores.scale
    assert scale == 1.0
    for head in range(HEADS):
        rows = slice(16 * head, 16 * head + 16)
        query, key = found.projections(1, head)[:2]
        assert torch.equal(query.weight, attend.q_proj.weight[rows] / 4)
        assert torch.equal(query.bias, attend.q_proj.bias[rows] / 4)
        assert torch.equal(key.weight, attend.k_proj.weight[rows])
        scores = F.linear(x, query.weight, query.bias) @ F.linear(x, key.weight, key.bias).mT * scale
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        assert (weights - call.weights[:, head]).abs().max() < 1e-10


class Turned(ch.edits.Edit):
    """The queries of another sequence."""

    def before(self, problem: Any, spot: Any) -> Any:
        return problem._replace(scores=problem.scores._replace(query=problem.query.flip(0)))


@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("name", [*ARCHITECTURES, "torch", "own"])
@torch.no_grad()
def test_circuits_of_a_recording_are_those_of_the_model(name: str, edited: bool) -> None:
    """Also where an edit changed the numbers that the layers gave."""
    if name in ARCHITECTURES:
        model, inputs = made(ARCHITECTURES[name], torch.float64)
    else:
        torch.manual_seed(0)
        x = torch.randn(2, 5, WIDTH)
        inputs = (x, x, x)  # type: ignore[assignment]
        model = (
            nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            if name == "torch"
            else ch.nn.MultiHeadAttention(WIDTH, HEADS)
        ).eval()
    wanted = ch.models.circuits(model, inputs)
    edits = Turned(heads=1), ch.edits.ScaleHeads(heads=2, factor=0.5)
    with ch.edit(model, *edits) if edited else contextlib.nullcontext(), ch.watch(model, values=True) as seen:
        model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        inside = ch.models.circuits(model, inputs)
    found = ch.models.circuits(seen)
    assert found.layers == wanted.layers == inside.layers
    for layer in found.layers:
        mine, theirs, there = (one.projections(layer, 1) for one in (found, wanted, inside))
        for side in ("query", "key", "value", "output"):
            assert torch.equal(getattr(mine, side).weight, getattr(theirs, side).weight)
            assert torch.equal(getattr(there, side).weight, getattr(theirs, side).weight)
        assert mine.between == theirs.between or name == "own"


@torch.no_grad()
def test_a_recording_without_layers_is_told(tmp_path: Any) -> None:
    model, inputs = made(ARCHITECTURES["llama"], torch.float32)
    with ch.watch(model) as bare:
        model(**inputs)
    with ch.watch(model, values=True) as seen:
        model(**inputs)
    stored = ch.models.load_recording(seen.write(tmp_path / "seen"))
    for recording in (bare, stored):
        with pytest.raises(ch.ClearheadError, match="has no layers around its calls"):
            ch.models.circuits(recording)
    for wrong in ((seen, inputs), (model,), (3,)):
        with pytest.raises(ch.ClearheadError, match="takes a model and inputs"):
            ch.models.circuits(*wrong)  # type: ignore[arg-type]
    model.model.layers[0].self_attn.q_proj.weight.mul_(2)
    with pytest.raises(ch.ClearheadError, match="weights or the input of q_proj were written to"):
        ch.models.circuits(seen).qk(0, 0)


@pytest.mark.parametrize("dtype", list(BUDGET))
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5", "vit"])
def test_norms_are_of_what_each_head_writes_for_a_key(name: str, dtype: torch.dtype) -> None:
    read = ARCHITECTURES[name]
    model, inputs = made(read, dtype)
    given: dict[nn.Module, torch.Tensor] = {}  # the heads, as the layer that writes them is given them
    writers = {read.writes(model, n): n for n in range(2)}
    for module in writers:
        module.register_forward_pre_hook(lambda module, args: given.update({module: args[0]}))
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        model(**inputs)
    for call in seen:
        module = next(
            (one for one in writers if one.weight.data_ptr() == call.output_projection.weight.data_ptr()), None
        )
        if module is None:
            assert name == "t5" and (call.kind == "cross" or call.name.startswith("encoder"))
            continue
        n = writers.pop(module)
        weight = read.side(model, n, "o").detach()
        value = call.value.repeat_interleave(HEADS // call.value.shape[1], 1)
        heads, dense = given[module].unflatten(-1, (HEADS, -1)).transpose(1, 2), call.weights.dense()
        torch.testing.assert_close(dense @ value, heads, rtol=1e-4, atol=1e-5)  # so these values are what W_O is given
        # each pair's vector in full, as it is added to the layer's result
        parts = torch.einsum("bhqk,bhke,ohe->bhqko", dense, value, weight.unflatten(1, (HEADS, -1)))
        norms = parts.norm(dim=-1)
        scale = BUDGET[dtype] * float(norms.max())
        assert (dense * call.transformed_norms[:, :, None] - norms).abs().max() <= scale
        assert (call.weighted_transformed_norms - norms.sum(-1)).abs().max() <= scale
        assert (call.result_norms - parts.sum(3).norm(dim=-1)).abs().max() <= scale
        assert (dense * call.value_norms[:, :, None] - norms).abs().max() > 100 * scale  # which is another number
        row = next(row for row in ch.models.Recording([call]).table() if row["head"] == 1)
        assert math.isclose(row["weighted transformed norm"], float(norms.sum(-1)[:, 1].mean()), rel_tol=1e-4)
    assert not writers


class Joined(nn.Module):
    """Attention by hand of two heads side by side. `between`: what is computed before the last layer."""

    def __init__(self, between: Any, last: Any = nn.Linear) -> None:
        super().__init__()
        self.inner, self.last, self.between = nn.Linear(8, 8), last(8, 8), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.inner(x).unflatten(-1, (2, 4)).transpose(1, 2)
        result = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        return self.last(self.between(x, result))


X8 = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
UNKNOWN = {
    "a gate": Joined(lambda x, result: result * x.sigmoid()),
    "no layer": nn.Sequential(Joined(lambda x, result: result, lambda *_: nn.Identity()), nn.ReLU()),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_norms_of_heads_that_no_layer_is_given_are_an_error(kind: str) -> None:
    with torch.no_grad(), ch.watch(UNKNOWN[kind], values=True) as seen:
        UNKNOWN[kind](X8)
    for name in ("transformed_norms", "weighted_transformed_norms", "result_norms"):
        with pytest.raises(ch.UnsupportedError, match="no linear layer was given its heads"):
            getattr(seen[0], name)
    assert "weighted value norm" in seen.table()[0] and "weighted transformed norm" not in seen.table()[0]


def test_norms_need_the_weights_of_the_run(tmp_path: Any) -> None:
    model = Joined(lambda x, result: result)
    with ch.watch(model, values=True) as seen:
        model(X8)
    norms = seen[0].transformed_norms
    wanted = seen[0].value @ model.last.weight.detach().unflatten(1, (2, 4)).permute(1, 2, 0)
    torch.testing.assert_close(norms, wanted.norm(dim=-1))
    with pytest.raises(ch.ClearheadError, match="A file has none"):
        _ = ch.models.load_recording(seen.write(tmp_path / "seen.safetensors"))[0].transformed_norms
    with torch.no_grad():
        model.last.weight.mul_(2)
    with pytest.raises(ch.ClearheadError, match="weights of last, which writes its heads, were written to"):
        _ = seen[0].transformed_norms
    assert "weighted transformed norm" not in seen.table()[0]


@pytest.mark.parametrize("need_weights", [False, True])
def test_norms_of_modules_that_hold_their_own_projection(need_weights: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    own = ch.nn.MultiHeadAttention(8, 2)
    with torch.no_grad():
        with ch.watch(layer, values=True) as fast:  # one function computes the whole layer
            layer(X8)
        with ch.watch(layer.self_attn, values=True) as seen:
            layer.self_attn(X8, X8, X8, need_weights=need_weights)
        with ch.watch(own, values=True) as of_own:
            own(X8, X8, X8)
        value = F.linear(X8, layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias).chunk(3, -1)[2]
        wanted = value.unflatten(-1, (2, 4)).transpose(1, 2) @ layer.self_attn.out_proj.weight.unflatten(
            1, (2, 4)
        ).permute(1, 2, 0)
        for call in (fast[0], seen[0]):
            torch.testing.assert_close(call.transformed_norms, wanted.norm(dim=-1))
            torch.testing.assert_close(call.result_norms, (call.weights.dense() @ wanted).norm(dim=-1))
        wanted = own.W_v(X8).unflatten(-1, (2, 4)).transpose(1, 2) @ own.W_o.weight.unflatten(1, (2, 4)).permute(
            1, 2, 0
        )
        torch.testing.assert_close(of_own[0].transformed_norms, wanted.norm(dim=-1))


ONE = [1, -1, np.int64(1), torch.tensor(1), "L1", "*.h.1.attn", slice(1, None), [1], ["L1"]]


@pytest.mark.parametrize("which", ONE, ids=str)
def test_a_layer_and_a_head_are_chosen_as_everywhere(which: Any) -> None:
    """By a number, a slice, a list or a name in circuits, explanations, pages and pictures alike."""
    model, inputs = made(ARCHITECTURES["gpt2"], torch.float32)
    found = ch.models.circuits(model, inputs)
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        model(**inputs)
    assert torch.equal(found.qk(which, 2).dense(), found.qk(1, 2).dense())
    assert seen.explain(which, 2, 3).title == seen.explain(1, 2, 3).title
    assert [label for label, _ in seen.view(which).page.shown] == ["L1"]
    assert seen.plot(which, 2).get_title().startswith("L1H2")
    if not isinstance(which, str) and which != ["L1"]:  # heads, queries and keys have numbers alone
        number = 3 if which == -1 else 1
        head = slice(1, 2) if isinstance(which, slice) else which
        weights, wanted = (seen.explain(1, one, 3, 2)["weights"] for one in (head, number))
        assert torch.equal(weights, wanted)
    with pytest.raises(ch.ClearheadError, match="which means 2 heads; pass one of them"):
        found.ov(1, [0, 1])


def test_lists_of_an_explanation_have_even_steps() -> None:
    model, inputs = made(ARCHITECTURES["gpt2"], torch.float32)
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        model(**inputs)
    assert torch.equal(
        seen.explain(1, [0, 2], [1, 3, 5])["weights"], seen.explain(1, slice(0, 3, 2), slice(1, 6, 2))["weights"]
    )
    for wrong, said in (([0, 1, 3], "a list with even steps"), ([9], "and there are 4"), ([], "expected a number")):
        with pytest.raises(ch.ClearheadError, match=said):
            seen.explain(1, wrong, 0)


@pytest.mark.parametrize("through", ["query", "key", "value"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "bert"])
def test_composition_is_that_of_whole_matrices(name: str, through: str) -> None:
    model, inputs = made(ARCHITECTURES[name], torch.float64)
    found = ch.models.circuits(model, inputs)
    table = found.composition(through)
    assert len(table) == HEADS**2 and all(a["composition"] >= b["composition"] for a, b in itertools.pairwise(table))
    for row in table:
        assert (row["layer"], row["with layer"]) == (1, 0)
        ov = found.ov(0, row["with head"]).dense()
        reads = found.ov(1, row["head"]) if through == "value" else found.qk(1, row["head"])
        whole = reads.dense().T if through == "query" else reads.dense()
        norm = torch.linalg.matrix_norm
        assert math.isclose(row["composition"], float(norm(whole @ ov) / (norm(whole) * norm(ov))), rel_tol=1e-9)


def test_composition_needs_the_residual_stream() -> None:
    found = ch.models.circuits(pair("DeepseekV3", MODELS["DeepseekV3"])[0], {"input_ids": IDS})
    with pytest.raises(ch.UnsupportedError, match="not the residual stream"):
        found.composition("value")


def linear_norm(module: nn.Module, given: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A part of a norm's input through the norm, at the norm's size for the whole input."""
    centred = isinstance(module, nn.LayerNorm)
    eps = module.eps if centred else module.variance_epsilon
    whole = given - given.mean(-1, keepdim=True) if centred else given
    size = (whole.square().mean(-1, keepdim=True) + eps).sqrt()
    return (part - part.mean(-1, keepdim=True) if centred else part) / size * module.weight


@pytest.mark.parametrize("dtype", list(BUDGET))
@pytest.mark.parametrize("name", list(ARCHITECTURES))
@torch.no_grad()
def test_what_heads_add_is_what_hooks_find(name: str, dtype: torch.dtype) -> None:
    read = ARCHITECTURES[name]
    model, inputs = made(read, dtype)
    given: dict[int, torch.Tensor] = {}
    modules = [read.writes(model, n) for n in range(2)] + [norm for n in range(2) for norm in read.norms(model, n)]
    handles = [m.register_forward_pre_hook(lambda m, args: given.__setitem__(id(m), args[0].detach())) for m in modules]
    logits = model(**inputs).logits
    for handle in handles:
        handle.remove()
    token, against, place = 3, 1, 0 if name == "vit" else -1
    found = ch.models.logit_attribution(model, inputs, token=token, against=against, position=place)
    chosen = logits if logits.ndim == 2 else logits[:, place]
    assert torch.allclose(found.logit, chosen[:, token] - chosen[:, against], rtol=1e-5, atol=1e-6)
    weight, factor = read.unembed(model)
    for n in range(2):
        heads = given[id(read.writes(model, n))].unflatten(-1, (HEADS, -1))
        parts = torch.einsum("blhe,dhe->bhld", heads, read.side(model, n, "o").unflatten(1, (HEADS, -1)))
        for norm in read.norms(model, n):
            parts = linear_norm(norm, given[id(norm)].unsqueeze(1), parts)
        wanted = factor * parts[:, :, place] @ (weight[token] - weight[against])
        call = next(c for c in found if str(c.layer) == (f"decoder {n}" if name == "t5" else f"L{n}"))
        budget = BUDGET[dtype] * float(wanted.abs().max().clamp_min(1.0))
        assert (call.heads - wanted).abs().max() <= budget
        assert (call.positions.sum(-1) - wanted).abs().max() <= budget
        assert (call.sources.sum(-1) - wanted).abs().max() <= budget
    if name in ("llama", "qwen3", "mixtral", "t5"):  # nothing has a bias: all parts are found
        largest = max(float(part.abs().max()) for part in [*found.others.values(), *(call.heads for call in found)])
        assert found.remainder.abs().max() <= 1e-6 * max(largest, 1.0)  # their RMS norms round to float32
    elif name != "bert":  # biases of norms and of the unembedding are left: they are the same for each sequence
        assert (found.remainder[0] - found.remainder[1]).abs() <= BUDGET[dtype] * 10


class Mixed(nn.Module):
    """Two residual streams, which a layer with a matrix of its own mixes, as in hyper-connections."""

    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(0.3 * torch.randn(4, 2 * WIDTH))

        def forward(self, streams: torch.Tensor) -> torch.Tensor:
            return (streams.flatten(2) @ self.matrix.T).unflatten(-1, (2, 2)).tanh()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixes, self.attend = Mixed.Mixes(), ch.nn.MultiHeadAttention(WIDTH, HEADS, bias=False)
            self.two = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, streams: torch.Tensor) -> torch.Tensor:
            x = streams.sum(2)
            wrote = self.attend(x, x, x) + self.two(x.relu())
            return self.mixes(streams) @ streams + wrote.unsqueeze(2)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(40, WIDTH), nn.ModuleList(Mixed.Block() for _ in range(2))
        self.choose = nn.Linear(WIDTH, 40, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        streams = self.embed(ids).unsqueeze(2).expand(-1, -1, 2, -1)
        for block in self.blocks:
            streams = block(streams)
        logits: torch.Tensor = self.choose(streams.sum(2))
        return logits


def test_what_mixes_streams_is_no_part_of_a_logit() -> None:
    torch.manual_seed(0)
    model = Mixed().double().eval()
    found = ch.models.logit_attribution(model, (IDS,), 3)
    assert not any("mixes" in name for name in found.others) and len(found.calls) == 2
    assert found.remainder.abs().max() < 1e-12
    heads = found[0].heads.sum(1)  # what layer 0 wrote, through the mixture of layer 1 at its numbers of this run
    kept = {}
    hooks = [model.blocks[0].attend.register_forward_hook(lambda m, a, out: kept.__setitem__("wrote", out.detach()))]
    hooks += [model.blocks[1].mixes.register_forward_hook(lambda m, a, out: kept.__setitem__("mix", out.detach()))]
    with torch.no_grad():
        model(IDS)
    for hook in hooks:
        hook.remove()
    through = kept["mix"][:, -1].sum(1).sum(-1, keepdim=True) * kept["wrote"][:, -1]
    assert torch.allclose(heads, through @ model.choose.weight[3], rtol=1e-10)


def test_the_parts_of_a_post_norm_model_sum_to_its_logit_without_biases() -> None:
    model, inputs = made(ARCHITECTURES["bert"], torch.float64)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.bias.zero_()
        model.classifier.bias.zero_()
    found = ch.models.logit_attribution(model, inputs, token=2, position=[1, 4])
    assert found.remainder.abs().max() < 1e-9
    with torch.no_grad():
        logits = model(**inputs).logits
    assert torch.allclose(found.logit, torch.stack([logits[0, 1, 2], logits[1, 4, 2]]))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(found.transpose(1, 2).flatten(2))


class OwnBlock(nn.Module):
    """`form`: what stands between the layers and the residual stream."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.heads, self.norm = form, Heads(), nn.LayerNorm(WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 48, bias=False), nn.Linear(48, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 1 if form == "gate of one number" else WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        written = self.heads(self.norm(x))
        if self.form == "in place":
            written *= 0.5
            written += x
            x = written
        else:
            x = x + written
        given = self.norm(x)
        added = self.down(F.gelu(self.up(given)))
        if self.form.startswith("gate"):
            added = torch.sigmoid(self.gate(given)) * added
        return x + added


class OwnModel(nn.Module):
    """A model of our own without biases: its blocks, the norm and the unembedding in several forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.embed = form, nn.Embedding(40, WIDTH)
        blocks = [OwnBlock(form) for _ in range(2)]
        if "words" in form:
            self.first, self.second = blocks
        else:
            self.layers = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.unembed: Any = (
            nn.Parameter(torch.rand(WIDTH, 40)) if "matrix" in form else nn.Linear(WIDTH, 40, bias=False)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in (self.first, self.second) if "words" in self.form else self.layers:
            x = block(x)
        if self.form == "a norm by hand":
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        elif self.form == "a norm by powers":
            x = (x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True) + 1e-6) ** -0.5
        elif self.form == "a norm of torch.nn.functional":
            x = F.layer_norm(x, (WIDTH,), self.norm.weight)
        else:
            x = self.norm(x)
        if "tied" in self.form:
            return F.linear(x, self.embed.weight)
        return x @ self.unembed if "matrix" in self.form else self.unembed(x)


FORMS = ["plain", "matrix", "words", "words, tied", "tied", "in place", "gate of one number", "gate", "a norm by hand"]
FORMS += ["a norm by powers", "a norm of torch.nn.functional", "inside a list", "inference mode"]


@pytest.mark.parametrize("form", FORMS)
def test_the_parts_sum_to_the_logit_in_models_of_every_form(form: str) -> None:
    torch.manual_seed(2)
    model: nn.Module = OwnModel(form).eval().double()
    given: dict[str, torch.Tensor] = {}
    hook = model.norm.register_forward_pre_hook(lambda m, args: given.__setitem__("x", args[0].detach()))
    blocks = [model.first, model.second] if "words" in form else list(model.layers)
    hooks = [hook, *(
        block.heads.o.register_forward_hook(lambda m, args, out, n=n: given.__setitem__(n, out.detach().clone()))
        for n, block in enumerate(blocks)
    )]  # fmt: skip
    with torch.no_grad():
        model(IDS)
    for one in hooks:
        one.remove()
    whole = nn.Sequential(model).eval() if form == "inside a list" else model
    with torch.inference_mode(form == "inference mode"):
        found = ch.models.logit_attribution(whole, IDS, token=7)
    assert len(found.calls) == 2 and found.remainder.abs().max() < 1e-9
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in whole.modules())
    if form in ("plain", "inside a list", "gate", "inference mode"):  # what a head adds goes through the norm alone
        for n, call in enumerate(found):
            part = F.linear(linear_norm(model.norm, given["x"], given[n]), model.unembed.weight)[:, -1, 7]
            assert torch.allclose(call.heads.sum(1), part, rtol=1e-6)


def test_a_model_without_gradients_is_told() -> None:
    model = OwnModel("plain").eval()
    model.forward = torch.no_grad()(model.forward)
    with pytest.raises(ch.ClearheadError, match="no_grad"):
        ch.models.logit_attribution(model, IDS, token=7)


def test_a_norm_beside_the_residual_stream_is_no_error() -> None:
    class OddNorm(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / (1 + x.abs().amax(-1, keepdim=True))

    torch.manual_seed(2)
    model = OwnModel("plain").eval().double()
    model.layers[0].heads.q = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), OddNorm()).eval().double()
    found = ch.models.logit_attribution(model, IDS, token=7)
    assert len(found.calls) == 2 and found.remainder.abs().max() < 1e-9
    model.norm = OddNorm().eval()
    with pytest.raises(ch.UnsupportedError, match="OddNorm in the residual stream"):
        ch.models.logit_attribution(model, IDS, token=7)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
