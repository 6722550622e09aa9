"""Small models and attention backends with planted faults, each of a class that public bug reports describe."""

from __future__ import annotations

import math
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import clearhead as ch

LENGTH = 13
SMALL = {
    "vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}


def make_model(name, backend=None, head="Model", **options):
    """A model of transformers with random weights, large enough that each input matters."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, f"{name}{head}")(config).eval()
    with torch.no_grad():
        for part, weight in model.named_parameters():
            if weight.ndim > 1 and "norm" not in part:
                weight *= 2 if name in ("Lfm2", "Bamba") else 4
            if part.endswith("sinks"):
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
    if backend:
        model.set_attn_implementation(backend)
    return model


def make_llama(backend="sdpa", **options):
    return make_model("Llama", backend, **SMALL | {"num_key_value_heads": 2} | options)


# ------------------------------------------------------------------------------------------------------------ backends


def make_causal(queries, keys, upper_left=False):
    return torch.arange(keys) <= torch.arange(queries)[:, None] + (0 if upper_left else keys - queries)


def compute_attention(query, key, value, mask, scale, softcap=None, sinks=None, dropout=0.0):
    scores = query @ key.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (F.dropout(weights, dropout) @ value).transpose(1, 2).contiguous()


def widen(mask, causal):
    """A window one key wider."""
    wide = mask.clone()
    wide[..., :-1] |= mask[..., 1:]
    return wide & causal


def drop_last_key(mask):
    mask = mask.clone()
    mask[..., -1] = False
    return mask


# what each fault makes of the mask (bool) and the causal mask
WRONG_MASKS = {
    "causal alone": lambda mask, causal: causal,
    "inverted": lambda mask, causal: ~mask,
    "causal too": lambda mask, causal: mask & causal,
    "wider": widen,
    "added": lambda mask, causal: mask.float(),
    "upper left": lambda mask, causal: make_causal(*mask.shape[-2:], upper_left=True)[None, None],
    "last key": lambda mask, causal: drop_last_key(mask) if mask.shape[-2] < mask.shape[-1] else mask,
}


def register_backend(fault):
    """Register a backend with a fault, "" for none, and return its name. `fault` may be (layer, head) instead, where
    documents are forgotten."""

    def attend(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **_):
        groups = query.shape[1] // key.shape[1]
        if fault == "tiled":
            key, value = (side.repeat(1, groups, 1, 1) for side in (key, value))
        else:
            key, value = (side.repeat_interleave(groups, 1) for side in (key, value))
        causal = make_causal(query.shape[2], key.shape[2])[None, None]
        mask = attention_mask
        if mask is None:
            mask = causal if getattr(module, "is_causal", True) else torch.ones_like(causal)
        if fault in WRONG_MASKS:
            mask = WRONG_MASKS[fault](mask, causal)
        if isinstance(fault, tuple) and module.layer_idx == fault[0]:
            mask = mask.expand(len(query), query.shape[1], -1, -1).clone()
            mask[:, fault[1]] = causal[0, 0]
        scale = query.shape[-1] ** -0.5 if scaling is None or fault == "scale" else scaling
        softcap = None if fault == "softcap" else softcap
        sinks = None if fault == "sinks" else s_aux
        output = compute_attention(query, key, value, mask, scale, softcap, sinks, 0.1 if fault == "dropout" else 0.0)
        return output, None

    name = f"faulty_{fault}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


@contextmanager
def replaced(module, name, make):
    """Replace a function of a module by `make(function)`."""
    with patch.object(module, name, make(getattr(module, name))):
        yield


# -------------------------------------------------------------------------------------------------- hand-written models


class HandWrittenGPT(nn.Module):
    """A small GPT whose attention is in code of its own. `fault` names what is wrong in its last block."""

    def __init__(self, fault="", bidirectional=False, width=32):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.position = nn.Embedding(200, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList([Block("", bidirectional, width), Block(fault, bidirectional, width)])
        self.head = nn.Linear(width, 200, bias=False)

    def forward(self, input_ids, documents=None):
        length = input_ids.shape[1]
        at = torch.arange(length).expand_as(input_ids)
        if documents is not None:
            starts = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
            at = at - torch.where(starts, at, 0).cummax(1).values
        hidden = self.embed(input_ids) + self.position(at)
        for block in self.blocks:
            hidden = block(hidden, documents)
        return self.head(hidden)


class Block(nn.Module):
    def __init__(self, fault, bidirectional, width):
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(fault, bidirectional, width)
        kinds = {
            "batch norm": lambda: nn.BatchNorm1d(width),
            "group norm": lambda: nn.GroupNorm(4, width),
            "convolution": lambda: nn.Conv1d(width, width, 3, groups=width),
        }
        self.mixer = kinds[fault]() if fault in kinds else None
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        if fault in ("capacity", "no capacity"):
            self.mlp = CapacityMoE(width, fault == "capacity")
        self.fault = fault

    def forward(self, hidden, documents):
        hidden = hidden + self.attention(self.norm(hidden), documents)
        inner = self.second_norm(hidden)
        if self.mixer is not None:
            padding = (2, 0) if self.fault == "convolution" else (0, 0)
            inner = self.mixer(F.pad(inner.transpose(1, 2), padding)).transpose(1, 2)
        return hidden + self.mlp(MIXERS.get(self.fault, lambda x: x)(inner))


def mix_block_means(hidden):
    """Add the mean of each block of 4 positions, to the first of them too."""
    batch, length, width = hidden.shape
    blocks = F.pad(hidden, (0, 0, 0, -length % 4)).view(batch, -1, 4, width).mean(2)
    return hidden + 0.1 * blocks.repeat_interleave(4, 1)[:, :length]


def filter_frequencies(hidden):
    """A product in the frequencies of the positions is a circular convolution."""
    spectrum = torch.fft.rfft(hidden, dim=1)
    return torch.fft.irfft(spectrum * torch.linspace(1, 0.5, spectrum.shape[1])[:, None], n=hidden.shape[1], dim=1)


def round_to_int8(hidden):
    """One scale for the whole tensor."""
    scale = hidden.abs().max() / 127
    return (hidden / scale).round() * scale


MIXERS = {
    "shift to the left": lambda x: torch.cat([x[:, 1:], x[:, -1:]], 1) * 0.5 + x * 0.5,
    "block means": mix_block_means,
    "frequencies": filter_frequencies,
    "mean gate": lambda x: x * torch.sigmoid(x.mean(1, keepdim=True)),
    "int8": round_to_int8,
}


class CapacityMoE(nn.Module):
    """A mixture of experts, each of which takes only so many tokens of the whole batch."""

    def __init__(self, width, limited, experts=4):
        super().__init__()
        self.gate, self.limited = nn.Linear(width, experts), limited
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, hidden):
        tokens = hidden.flatten(0, 1)
        shares = self.gate(tokens).softmax(-1)
        chosen, result = shares.argmax(-1), torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            at = (chosen == number).nonzero()[:, 0]
            if self.limited:
                at = at[shares[at, number].argsort(descending=True)[: math.ceil(len(tokens) / len(self.experts))]]
            result[at] = expert(tokens[at]) * shares[at, number : number + 1]
        return result.view_as(hidden)


class Attention(nn.Module):
    def __init__(self, fault, bidirectional, width, heads=4):
        super().__init__()
        self.num_heads, self.head_dim, self.fault, self.bidirectional = heads, width // heads, fault, bidirectional
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        for part in (self.q, self.k):
            nn.init.normal_(part.weight, std=0.4)

    def forward(self, hidden, documents):
        batch, length, _ = hidden.shape
        q, k, v = (
            part(hidden).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        mask = torch.ones(length, length, dtype=torch.bool) if self.bidirectional else make_causal(length, length)
        mask = mask.expand(batch, self.num_heads, -1, -1)
        if documents is not None:
            if self.fault == "late documents":  # the first token of a document counts to the one before
                documents = torch.cat([documents[:, :1], documents[:, :-1]], 1)
            same = (documents[:, :, None] == documents[:, None, :])[:, None].expand_as(mask).clone()
            if self.fault == "one head":
                same[:, -1] = True
            mask = mask & same
        if self.fault == "inverted":
            mask = ~mask
        if self.fault == "next key":
            mask = mask | torch.ones(length, length).triu(1).tril(1).bool()
        if self.fault == "over the batch":
            q, k, v, mask = (*(side.transpose(0, 2) for side in (q, k, v)), None)
        if self.fault == "batch border":  # the last document of a sequence and the first of the next have one number
            numbers = (documents + torch.arange(batch)[:, None]).flatten()
            q, k, v = (side.transpose(0, 1).reshape(1, self.num_heads, -1, self.head_dim) for side in (q, k, v))
            mask = (numbers[:, None] == numbers) & make_causal(batch * length, batch * length)
        scores = q @ k.mT * (1.0 if self.fault == "no scale" else self.head_dim**-0.5)
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e9)
        weights = scores.softmax(-1)
        if self.fault == "dropout":
            weights = F.dropout(weights, 0.1)
        output = ForgetMaskInBackward.apply(weights, v) if self.fault == "backward" else weights @ v
        if self.fault == "over the batch":
            output = output.transpose(0, 2)
        if self.fault == "batch border":
            output = output.view(self.num_heads, batch, length, -1).transpose(0, 1)
        return self.o(output.transpose(1, 2).flatten(2))


class ForgetMaskInBackward(torch.autograd.Function):
    """weights @ value, whose backward pass gives every key a gradient."""

    @staticmethod
    def forward(ctx, weights, value):
        ctx.save_for_backward(weights, value)
        return weights @ value

    @staticmethod
    def backward(ctx, grad):
        weights, value = ctx.saved_tensors
        return grad @ value.mT, torch.ones_like(weights).mT @ grad / weights.shape[-1]


class EncoderOfTorch(nn.Module):
    """Layers of torch.nn, which take the length first unless they are told that the batch comes first."""

    def __init__(self, batch_first):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(200, 32)
        layers = (nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=batch_first) for _ in range(2))
        self.blocks = nn.ModuleList(layers)

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class EncoderAndDecoder(nn.Module):
    """BART, whose cross attention is given the padding of the encoder's inputs or not."""

    def __init__(self, passes_mask):
        super().__init__()
        sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
        ids = {"vocab_size": 200, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
        self.bart = make_model("Bart", d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, **sizes, **ids)
        self.config, self.passes_mask = self.bart.config, passes_mask

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        encoded = self.bart.encoder(input_ids=input_ids, attention_mask=attention_mask)[0]
        mask = attention_mask if self.passes_mask else None
        given = {"encoder_hidden_states": encoded, "encoder_attention_mask": mask, "use_cache": False}
        return self.bart.decoder(input_ids=decoder_input_ids, **given)


class ShiftedPositions(nn.Module):
    """Llama, the positions of whose steps are counted too far by `shift`."""

    def __init__(self, shift):
        super().__init__()
        self.inner, self.shift = make_llama(), shift
        self.config = self.inner.config

    def forward(self, input_ids, past_key_values=None, use_cache=None):
        start = 0 if past_key_values is None else past_key_values.get_seq_length() + self.shift
        positions = torch.arange(input_ids.shape[1])[None] + start
        return self.inner(input_ids, past_key_values=past_key_values, use_cache=use_cache, position_ids=positions)


def expect_of_bart(call):
    return None if call.kind == "cross" or call.layer.stack == "encoder" else ch.Causal()
