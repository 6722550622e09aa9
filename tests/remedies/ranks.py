"""Cases of ranks: what each of two processes of one group runs, all cases after each other.

A case is a call that is refused, the fragments of its message, and the same written as the message says: a tensor, and
what it should be by plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from ranks.of_transformers import LENGTH, SMALL, batch_of, llama, made
from ranks.tensor_parallel import drawn, expected, shared
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import clearhead as ch

D = ch.distributed
Case = tuple[Callable[[], Any], list[str], Callable[[], Any], Callable[[], Any]]


def plain(query: Any, key: Any, value: Any, keep: Any = None) -> Any:
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return (scores if keep is None else scores.masked_fill(~keep, -torch.inf)).softmax(-1) @ value


def of_attention(rank: int) -> dict[str, Case]:
    layout, mesh = D.ZigZag(LENGTH), init_device_mesh("cpu", (2,))
    query, key, value = torch.randn(3, 1, 2, LENGTH, 4, generator=torch.Generator().manual_seed(0))
    own = [layout.shard(tensor, 2) for tensor in (query, key, value)]
    mine = layout.shard(plain(query, key, value), 2)
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    half = slice(0, 11) if rank == 0 else slice(11, LENGTH)
    spread = distribute_tensor(query, mesh, [Replicate()])

    def merged() -> Any:
        with torch.no_grad():
            return D.merge(needs()).output

    def needs() -> Any:
        return ch.partial(query.clone().requires_grad_(), key[:, :, half], value[:, :, half])

    def tangents() -> Any:
        return torch.func.vmap(lambda one: D.attention(one, *own[1:], layout=layout))(own[0][None])

    return {
        "whole": (
            lambda: D.attention(query, key, value, layout=layout),
            ["layout.shard(tensor, dim)"],
            lambda: D.attention(*(layout.shard(tensor, 2) for tensor in (query, key, value)), layout=layout),
            lambda: mine,
        ),
        "no layout": (
            lambda: D.attention(*own, layout=[0, 6]),
            ["ZigZag(length, group)"],
            lambda: D.attention(*own, layout=D.ZigZag(LENGTH, None)),
            lambda: mine,
        ),
        "no layout of a batch": (
            lambda: D.shard_batch({"input_ids": torch.arange(LENGTH)[None]}, 3),
            ["ZigZag(length, group)"],
            lambda: D.shard_batch({"input_ids": torch.arange(LENGTH)[None]}, D.ZigZag(LENGTH, None)).inputs[
                "input_ids"
            ],
            lambda: layout.positions()[None],
        ),
        "for arithmetic": (
            lambda: D.attention(*own, layout=D.ZigZag(LENGTH, 2)),
            ["pass it to plan()", "with the group of the processes"],
            lambda: (
                D.attention(*own, layout=D.ZigZag(LENGTH, dist.group.WORLD))
                + 0
                * (
                    D.plan(*(D.ZigZag(LENGTH, 2).shard(t, 2) for t in (query, key, value)), layout=D.ZigZag(LENGTH, 2))
                    is None
                )
            ),
            lambda: mine,
        ),
        "a part again": (
            lambda: layout.shard(own[0], 2),
            ["pass the whole sequence"],
            lambda: layout.shard(query, 2),
            lambda: torch.stack([query[:, :, int(place)] for place in layout.positions()], 2),
        ),
        "a mesh of two": (
            lambda: D.ZigZag(LENGTH, square),
            ["mesh['cp']"],
            lambda: D.attention(*own, layout=D.ZigZag(LENGTH, square["cp"])),
            lambda: mine,
        ),
        "merge": (lambda: D.merge(needs()), ["torch.no_grad()"], merged, lambda: plain(query, key, value)),
        "merge to train": (
            lambda: D.merge(needs()),
            ["clearhead.distributed.attention"],
            lambda: ch.distributed.attention(*own, layout=layout),
            lambda: mine,
        ),
        "vmap": (tangents, ["Call it outside of them"], lambda: D.attention(*own, layout=layout), lambda: mine),
        "a DTensor": (
            lambda: ch.attention(spread, spread, spread, mask=ch.Causal()),
            ["query.to_local()", "query.full_tensor()"],
            lambda: ch.attention(spread.to_local(), *[spread.full_tensor()] * 2, mask=ch.Causal()),
            lambda: plain(query, query, query, torch.ones(LENGTH, LENGTH).tril().bool()),
        ),
        **of_heads(rank),
    }


def of_heads(rank: int) -> dict[str, Case]:
    module, x = drawn()
    bias = torch.randn(1, 8, 6, 6, generator=torch.Generator().manual_seed(2)).double()
    want = expected(module, x, torch.ones(6, 6, dtype=torch.bool), bias).detach()
    shared(module)
    with_norm = lambda: drawn(query_norm=torch.nn.RMSNorm(4))[0]
    normed = expected(with_norm(), x, torch.ones(6, 6, dtype=torch.bool)).detach()
    whole, by_head = shared(with_norm()), shared(with_norm(), norms=True)
    return {
        "a norm of all heads": (
            lambda: whole(x, x, x),
            ["Share out a norm by SequenceParallel(sequence_dim=1, use_local_output=True)", "requires_grad_(False)"],
            lambda: by_head(x, x, x),
            lambda: normed,
        ),
        "a bias of all heads": (
            lambda: module(x, x, x, bias=ch.ALiBi(8)),
            ["as a tensor (B, 4, Lq, Lk)"],
            lambda: module(x, x, x, bias=bias[:, 4 * rank : 4 * rank + 4]),
            lambda: want,
        ),
    }


def of_models(rank: int) -> dict[str, Case]:
    layout, batch = D.ZigZag(LENGTH), batch_of("none")
    ids = batch["input_ids"]
    alone = made("llama")
    with torch.no_grad():
        logits = layout.shard(alone(ids, use_cache=False).logits, 1)
        state = alone.model(ids, use_cache=False).last_hidden_state
    loss = torch.nn.functional.cross_entropy(
        alone(ids).logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    ).detach()
    model = ch.models.run_on_clearhead(made("llama"), layout=layout)
    part = D.shard_batch(batch, layout)
    given, last = part.inputs, rank == 1
    unlabelled = D.shard_batch({"input_ids": ids}, layout)
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    torch.manual_seed(0)
    long = ch.models.run_on_clearhead(llama(rope_parameters=dynamic, max_position_embeddings=LENGTH - 1), layout=layout)
    torch.manual_seed(0)
    roberta = transformers.RobertaModel(transformers.RobertaConfig(**SMALL)).eval()
    of_roberta = layout.shard(roberta(ids).last_hidden_state, 1).detach()
    ch.models.run_on_clearhead(roberta, layout=layout)
    ids_of = roberta.embeddings.create_position_ids_from_input_ids

    def right() -> Any:
        return model(**D.shard_batch(batch, layout).inputs).logits

    def generated() -> Any:
        other = ch.models.run_on_clearhead(ch.models.run_on_clearhead(made("llama"), layout=layout))
        return other.generate(ids, max_new_tokens=2, do_sample=False)[:, :LENGTH]

    def summed() -> Any:
        own = part.loss(model(**part.inputs).logits).detach()
        dist.all_reduce(own)
        return own

    def of_layer() -> Any:
        return model.model(**given).last_hidden_state

    def shorter() -> Any:
        torch.manual_seed(0)
        layout_of = D.ZigZag(8)
        other = ch.models.run_on_clearhead(
            llama(rope_parameters=dynamic, max_position_embeddings=LENGTH - 1), layout=layout_of
        )
        return other(**D.shard_batch({"input_ids": ids[:, :8]}, layout_of).inputs).logits

    def short_alone() -> Any:
        torch.manual_seed(0)
        other = llama(rope_parameters=dynamic, max_position_embeddings=LENGTH - 1)
        return D.ZigZag(8).shard(other(ids[:, :8]).logits, 1)

    few = D.Contiguous([LENGTH, 0])
    return {
        "no ids": (lambda: D.shard_batch({"labels": ids}, layout), ["input_ids (B, L)"], right, lambda: logits),
        "no mapping": (lambda: D.shard_batch(ids, layout), ["a mapping with input_ids"], right, lambda: logits),
        "lists": (
            lambda: D.shard_batch({"input_ids": ids.tolist()}, layout),
            ["a tensor of whole sequences"],
            right,
            lambda: logits,
        ),
        "no labels": (
            lambda: unlabelled.loss(logits),
            ["give shard_batch a batch with labels"],
            summed,
            lambda: loss,
        ),
        "an output": (
            lambda: part.loss(model(**given)),
            ["output.logits"],
            summed,
            lambda: loss,
        ),
        "whole logits": (
            lambda: part.loss(torch.zeros(2, LENGTH, 50)),
            ["those of model(**batch.inputs)"],
            summed,
            lambda: loss,
        ),
        "whole ids": (
            lambda: model(ids, position_ids=torch.arange(LENGTH)[None]),
            [f"(2, {layout.count()})", "model(**part.inputs)", "clearhead.distributed.shard_batch(batch, layout)"],
            right,
            lambda: logits,
        ),
        "a cache": (
            lambda: model(**given, use_cache=True),
            ["use_cache=False"],
            lambda: model(**given, use_cache=False).logits,
            lambda: logits,
        ),
        "generation": (
            lambda: model(**given, use_cache=True),
            ["run_on_clearhead(model)"],
            generated,
            lambda: ids,
        ),
        "unlike": (
            lambda: model(**{**given, "attention_mask": None if last else torch.ones_like(given["input_ids"])}),
            ["model(**part.inputs)"],
            right,
            lambda: logits,
        ),
        "inside": (
            lambda: type(model.model)(model.config)(**given),
            ["call the model"],
            of_layer,
            lambda: layout.shard(state, 1),
        ),
        "dynamic": (lambda: long(**given), ["shorter sequences"], shorter, short_alone),
        "roberta": (
            lambda: roberta(**given),
            ["create_position_ids_from_input_ids"],
            lambda: (
                roberta(
                    **D.shard_batch({"input_ids": ids, "position_ids": ids_of(ids, 0)}, layout).inputs
                ).last_hidden_state
            ),
            lambda: of_roberta,
        ),
        "a rank with none": (
            lambda: ch.models.run_on_clearhead(llama(), layout=few),
            ["a layout with some for each rank"],
            right,
            lambda: logits,
        ),
    }


def everything(rank: int) -> dict[str, dict[str, Any]]:
    """Of each case what was said, the fragments that are not in it, and how far the numbers are apart."""
    found = {}
    for name, (wrong, fragments, put, meant) in {**of_attention(rank), **of_models(rank)}.items():
        try:
            wrong()
            said = "done"
        except ValueError as error:
            said = str(error)
        except Exception as error:
            said = f"{type(error)}: {error}"
        try:
            got, want = put(), meant()
            apart = float((got - want).abs().max()) if got.shape == want.shape else f"{got.shape} {want.shape}"
        except Exception as error:
            apart = repr(error)
        found[name] = {"said": said, "lacks": [one for one in fragments if one not in said], "apart": apart}
    return found
