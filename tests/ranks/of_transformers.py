"""Models of transformers with a layout, beside the same in one process: what every rank runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor

import clearhead as ch

D = ch.distributed
LENGTH = 23
PACKED = 9  # the length of the first of two documents
SMALL = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 4}


def llama(**more: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, **more))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**GROUPED, sliding_window=4)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**GROUPED, sliding_window=4, attn_logit_softcapping=2.0)
    ),
    "gpt-oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**GROUPED, num_local_experts=2, num_experts_per_tok=1, sliding_window=4)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
    "modernbert": lambda: transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(**SMALL, local_attention=6, cls_token_id=1, sep_token_id=2)
    ),
}
BIDIRECTIONAL = ("bert", "modernbert")


def made(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    if name == "gpt-oss":
        model.set_experts_implementation("eager")  # the grouped one takes no float64
    with torch.no_grad():  # so that attention has something to choose
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.ndim > 1 else None
    return model


def batch_of(padding: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 50, (2, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, :3] = -100
    batch = {"input_ids": ids, "labels": labels}
    if padding == "packed":
        batch["position_ids"] = torch.cat([torch.arange(PACKED), torch.arange(LENGTH - PACKED)])[None]
    elif padding != "none":
        mask = torch.ones_like(ids)
        if padding == "right":
            mask[1, 15:] = 0
        elif padding == "left":
            mask[1, :6] = 0
        else:
            mask[1, 4:9] = 0
        batch["attention_mask"] = mask
        labels[(mask == 0) | (mask.roll(1, 1) == 0)] = -100  # neither on padding, nor right after it
    return batch


def alone(model: Any, batch: dict[str, Tensor], shift: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Logits, loss and gradients of one process, under transformers' own masks; of packed documents one by one.

    The loss is in float64: transformers has it in float32.
    """
    ch.models.run_on_clearhead(model)  # eager attention has its softmax in float32
    if "position_ids" in batch:
        first = batch["input_ids"].split([PACKED, LENGTH - PACKED], 1)
        every, said = torch.cat([model(ids, use_cache=False).logits for ids in first], 1), None
    else:
        every, said = (output := model(**batch, use_cache=False)).logits, output.loss
    logits, labels = (every[:, :-1], batch["labels"][:, 1:]) if shift else (every, batch["labels"])
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert said is None or torch.allclose(loss.float(), said.float())
    return every.detach(), loss.detach(), list(torch.autograd.grad(loss, [*model.parameters()], allow_unused=True))


def beside(name: str, padding: str, layout: Any) -> dict[str, float]:
    """How far apart logits, loss and gradients are, of the ranks and of one process."""
    model, batch, shift = made(name), batch_of(padding), name not in BIDIRECTIONAL
    logits, loss, gradients = alone(model, batch, shift)
    ch.models.run_on_clearhead(model, layout=layout)
    part = D.shard_batch(batch, layout, shift=shift)
    mine = model(**part.inputs).logits
    own = part.loss(mine)
    own.backward()
    total = own.detach().clone()
    dist.all_reduce(total)
    words = part.inputs.get("attention_mask", torch.ones_like(part.inputs["input_ids"])).bool()
    difference = (mine.detach() - layout.shard(logits, 1))[words]  # what padding is given is each backend's own affair
    apart = {"logits": most(difference), "loss": float((total - loss).abs()), "gradients": 0.0}
    for parameter, true in zip(model.parameters(), gradients, strict=True):
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(grad)
        apart["gradients"] = max(apart["gradients"], most(grad - (0 if true is None else true)))
    return apart


def most(difference: Tensor) -> float:
    return float(difference.abs().max()) if difference.numel() else 0.0


def numbers(rank: int) -> dict[str, dict[str, float]]:
    """Every model, with each padding and layout at some time."""
    ranks = dist.get_world_size()
    layouts = [
        D.ZigZag(LENGTH),
        D.Contiguous(LENGTH),
        D.Contiguous([LENGTH - ranks * (ranks - 1) // 2, *range(1, ranks)]),
    ]
    found = {}
    paddings = ("none", "right", "left", "holes", "packed")
    for at, name in enumerate([name for name in MODELS if name != "llama"]):
        for step in range(2):
            padding = paddings[(at + 2 * step) % 5]
            if padding == "packed" and name in BIDIRECTIONAL:
                padding = "right"
            layout = layouts[(at + step) % 3]
            found[f"{name}, {padding}, {layout}"] = beside(name, padding, layout)
    for padding in paddings:  # all of them for one model
        found[f"llama, {padding}"] = beside("llama", padding, layouts[0])
    return found
