"""49 planted faults: for each a faulty model and its healthy twin, and the mask that a user expects."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.models.bloom import modeling_bloom
from transformers.models.doge import modeling_doge
from transformers.models.roformer import modeling_roformer

import clearhead as ch
from audits.faulty_models import (
    GROUPED,
    LENGTH,
    SMALL,
    EncoderAndDecoder,
    EncoderOfTorch,
    HandWrittenGPT,
    ShiftedPositions,
    expect_of_bart,
    make_llama,
    make_model,
    register_backend,
    replaced,
)

IDS = torch.randint(3, 200, (2, LENGTH), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.cat([torch.arange(5), torch.arange(8)]).expand(2, -1).contiguous()
DOCUMENTS = torch.tensor([0] * 5 + [1] * 8).expand(2, -1).contiguous()
LEFT = torch.ones(2, LENGTH, dtype=torch.long)
LEFT[0, :4] = 0
RIGHT = LEFT.flip(1).contiguous()

PLAIN = {"input_ids": IDS, "use_cache": False}
PACKED = {**PLAIN, "position_ids": POSITIONS}
OWN = {"input_ids": IDS}
OWN_PACKED = {"input_ids": IDS, "documents": DOCUMENTS}

CAUSAL = ch.Causal()
IN_DOCUMENTS = CAUSAL & ch.Documents.from_lengths([5, 8])
WINDOW = CAUSAL & ch.SlidingWindow(before=2)
PREFIX = ch.PrefixLM(4)
PAIRS = IN_DOCUMENTS.dense(LENGTH, LENGTH).expand(2, 1, -1, -1)
PREFIX_PAIRS = PREFIX.dense(LENGTH, LENGTH).expand(2, 1, -1, -1)


@dataclass
class Fault:
    """A planted fault. `make(faulty)` gives the model and its batch.

    `mask`, `padding`: what a user passes to `audit`. `code`: of a finding that names the cause; None where no test can
    name it. `changed(faulty)`: a context in which a library has the fault.
    """

    name: str
    make: Callable[[bool], tuple[Any, dict[str, Any]]]
    mask: Any = CAUSAL
    code: str | None = None
    padding: torch.Tensor | None = None
    changed: Callable[[], AbstractContextManager[Any]] = nullcontext


def on_backend(name, make, batch, fault, **more):
    """A fault of the backend that a model of transformers runs on."""
    return Fault(name, lambda faulty: (make(register_backend(fault if faulty else "")), batch), **more)


def in_batch(name, make, faulty_batch, batch, **more):
    """A fault of the batch."""
    return Fault(name, lambda faulty: (make(), faulty_batch if faulty else batch), **more)


def by_hand(name, fault, healthy="", batch=OWN, **more):
    """A fault of a hand-written model."""
    return Fault(name, lambda faulty: (HandWrittenGPT(fault if faulty else healthy).eval(), batch), **more)


def make_mistral(backend="sdpa", window=3):
    return make_model("Mistral", backend, **SMALL, **GROUPED, sliding_window=window)


def make_gemma3(kinds):
    options = SMALL | GROUPED | {"num_hidden_layers": len(kinds)}
    return make_model("Gemma3Text", **options, sliding_window=3, layer_types=[f"{kind}_attention" for kind in kinds])


def make_with_batch_norm(faulty):
    """A batch norm that was left in train mode, or not."""
    model = HandWrittenGPT("batch norm").eval()
    model.blocks[1].mixer.train(faulty)
    return model, OWN


make_gpt2 = partial(make_model, "GPT2", vocab_size=200, n_embd=32, n_layer=2, n_head=4, n_positions=32)
make_bert = partial(make_model, "Bert", **SMALL)
make_gemma2 = partial(
    make_model, "Gemma2", **SMALL, **GROUPED, sliding_window=64, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
)
make_granite = partial(make_model, "Granite", **SMALL, num_key_value_heads=2, attention_multiplier=0.05)
make_gpt_oss = partial(
    make_model, "GptOss", **SMALL, **GROUPED, sliding_window=64, num_local_experts=2, num_experts_per_tok=1
)
make_lfm2 = partial(
    make_model, "Lfm2", **SMALL, num_key_value_heads=2, layer_types=["conv", "full_attention"],
    block_auto_adjust_ff_dim=False,
)  # fmt: skip
make_bamba = partial(
    make_model, "Bamba", **SMALL, num_key_value_heads=2, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16,
    mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8,
)  # fmt: skip
make_bloom = partial(
    make_model, "Bloom", vocab_size=200, hidden_size=32, n_layer=2, n_head=4, pad_token_id=0, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip
make_roformer = partial(make_model, "RoFormer", **SMALL, is_decoder=True, max_position_embeddings=32)
make_doge = partial(make_model, "Doge", **SMALL, **GROUPED, keep_window_size=64)


def forget_causal(make_mask):
    def make(config, inputs_embeds, attention_mask, past_key_values=None, **_):
        return modeling_roformer.create_bidirectional_mask(
            config=config, inputs_embeds=inputs_embeds, attention_mask=attention_mask, past_key_values=past_key_values
        )

    return make


def skip_mask(make_mask):
    return lambda *args, allow_is_causal_skip=False, **keywords: make_mask(*args, **keywords)


def drop_alibi(make_bias):
    return lambda *args, **keywords: make_bias(*args, **keywords) * 0


SHIFTED = {**PLAIN, "attention_mask": LEFT, "position_ids": (LEFT.cumsum(1) - 1).clamp(min=0)}
RESTARTED = {**PLAIN, "attention_mask": PAIRS, "position_ids": POSITIONS}
UNRESTARTED = {**PLAIN, "position_ids": torch.arange(LENGTH).expand(2, -1)}
FOR_BART = {"input_ids": IDS, "attention_mask": RIGHT, "decoder_input_ids": IDS.flip(1).contiguous()}

FAULTS = [
    on_backend("backend ignores documents", make_llama, PACKED, "causal alone", mask=IN_DOCUMENTS,
               code="packed-mask-ignored"),
    in_batch("mask of ones beside packed positions", make_llama, {**PACKED, "attention_mask": torch.ones(2, LENGTH)},
             PACKED, mask=IN_DOCUMENTS, code="packed-mask-ignored"),
    in_batch("positions that do not restart", make_llama, UNRESTARTED, PACKED, mask=IN_DOCUMENTS,
             code="packed-mask-ignored"),
    in_batch("learned positions that do not restart", make_gpt2, {**PLAIN, "attention_mask": PAIRS}, RESTARTED,
             mask=IN_DOCUMENTS, code="alone-differs"),
    in_batch("inverted mask", make_llama, {**PLAIN, "attention_mask": ~PAIRS}, {**PLAIN, "attention_mask": PAIRS},
             mask=IN_DOCUMENTS, code="mask-inverted"),
    on_backend("backend inverts the mask", make_llama, PACKED, "inverted", mask=IN_DOCUMENTS, code="mask-inverted"),
    by_hand("inverted mask by hand", "inverted"),
    Fault("window of 4 keys", lambda faulty: (make_mistral(window=3 + faulty), PLAIN), WINDOW, "window-exceeded"),
    on_backend("backend widens the window", make_mistral, PLAIN, "wider", mask=WINDOW, code="window-too-wide"),
    Fault("window lost in one layer", lambda faulty: (make_gemma3(["full" if faulty else "sliding", "full"]), PLAIN),
          {0: WINDOW, 1: CAUSAL}, "window-lost"),
    Fault("window lost in the second of 4 layers",
          lambda faulty: (make_gemma3(["sliding", "full" if faulty else "sliding", "sliding", "sliding"]), PLAIN),
          WINDOW, "window-lost"),
    on_backend("backend aligns at the upper left", make_llama, PLAIN, "upper left"),
    in_batch("padding without a mask", make_llama, PLAIN, {**PLAIN, "attention_mask": LEFT}, padding=LEFT,
             code="padding-reaches-outputs"),
    in_batch("left padding with unshifted positions", make_gpt2, {**PLAIN, "attention_mask": LEFT}, SHIFTED,
             padding=LEFT, code="alone-differs"),
    by_hand("documents merged at the border of sequences", "batch border", batch=OWN_PACKED, mask=IN_DOCUMENTS),
    by_hand("documents cut one token late", "late documents", batch=OWN_PACKED, mask=IN_DOCUMENTS),
    by_hand("documents forgotten by one head", "one head", batch=OWN_PACKED, mask=IN_DOCUMENTS),
    Fault("causal encoder", lambda faulty: (make_bert(is_decoder=faulty), OWN), None, "causal-by-accident"),
    on_backend("backend adds a causal mask", make_bert, OWN, "causal too", mask=None, code="only-causal"),
    Fault("RoFormer without its causal mask", lambda _: (make_roformer(), PLAIN),
          changed=partial(replaced, modeling_roformer, "create_causal_mask", forget_causal)),
    Fault("Doge without its causal mask", lambda _: (make_doge(), PLAIN), code="not-causal",
          changed=partial(replaced, modeling_doge, "create_causal_mask", skip_mask)),
    Fault("padding in cross attention", lambda faulty: (EncoderAndDecoder(not faulty), FOR_BART), expect_of_bart,
          "padding-mask-lost", padding=RIGHT),
    on_backend("backend drops the softcap", make_gemma2, PLAIN, "softcap", code="softcap-lost"),
    on_backend("backend ignores the scale", make_granite, PLAIN, "scale", code="wrong-scale"),
    by_hand("no scale", "no scale"),
    on_backend("backend tiles key heads", make_llama, PLAIN, "tiled", code="key-heads-tiled"),
    on_backend("backend masks the last key", make_llama, PLAIN, "last key"),
    Fault("positions of steps off by one", lambda faulty: (ShiftedPositions(int(faulty)), PLAIN), code="cache-differs"),
    on_backend("backend drops the sinks", make_gpt_oss, PLAIN, "sinks", code="sinks-lost"),
    Fault("no ALiBi", lambda _: (make_bloom(), {**PLAIN, "attention_mask": torch.ones(2, LENGTH, dtype=torch.long)}),
          changed=partial(replaced, modeling_bloom, "build_alibi_tensor", drop_alibi)),
    on_backend("dropout in eval mode", make_llama, PLAIN, "dropout", code="outputs-random"),
    by_hand("dropout by hand", "dropout", code="outputs-random"),
    in_batch("0 and 1 as an additive mask", make_llama, {**PLAIN, "attention_mask": PAIRS.float()},
             {**PLAIN, "attention_mask": PAIRS}, mask=IN_DOCUMENTS),
    on_backend("backend adds 0 and 1", make_llama, PACKED, "added", mask=IN_DOCUMENTS, code="mask-added"),
    on_backend("backend adds a causal mask to a prefix", make_llama, {**PLAIN, "attention_mask": PREFIX_PAIRS},
               "causal too", mask=PREFIX, code="only-causal"),
    Fault("convolution of LFM2 crosses documents", lambda faulty: (make_lfm2(), PACKED if faulty else PLAIN),
          lambda faulty: IN_DOCUMENTS if faulty else CAUSAL),
    Fault("state of Bamba crosses documents", lambda faulty: (make_bamba(), PACKED if faulty else PLAIN),
          lambda faulty: IN_DOCUMENTS if faulty else CAUSAL),
    by_hand("convolution crosses documents", "convolution", batch=OWN_PACKED, mask=IN_DOCUMENTS),
    by_hand("shift to the left", "shift to the left"),
    by_hand("means of blocks", "block means"),
    by_hand("circular convolution", "frequencies"),
    by_hand("gate by the mean of the sequence", "mean gate"),
    by_hand("norm over positions", "group norm"),
    by_hand("experts of limited capacity", "capacity", "no capacity"),
    Fault("batch norm in train mode", make_with_batch_norm, code=None),
    by_hand("backward pass forgets the mask", "backward", code="later-positions-reach-outputs"),
    by_hand("int8 with one scale", "int8"),
    by_hand("one key of the future", "next key"),
    Fault("batch in place of length", lambda faulty: (EncoderOfTorch(batch_first=not faulty).eval(), OWN), None),
]  # fmt: skip
