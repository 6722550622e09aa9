"""A language model is trained on sequences that the processes of a group share; the losses are those of one process.

    torchrun --nproc-per-node 2 examples/train_on_ranks.py
    python examples/train_on_ranks.py

The first command prints the loss of each step, and how far it is from the loss of the same training in one process,
which the first rank also runs. The second command runs only the training in one process.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import clearhead as ch

LENGTH, BATCH, STEPS = 256, 2, 10


def made() -> LlamaForCausalLM:
    """A small Llama, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).double()


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Sequences of consecutive numbers, each from its own start; the second is shorter, and ends in padding."""
    ids = (torch.randint(64, (BATCH, 1), generator=torch.Generator().manual_seed(step)) + torch.arange(LENGTH)) % 64
    mask = torch.ones_like(ids)
    mask[1, -LENGTH // 8 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def train(layout: ch.distributed.Layout) -> list[float]:
    """The loss of each step. Every rank of the layout calls it."""
    model = ch.models.run_on_clearhead(made(), layout=layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        part = ch.distributed.shard_batch(batch_of(step), layout)
        loss = part.loss(model(**part.inputs).logits)  # this rank's term of the mean
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        for tensor in (total, *(parameter.grad for parameter in model.parameters())):
            dist.all_reduce(tensor, group=layout.group)  # the sum over the ranks; DDP: (loss * layout.ranks).backward()
        optimizer.step()
        losses.append(float(total))
    return losses


def alone() -> list[float]:
    """The loss of each step with whole sequences, transformers' own attention, and the loss in float64."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        batch = batch_of(step)
        labels = batch.pop("labels")
        loss = F.cross_entropy(model(**batch).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    if "RANK" not in os.environ:  # not started by torchrun
        for step, loss in enumerate(alone()):
            print(f"step {step:2}  loss {loss:.6f}")
        return
    dist.init_process_group("gloo")
    losses = train(ch.distributed.ZigZag(LENGTH))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks")
        for step, (loss, whole) in enumerate(zip(losses, alone(), strict=True)):
            print(f"step {step:2}  loss {loss:.6f}  in one process {whole:.6f}  apart {abs(loss - whole):.0e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
