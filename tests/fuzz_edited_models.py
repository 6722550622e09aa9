"""Random edits of transformers models, in one pass and in generations, beside a model whose attention is by hand.

    python tests/fuzz_edited_models.py 1000

runs a thousand; `--from` and `--only` are those of `fuzz.py`. A number names an architecture (grouped heads, windows,
softcap, sinks, ALiBi, relative biases, encoder and decoder), a backend, padding, a cache, beams, and one to three edits
with selectors of every kind. By hand is one pass without a cache over the whole sequence, the attention of plain torch
in float64: each row of a generation has its place in it. Compared are the outputs; the weights of each recorded call,
watched inside or around the edit; its output beside its weights and value; reductions kept at once; and a file.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fuzz_edits import Draw
from fuzzing import numbered
from torch import Tensor, nn

import clearhead as ch

os.environ["HF_HUB_OFFLINE"] = "1"
PROMPT, SOURCE, NEW, HEADS = 9, 7, 5, 4
SMALL = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": HEADS, "max_position_embeddings": 64}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = SMALL | TOKENS | {"num_key_value_heads": 2, "head_dim": 8}
MIXED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
SEQ2SEQ = {"vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": HEADS}
SEQ2SEQ |= {"decoder_attention_heads": HEADS, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 2}
SEQ2SEQ |= {"forced_eos_token_id": None}
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "Mistral": GROUPED | {"sliding_window": 4},
    "Gemma2": GROUPED | MIXED | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "Gemma3Text": GROUPED | MIXED,
    "GptOss": GROUPED | MIXED | {"num_local_experts": 2, "num_experts_per_tok": 2},
    "GPT2": TOKENS | {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": HEADS, "n_positions": 64},
    "Falcon": SMALL | TOKENS | {"alibi": True, "new_decoder_architecture": False, "multi_query": True},
}
BOTH: dict[str, dict[str, Any]] = {
    "Bart": SEQ2SEQ | TOKENS,
    "T5": TOKENS | {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": HEADS}
    | {"decoder_start_token_id": 0},
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {"Bert": SMALL | TOKENS}
# selectors of layers, each with the modules that it means by hand, numbered by the order of their first calls
ALONE: list[tuple[Any, set[int]]] = [
    (None, {0, 1}), (0, {0}), (1, {1}), (-1, {1}), (slice(None, 1), {0}), (slice(-1, None), {1}), ([0, -1], {0, 1}),
    ("L0", {0}), ("L[!0]", {1}), ("*.1.*", {1}), (["L1", 0], {0, 1}),
]  # fmt: skip
# modules 0 and 1 are the encoder's; layer 0 of the decoder is 2, with cross attention 3, and layer 1 is 4, with 5
STACKED: list[tuple[Any, set[int]]] = [
    (None, {0, 1, 2, 3, 4, 5}), (0, {0, 2, 3}), (1, {1, 4, 5}), (-2, {0, 2, 3}), (slice(1, None), {1, 4, 5}),
    ([0, -1], {0, 1, 2, 3, 4, 5}), ("encoder 0", {0}), ("encoder 1", {1}), ("decoder 0", {2}), ("decoder 1", {4}),
    ("decoder 0, cross", {3}), ("decoder 1, cross", {5}), ("*, cross", {3, 5}), ("decoder 1*", {4, 5}),
    ("*encoder.*", {0, 1}), (["encoder 0", "decoder 1, cross"], {0, 5}), (["decoder 0", -1], {1, 2, 4, 5}),
]  # fmt: skip
HEAD = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}


# Models ---------------------------------------------------------------------------------------------------------------


def model_of(name: str, number: int, backend: str) -> nn.Module:
    import transformers

    torch.manual_seed(number)
    options = (DECODERS | BOTH | ENCODERS)[name]
    end = "ForConditionalGeneration" if name in BOTH else "ForCausalLM"
    config = getattr(transformers, name + "Config")(**options, attn_implementation=backend)
    model: nn.Module = getattr(transformers, HEAD.get(name, name + end))(config).eval()
    with torch.no_grad():
        for part, weight in model.named_parameters():
            if weight.ndim > 1 and "embed" not in part and "lm_head" not in part and "shared" not in part:
                weight *= 2 if name == "T5" else 5  # else every row is nearly uniform, and a wrong one not seen
            if "sinks" in part:
                weight.normal_()
    return model


# By hand --------------------------------------------------------------------------------------------------------------


@dataclass
class Edited:
    """An edit, and what it does by hand: where, and what."""

    edit: ch.edits.Edit
    modules: set[int]  # by the order of their first calls
    heads: list[int]
    queries: Any
    kind: str
    what: Any = None  # keys, a factor, a bias or a mask of the whole

    def rows(self, queries: int, newest: np.ndarray) -> Tensor:
        return torch.tensor([_in(self.queries, i, int(newest[i])) for i in range(queries)])

    def columns(self, queries: int, keys: int, newest: np.ndarray) -> Tensor:
        return torch.tensor([[_in(self.what, j, int(newest[i])) for j in range(keys)] for i in range(queries)])


def _in(positions: Any, place: int, newest: int) -> bool:
    if positions is None:
        return True
    if isinstance(positions, slice):
        return place in range(newest)[positions]
    return place in [p + newest if p < 0 else p for p in np.atleast_1d(positions)]


@dataclass
class Hand:
    """Attention of plain torch, edited. `prompt`: positions that one call had; each later one had a call of its own."""

    edits: list[Edited]
    prompt: int
    encoders: int = 0  # how many modules come before those of the decoder
    numbers: dict[int, int] = field(default_factory=dict)
    weights: dict[int, Tensor] = field(default_factory=dict)
    chosen: set[int] = field(default_factory=set)  # the edits, by their places in the list, that choose some query
    reached: set[int] = field(default_factory=set)  # those that choose a pair that the mask allows

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float | None = None, softcap: float | None = None, position_bias: Tensor | None = None,
        causal: bool = False, **_: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        number = self.numbers.setdefault(id(module), len(self.numbers))
        queries, keys = query.shape[2], key.shape[2]
        groups = query.shape[1] // key.shape[1]
        q, k, v = (t.double() for t in (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
        scores = q @ k.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if position_bias is not None:
            scores = scores + position_bias.double()
        seen = torch.ones(1, 1, queries, keys, dtype=torch.bool)
        if causal:
            seen = seen.tril()
        if attention_mask is not None:
            assert attention_mask.shape[-2] in (1, queries)
            mask = attention_mask[..., :keys]
            if mask.dtype == torch.bool:
                seen = seen & mask
            else:
                seen = seen & (mask > torch.finfo(mask.dtype).min / 2)
                scores = scores + torch.where(seen, mask, 0.0).double()
        seen, factor = seen.expand_as(scores).clone(), torch.ones(1, *scores.shape[1:3], 1, dtype=torch.float64)
        at = np.arange(queries)
        decoding = queries > self.prompt and number >= self.encoders
        newest = np.maximum(at + 1, self.prompt) if decoding else np.full(queries, queries)
        known = newest if keys == queries else np.full(queries, keys)  # of the source all are known
        gone, allowed = torch.zeros_like(seen), seen.clone()
        for place, one in enumerate(self.edits):
            if number not in one.modules:
                continue
            rows = one.rows(queries, newest)
            pairs = allowed & rows[:, None]
            if one.kind in ("knockout", "after"):
                pairs = pairs & one.columns(queries, keys, known)
            self.chosen |= {place} if bool(rows.any()) else set()
            self.reached |= {place} if bool(pairs.any()) else set()
            here = torch.zeros(1, scores.shape[1], queries, 1, dtype=torch.bool)
            here[:, one.heads] = one.rows(queries, newest)[None, :, None]
            if one.kind == "knockout":
                seen &= ~(here & one.columns(queries, keys, known))
            elif one.kind == "after":
                gone |= here & one.columns(queries, keys, known)
            elif one.kind == "scale":
                factor = torch.where(here, factor * one.what, factor)
            elif one.kind == "bias":
                added = one.what[..., :queries, :keys].double()
                scores = torch.where(here, scores + added, scores)
            elif one.kind == "force":
                seen = torch.where(here, one.what[..., :queries, :keys], seen)
        scores = scores.masked_fill(~seen, -torch.inf)
        sinks = getattr(module, "sinks", None)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        weights = scores.softmax(-1).nan_to_num(0.0)[..., :keys].masked_fill(gone, 0.0) * factor
        self.weights[number] = weights
        return (weights @ v).to(query.dtype).transpose(1, 2).contiguous(), weights.to(query.dtype)


@contextlib.contextmanager
def by_hand(model: Any, hand: Hand) -> Iterator[None]:
    from transformers.modeling_utils import AttentionInterface

    before, original = model.config._attn_implementation, AttentionInterface.get_interface
    sdpa = F.scaled_dot_product_attention
    falcon = type(model).__name__.startswith("Falcon")
    model.set_attn_implementation("sdpa" if falcon else "eager")
    AttentionInterface.get_interface = lambda *_: hand  # type: ignore[method-assign]
    counted = iter(range(10**6))
    first = [object() for _ in range(2)]

    def instead(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
                is_causal: bool = False, scale: Any = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
        module: Any = first[next(counted) % 2]
        return hand(module, query, key, value, attn_mask, scale, causal=is_causal)[0].transpose(1, 2)

    if falcon:
        F.scaled_dot_product_attention = instead  # type: ignore[assignment]
    try:
        yield
    finally:
        AttentionInterface.get_interface, F.scaled_dot_product_attention = original, sdpa  # type: ignore[method-assign]
        model.set_attn_implementation(before)


# Edits ----------------------------------------------------------------------------------------------------------------


def positions(draw: Draw, count: int, ahead: bool) -> Any:
    """Some positions as a selector. `ahead`: also negative ones."""
    kinds = ["none", "number", "list", "slice", "step"] + (["negative", "open"] if ahead else [])
    kind = draw.one(*kinds)
    some = draw.some(count)
    return {
        "none": None,
        "number": some[0],
        "list": some,
        "slice": slice(some[0], some[-1] + 1),
        "step": slice(some[0], None, 2),
        "negative": [-int(draw.rng.integers(1, 4)), some[0]],
        "open": slice(-3, None),
    }[kind]


def edit(
    draw: Draw, layers: list[tuple[Any, set[int]]], whole: int, narrow: int, padded: bool, causal: bool, ahead: bool
) -> Edited:
    """`narrow`: the shortest of the sequences of queries and keys."""
    layer, modules = draw.one(*layers)
    kind = draw.one(None, "number", "negative", "slice", "list")
    some = draw.some(HEADS)
    heads = {"number": some[0], "negative": some[0] - HEADS, "slice": slice(some[0], None), "list": some}.get(kind)
    numbers = {"number": some[:1], "negative": some[:1], "slice": list(range(some[0], HEADS)), "list": some}.get(
        kind, list(range(HEADS))
    )
    queries, keys = positions(draw, narrow, ahead), positions(draw, narrow, ahead)
    at: dict[str, Any] = {"layers": layer, "heads": heads, "queries": queries}
    said = modules, numbers, queries
    kinds = ["knockout", "after", "scale", "bias", "alibi"] + ([] if padded or not causal else ["force", "window"])
    kind = draw.one(*kinds)
    every = draw.one(1, HEADS)
    if kind == "knockout":
        return Edited(ch.edits.Knockout(**at, keys=keys), *said, kind, keys)
    if kind == "after":
        return Edited(ch.edits.Knockout(**at, keys=keys, after=True), *said, kind, keys)
    if kind == "scale":
        factor = draw.one(0.0, 0.5, -1.5)
        return Edited(ch.edits.ScaleHeads(**at, factor=factor), *said, kind, factor)
    if kind == "bias":
        bias = draw.normal(1, every, whole, whole) * 2
        return Edited(ch.edits.AddBias(bias, **at), *said, "bias", bias)
    if kind == "alibi":
        slopes = torch.tensor([2 ** (-8 * (i + 1) / HEADS) for i in range(HEADS)]).view(1, -1, 1, 1)
        apart = (torch.arange(whole)[:, None] - torch.arange(whole)).abs()
        return Edited(ch.edits.AddBias(ch.ALiBi(HEADS), **at), *said, "bias", -slopes * apart)
    causal_ = torch.ones(whole, whole, dtype=torch.bool).tril()
    if kind == "force":
        keep = (draw.normal(1, every, whole, whole) > -0.3) & causal_
        return Edited(ch.edits.ForceMask(keep, **at), *said, "force", keep)
    keep = causal_ & torch.ones(whole, whole, dtype=torch.bool).triu(-2)
    return Edited(ch.edits.ForceMask(ch.Causal() & ch.SlidingWindow(before=2, after=0), **at), *said, "force", keep)


# One number -----------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    name: str
    model: Any
    edits: list[Edited]
    inputs: dict[str, Tensor]
    how: dict[str, Any] | None  # of generate(); None: one pass
    around: bool
    backend: str
    words: Tensor  # (B, prompt)

    def __str__(self) -> str:
        edits = ", ".join(f"{one.edit!r:.150}" for one in self.edits)
        how = "forward" if self.how is None else f"generate {self.how}"
        padded = "" if bool(self.words.all()) else f", words {self.words.sum(1).tolist()} of {self.words.shape[1]}"
        return f"{self.name} {self.backend} {how}{padded}{', watch around' if self.around else ''}: {edits}"


def drawn(number: int) -> Case:
    draw = Draw(number)
    name = draw.one(*DECODERS, *DECODERS, *BOTH, *BOTH, *ENCODERS)
    own = {"Gemma2": ["eager"], "GptOss": ["eager"], "Falcon": ["sdpa"]}
    backend = draw.one(*own.get(name, ["sdpa", "eager", "clearhead"]))
    model = model_of(name, number, "sdpa" if backend == "clearhead" else backend)
    if backend == "clearhead":
        ch.models.run_on_clearhead(model)
    length = SOURCE if name in BOTH else PROMPT
    ids = torch.randint(3, 60, (2, length), generator=draw.torch)
    words = torch.ones(2, length, dtype=torch.int64)
    generates = name not in ENCODERS and draw.rng.random() < 0.65
    if draw.rng.random() < 0.5:
        pads = draw.one(1, 3)
        if (generates and name in DECODERS) or draw.one(True, False):
            words[1, :pads] = 0
        else:
            words[1, -pads:] = 0
        ids = ids.masked_fill(words == 0, 0)
    inputs = {"input_ids": ids}
    padded = not bool(words.all())
    if padded or draw.one(True, False):
        inputs["attention_mask"] = words
    how: dict[str, Any] | None = None
    chunks = False
    if generates:
        caches: list[dict[str, Any]] = [{}, {"use_cache": False}]
        caches += [{"cache_implementation": "static"}] if name != "Falcon" else []  # transformers' own fails there
        caches += [{"prefill_chunk_size": 4}] if name in DECODERS and not padded else []
        how = dict(draw.one(*caches))
        chunks = "prefill_chunk_size" in how
        if draw.rng.random() < 0.3:
            how["num_beams"] = 3
    elif name in BOTH:
        inputs["decoder_input_ids"] = torch.randint(3, 60, (2, 6), generator=draw.torch)
    layers = STACKED if name in BOTH else ALONE
    narrow = {True: 6, False: PROMPT + (NEW if generates else 0)}[name in BOTH]
    whole = PROMPT + NEW + 1
    sliding = name in ("Mistral", "Gemma2", "Gemma3Text", "GptOss")
    causal = name in DECODERS and not (sliding and generates)
    ahead = not chunks and not (generates and how and how.get("use_cache") is False)
    edits = [edit(draw, layers, whole, narrow, padded, causal, ahead) for _ in range(draw.one(1, 1, 2, 3))]
    return Case(name, model, edits, inputs, how, draw.one(True, False), backend, words)


def run(case: Case) -> tuple[Any, Tensor]:
    """What the model gives, and the sequences that it has read."""
    if case.how is None:
        found = case.model(**case.inputs)
        return found, case.inputs["input_ids"]
    found = case.model.generate(
        **case.inputs, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, length_penalty=0.0,
        return_dict_in_generate=True, output_logits=True, output_scores=True, **case.how,
    )  # fmt: skip
    return found, found.sequences


def hand_run(case: Case, edits: list[Edited], sequences: Tensor) -> tuple[Tensor, Hand]:
    """The logits of all positions, and the weights, of one pass by hand."""
    inputs = dict(case.inputs)
    prompt = 10**6
    if case.how is not None:
        prompt = 1 if case.name in BOTH else PROMPT
        if case.how.get("use_cache") is False:
            prompt = 10**6
        if case.name in BOTH:
            inputs["decoder_input_ids"] = sequences[:, :-1]
        else:
            inputs["input_ids"] = sequences[:, :-1]
    words = case.words
    if "attention_mask" in inputs and case.name in DECODERS:
        words = F.pad(words, (0, inputs["input_ids"].shape[1] - words.shape[1]), value=1)
        inputs["attention_mask"] = words
        if case.how is not None:
            inputs["position_ids"] = (words.cumsum(1) - 1).clamp(min=0)
    hand = Hand(edits, prompt, 2 if case.name in BOTH else 0)
    with by_hand(case.model, hand):
        found = case.model(**inputs, use_cache=False) if case.name not in ENCODERS else case.model(**inputs)
    return found.logits, hand


def close(one: Tensor, other: Tensor, rows: Tensor | None = None) -> str | None:
    one, other = one.double(), other.double()
    if one.shape != other.shape:
        return f"shape {tuple(one.shape)} and {tuple(other.shape)}"
    if rows is not None:
        one, other = one[rows], other[rows]
    if torch.allclose(one, other, rtol=1e-3, atol=1e-3 * max(float(other.abs().max()), 1e-3)):
        return None
    return f"off by {float((one - other).abs().max()):.3g} of {float(other.abs().max()):.3g}"


def failures_of(number: int) -> Iterator[str]:
    case = drawn(number)
    said = f"{number}: {case}"
    try:
        with torch.no_grad():
            for failure in _failures(case, number):
                yield f"{said}: {failure}"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        yield f"{said}: {type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:300]}"


def _failures(case: Case, number: int) -> Iterator[str]:
    model, own = case.model, [one.edit for one in case.edits]
    before, _ = run(case)
    watching, editing = ch.watch(model, values=True), ch.edit(model, *own)
    try:
        with watching if case.around else editing as a, editing if case.around else watching as b:
            found, sequences = run(case)
    except ch.ClearheadError as error:
        if "changed nothing" not in str(error):
            raise
        yield from _of_nothing(case, str(error))
        return
    if missed := _missed(case, sequences):
        yield f"{missed[0].edit!r:.150} chooses no query of its layers, and no error says so"
    seen = a if case.around else b
    after, _ = run(case)
    one, two = (x.logits if case.how is None else torch.stack(x.logits) for x in (before, after))
    if not torch.equal(one, two):
        yield "the model was changed"
    logits, hand = hand_run(case, case.edits, sequences)
    beams = case.how is not None and "num_beams" in case.how
    words = case.words.bool()
    if case.how is None:
        rows = words if case.name not in BOTH else None
        if wrong := close(found.logits, logits, rows):
            yield f"logits {wrong}"
    elif beams:
        log = logits.log_softmax(-1)[:, -NEW:]
        total = log.gather(-1, sequences[:, -NEW:, None]).squeeze(-1).sum(1)
        if wrong := close(found.sequences_scores, total):
            yield f"scores of beams {wrong}"
    else:
        got = torch.stack(found.logits, 1)
        if wrong := close(got, logits[:, -NEW:]):
            yield f"logits {wrong}"
    # recordings
    for call in seen.calls:
        bad = close(call.weights @ call.value, call.output)
        if call.padding is not None and call.padding.queries is not None:
            ok = call.padding.queries[:, None, :, None].expand_as(call.output)
            bad = close((call.weights @ call.value)[ok], call.output[ok])
        if bad:
            yield f"{call.name}: weights @ value {bad}"
    if not beams:
        yield from _weights(case, seen, hand)
    with tempfile.TemporaryDirectory() as folder:
        again = ch.models.load_recording(seen.write(Path(folder) / "seen.safetensors"))
    for call, other in zip(seen.calls, again.calls, strict=True):
        if wrong := close(other.weights.dense(), call.weights.dense()):
            yield f"{call.name}: a file {wrong}"
    # reduced at once
    watching, editing = (
        ch.models.statistics(model, [ch.reductions.Received(), ch.reductions.Entropy()]),
        ch.edit(model, *own),
    )
    with watching if case.around else editing as a, editing if case.around else watching as b:
        run(case)
    kept = (a if case.around else b).calls
    for call, other in zip(seen.calls, kept, strict=True):
        for reduction, result in zip((call.weights.received, call.weights.entropy), other.results, strict=True):
            if wrong := close(torch.as_tensor(result).nan_to_num(-7), torch.as_tensor(reduction()).nan_to_num(-7)):
                yield f"{call.name}: {reduction.__name__} kept at once {wrong}"


def _missed(case: Case, sequences: Tensor) -> list[Edited]:
    """The edits whose layers have no query that they choose: nothing that ran can be what they mean."""
    _, hand = hand_run(case, case.edits, sequences)
    return [one for i, one in enumerate(case.edits) if i not in hand.chosen]


def _of_nothing(case: Case, said: str) -> Iterator[str]:
    """What is wrong with the error that an edit changed nothing: by hand that edit reaches a pair that is allowed."""
    try:
        with ch.edit(case.model, *(one.edit for one in case.edits)):
            _, sequences = run(case)  # the other edits may change the tokens
    except ch.ClearheadError as error:
        assert "changed nothing" in str(error)
    _, hand = hand_run(case, case.edits, sequences)
    named = [i for i, one in enumerate(case.edits) if said.startswith(f"{one.edit!r} changed nothing")]
    if all(i in hand.reached for i in named):
        yield f"{said:.200}, and by hand it reaches a pair that is allowed"


def _weights(case: Case, seen: Any, hand: Hand) -> Iterator[str]:
    order: dict[str, int] = {}
    at: dict[str, int] = {}
    for call in seen.calls:
        number = order.setdefault(call.name, len(order))
        wanted = hand.weights[number]
        queries, keys = call.query.shape[2], call.cached_key.shape[2]
        first = 0 if case.how is not None and case.how.get("use_cache") is False else at.get(call.name, 0)
        at[call.name] = first + queries
        cross = wanted.shape[2] != wanted.shape[3] or (call.kind == "cross")
        start = 0 if cross else max(first + queries - keys, 0)
        some = wanted[:, :, first : first + queries, start : start + keys]
        got = call.weights.dense()[..., : some.shape[-1]]
        rows = None
        if case.name not in BOTH or number < 2:
            words = F.pad(case.words, (0, wanted.shape[2] - case.words.shape[1]), value=1).bool()
            rows = words[:, first : first + queries]
            got, some = got.transpose(1, 2)[rows], some.transpose(1, 2)[rows]
        if wrong := close(got, some):
            yield f"{call.name}, queries from {first}, keys from {start}: recorded weights {wrong}"
        rest = call.weights.dense()[..., some.shape[-1] :]
        if rest.numel() and bool((rest != 0).any()):
            yield f"{call.name}: weights of empty slots"


def main() -> int:
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # these models are so small that threads of PyTorch's cost several times their work
    return numbered.main(failures_of, "edited models", __doc__)


if __name__ == "__main__":
    sys.exit(main())
