"""Models with a layout beside data parallel wrappers, checkpoints and copies: what every rank runs."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks.of_transformers import LENGTH, batch_of, llama, made, most
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import clearhead as ch

D = ch.distributed
EXAMPLES = Path(__file__).parents[2] / "examples"


def batches(replicas: int) -> list[dict[str, Tensor]]:
    """A batch for each data parallel replica, with as many labels."""
    found = []
    for at in range(replicas):
        batch = batch_of("right")
        mask = batch["attention_mask"]
        batch["input_ids"] = (batch["input_ids"] + 7 * at) % 47 + 3
        batch["labels"] = torch.where(batch["labels"] == -100, -100, batch["input_ids"])
        found.append({**batch, "attention_mask": mask})
    return found


def expected(model: Any, every: list[dict[str, Tensor]]) -> tuple[float, list[Tensor]]:
    """The mean loss over the replicas, and its gradients, of one process."""
    ch.models.run_on_clearhead(model)
    losses = []
    for batch in every:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()))
    loss = torch.stack(losses).mean()
    return float(loss.detach()), [g.detach() for g in torch.autograd.grad(loss, [*model.parameters()])]


def data_parallel(rank: int) -> dict[str, float]:
    """DDP and FSDP over 4 ranks, of which 2 share a sequence: gradients beside those of one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    every = batches(2)
    loss, gradients = expected(made("llama"), every)
    layout = D.ZigZag(LENGTH, mesh["cp"])
    part = D.shard_batch(every[mesh["dp"].get_local_rank()], layout)
    found = {}
    for kind in ("ddp", "fsdp", "fsdp, first", "ddp over dp"):
        model = made("llama")
        if kind == "fsdp, first":
            _fully(model)
        ch.models.run_on_clearhead(model, layout=layout)
        over = mesh["dp"].get_group() if kind == "ddp over dp" else None
        wrapped = DistributedDataParallel(model, process_group=over) if "ddp" in kind else model
        if kind == "fsdp":
            _fully(model)
        own = part.loss(wrapped(**part.inputs).logits)
        (own if over else own * layout.ranks).backward()
        total = own.detach().clone()
        dist.all_reduce(total)
        apart = abs(float(total) / 2 - loss)
        for parameter, true in zip(model.parameters(), gradients, strict=True):
            grad = parameter.grad
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            if over:
                dist.all_reduce(grad, group=mesh["cp"].get_group())
            apart = max(apart, most(grad - true))
        found[kind] = apart
    return found


def _fully(model: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)


def checkpointed(rank: int) -> list[bool]:
    """Gradients with checkpoints, whose layers are computed again in the backward pass, are the same."""
    layout, found = D.ZigZag(LENGTH), []
    for kind in ("llama", "gemma2"):
        for batch in (batch_of("left"), batch_of("packed")):
            part = D.shard_batch(batch, layout)
            gradients = []
            for reentrant in (None, False, True):
                model = ch.models.run_on_clearhead(made(kind).train(), layout=layout)
                if reentrant is not None:
                    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                    model.enable_input_require_grads()
                part.loss(model(**part.inputs).logits).backward()
                gradients.append([parameter.grad for parameter in model.parameters()])
            for other in gradients[1:]:
                found.append(all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True)))
    return found


def set_back(rank: int) -> list[Any]:
    """What a model gives after it was set back; another layout; a copy; its parts, called by themselves."""
    batch = batch_of("none")
    ids = batch["input_ids"]
    model, layout = made("llama"), D.ZigZag(LENGTH)
    parts = [model, model.model]
    whole = model(ids).logits.detach()

    def hooks() -> int:
        return sum(len(p._forward_pre_hooks) + len(p._forward_hooks) for p in parts)

    def right(layout: Any, model: Any = model) -> bool:
        part = D.shard_batch(batch, layout)
        return torch.allclose(model(**part.inputs).logits, layout.shard(whole, 1), atol=1e-6)

    ch.models.run_on_clearhead(model, layout=layout)
    found: list[Any] = [hooks(), right(layout)]
    other = D.Contiguous(LENGTH)
    found += [right(other, ch.models.run_on_clearhead(model, layout=other)), hooks()]
    copied = copy.deepcopy(model)
    found += [right(other, copied), right(layout, ch.models.run_on_clearhead(copied, layout=layout)), right(other)]
    part = D.shard_batch(batch, other)
    hidden = model.model(**part.inputs).last_hidden_state
    found += [torch.allclose(model.lm_head(hidden), other.shard(whole, 1), atol=1e-6)]
    first = {name: part.inputs[name] for name in ("input_ids", "position_ids")}
    found += [
        torch.allclose(model(first["input_ids"], None, first["position_ids"]).logits, other.shard(whole, 1), atol=1e-6)
    ]
    model.set_attn_implementation("sdpa")
    found += [torch.allclose(model(ids).logits, whole, atol=1e-6), hooks()]
    ch.models.run_on_clearhead(ch.models.run_on_clearhead(model, layout=layout))
    found += [hooks(), torch.allclose(model(ids, labels=ids, use_cache=True).logits, whole, atol=1e-6)]
    return found


def dropout(rank: int) -> bool:
    """Weights are dropped as in one process, by the generator of the first rank."""
    layout = D.ZigZag(LENGTH)
    torch.manual_seed(0)
    model = llama(attention_dropout=0.5).train()
    batch = batch_of("none")
    torch.manual_seed(3)
    whole = ch.models.run_on_clearhead(model)(batch["input_ids"]).logits
    part = D.shard_batch(batch, layout)
    torch.manual_seed(3 + rank)
    return torch.allclose(
        ch.models.run_on_clearhead(model, layout=layout)(**part.inputs).logits, layout.shard(whole, 1), atol=1e-5
    )


def one_group(rank: int) -> float:
    """The same group shares the sequences out and averages gradients."""
    every = batches(1)
    gradients = expected(made("llama"), every)[1]
    layout = D.Contiguous(LENGTH)
    model = ch.models.run_on_clearhead(made("llama"), layout=layout)
    part = D.shard_batch(every[0], layout)
    wrapped = DistributedDataParallel(model)  # which averages as long as it is there
    (part.loss(wrapped(**part.inputs).logits) * layout.ranks).backward()
    return max(most(p.grad - true) for p, true in zip(model.parameters(), gradients, strict=True))


def example(rank: int) -> list[float]:
    """The example's losses over ranks, less those of one process; and how far it has learnt."""
    spec = importlib.util.spec_from_file_location("train_on_ranks", EXAMPLES / "train_on_ranks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found, whole = module.train(D.ZigZag(module.LENGTH)), module.alone()
    return [max(abs(a - b) for a, b in zip(found, whole, strict=True)), found[0] - found[-1]]


def everything(rank: int) -> dict[str, Any]:
    return {f.__name__: f(rank) for f in (checkpointed, set_back, dropout, one_group, example)}


def read(rank: int) -> dict[str, Any]:
    """What the tools that read weights say of a model whose parameters are shared out, and how far their numbers are
    off once `fully_shard` keeps them whole."""
    batch = {"input_ids": batch_of("none")["input_ids"]}
    found: dict[str, Any] = {}

    def numbers(model: Any) -> list[Any]:
        with torch.no_grad(), ch.watch(model, values=True) as seen:
            model(**batch)
        token = torch.tensor([5, 6])
        return [
            lambda: seen[1].result_norms,
            lambda: ch.models.circuits(model, batch).ov(1, 0) @ torch.eye(16, dtype=torch.float64),
            lambda: ch.models.circuits(model, batch).qk(1, 0) @ torch.eye(16, dtype=torch.float64),
            lambda: ch.models.logit_attribution(model, batch, token=token).values,
        ]

    def said(model: Any) -> list[str]:
        every = []
        for number in numbers(model):
            try:
                every.append(f"{number()}")
            except ch.UnsupportedError as error:
                every.append(str(error))
        return every

    expected = [number() for number in numbers(made("llama"))]
    model = made("llama")
    _fully(model)
    found["fully_shard"] = said(model)
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    found["kept whole"] = [most(number() - wanted) for number, wanted in zip(numbers(model), expected, strict=True)]
    shared = made("llama")
    plan = {"q_proj": ColwiseParallel, "k_proj": ColwiseParallel, "v_proj": ColwiseParallel, "o_proj": RowwiseParallel}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in shared.model.layers:
        parallelize_module(layer.self_attn, mesh, {name: style() for name, style in plan.items()})
    found["tensor parallel"] = said(shared)[:3]
    return found
