"""Compiled decoding with a cache of fixed capacity, beside the static cache of transformers: tokens a second.

Both are a Llama of the same sizes: RMS norms, rotary positions, grouped heads, a gated feed-forward layer. A step takes
one token of each sequence, and gives the next by the largest logit; it is one graph of inductor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import clearhead as ch
from benchmarks.measure import interleaved
from benchmarks.result import Result, times

WIDTH, HEADS, KEY_HEADS, HIDDEN, LAYERS, WORDS = 512, 8, 2, 1408, 2, 1000
PROMPT, CAPACITY, STEPS = 512, 2048, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rotary = ch.nn.RotaryEmbedding(WIDTH // HEADS)
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH, 1e-6), nn.RMSNorm(WIDTH, 1e-6)])
        self.attend = ch.nn.MultiHeadAttention(WIDTH, HEADS, bias=False, num_kv_heads=KEY_HEADS, rotary=rotary)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, False), nn.Linear(WIDTH, HIDDEN, False)
        self.down = nn.Linear(HIDDEN, WIDTH, False)

    def forward(self, x: Tensor, cache: ch.nn.KeyValueCache) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.attend(normed, normed, normed, ch.Causal(), cache=cache)
        normed = self.norms[1](x)
        output: Tensor = x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))
        return output


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, False)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.RMSNorm(WIDTH, 1e-6)

    def forward(self, ids: Tensor, cache: ch.nn.KeyValueCache) -> Tensor:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(x, cache.of(number))
        logits: Tensor = self.head(self.norm(x[:, -1:]))
        return logits.argmax(-1)


def ours(model: Decoder, prompt: Tensor) -> Callable[[], Tensor]:
    cache = ch.nn.KeyValueCache(capacity=CAPACITY)
    step, first = torch.compile(model, fullgraph=True), model(prompt, cache)

    def run() -> Tensor:
        cache.crop(PROMPT)
        ids = [first]
        for _ in range(STEPS):
            ids.append(step(ids[-1], cache))
        return torch.cat(ids, 1)

    return run


def theirs(of: Decoder, prompt: Tensor) -> Callable[[], Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, max_position_embeddings=CAPACITY,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(prompt.device, of.head.weight.dtype)
    model.load_state_dict({theirs_of(name): weight for name, weight in of.state_dict().items()})
    cache = StaticCache(config=config, max_cache_len=CAPACITY)

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        found = model(ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: Tensor = found.logits
        return logits.argmax(-1)

    first, step = forward(prompt, torch.arange(PROMPT)[None]), torch.compile(forward, fullgraph=True)

    def run() -> Tensor:
        for layer in cache.layers:  # back to the prompt
            layer.cumulative_length.fill_(PROMPT)
        ids = [first]
        for at in range(STEPS):
            ids.append(step(ids[-1], torch.tensor([[PROMPT + at]])))
        return torch.cat(ids, 1)

    return run


def theirs_of(name: str) -> str:
    """The name of one of our weights in transformers' model."""
    named = {
        "blocks.": "layers.", "norms.0": "input_layernorm", "norms.1": "post_attention_layernorm",
        "attend.W_": "self_attn.", "embed.": "embed_tokens.", "gate.": "mlp.gate_proj.", "up.": "mlp.up_proj.",
        "down.": "mlp.down_proj.", **{f"self_attn.{x}.": f"self_attn.{x}_proj." for x in "qkvo"},
    }  # fmt: skip
    for ours, other in named.items():
        name = name.replace(ours, other)
    return "lm_head.weight" if name == "head.weight" else f"model.{name}"


def decoding(batch: int, dtype: torch.dtype) -> Result:
    torch.compiler.reset()
    prompt = torch.randint(0, WORDS, (batch, PROMPT))
    model = Decoder().eval().to(dtype)
    calls = {"clearhead": ours(model, prompt), "transformers": theirs(model, prompt)}
    if dtype == torch.float32 and not torch.equal(calls["clearhead"](), calls["transformers"]()):
        raise AssertionError("the two models give other tokens")
    seconds = interleaved(calls, 15, 2)
    ratio = seconds["transformers"] / seconds["clearhead"]
    speed = ", ".join(f"{name} {batch * STEPS / s:,.0f}" for name, s in seconds.items())
    what = (
        f"compiled decoding, {str(dtype).removeprefix('torch.')}, batch {batch}, {PROMPT} of {CAPACITY} positions, "
        f"over transformers' static cache; tokens a second: {speed}"
    )
    return Result(what, ratio, "×", "≥ 1", ratio >= 1, times(seconds))


CASES: dict[str, Callable[[], Result]] = {
    "decoding": partial(decoding, 1, torch.float32),
    "decoding-8": partial(decoding, 8, torch.float32),
    "decoding-bfloat16": partial(decoding, 1, torch.bfloat16),
    "decoding-8-bfloat16": partial(decoding, 8, torch.bfloat16),
}
