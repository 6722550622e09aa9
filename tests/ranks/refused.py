"""What a model with a layout is not, or is not called with: what every rank runs, and what it is told."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from ranks.of_transformers import GROUPED, LENGTH, SMALL, batch_of, llama, made
from ranks.words import each_said, said
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import clearhead as ch

D = ch.distributed


def calls(rank: int) -> dict[str, str]:
    """Calls of a model; the last finds it as it was."""
    layout = D.ZigZag(LENGTH)
    model, batch = ch.models.run_on_clearhead(made("llama"), layout=layout), batch_of("right")
    part = D.shard_batch(batch, layout)
    given, last = part.inputs, rank == dist.get_world_size() - 1
    ids, positions = given["input_ids"], given["position_ids"]
    contiguous = D.Contiguous([12, 11])
    other = ch.models.run_on_clearhead(made("llama"), layout=contiguous)
    local = torch.arange(contiguous.count())[None]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    spread = distribute_tensor(batch["input_ids"], mesh, [Shard(1)])
    cache = transformers.DynamicCache(config=model.config)
    frequencies = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    dynamic = ch.models.run_on_clearhead(
        llama(rope_parameters=frequencies, max_position_embeddings=LENGTH - 1), layout=layout
    )
    bert = ch.models.run_on_clearhead(made("bert"), layout=layout)
    decoder = transformers.BertConfig(**SMALL, is_decoder=True, add_cross_attention=True)
    roberta = ch.models.run_on_clearhead(transformers.RobertaModel(transformers.RobertaConfig(**SMALL)), layout=layout)
    fnet = ch.models.run_on_clearhead(
        transformers.FNetModel(transformers.FNetConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1)),
        layout=layout,
    )
    across = ch.models.run_on_clearhead(transformers.BertLMHeadModel(decoder), layout=layout)
    states = torch.zeros(2, layout.count(), 16, dtype=torch.float64)
    watched = ch.watch(model)

    def seen() -> None:
        with pytest.warns(UserWarning) as warned, watched:
            model(**given)
        raise ch.ClearheadError(str(warned[0].message))

    found = {
        "labels": lambda: model(**given, labels=ids),
        "labels of bert": lambda: bert(**given, labels=ids),
        "cache": lambda: model(**given, use_cache=True),
        "past": lambda: model(**given, past_key_values=cache),
        "generate": lambda: model.generate(batch["input_ids"], max_new_tokens=2),
        "no positions": lambda: model(input_ids=ids),
        "local positions": lambda: other(input_ids=batch["input_ids"][:, : contiguous.count()], position_ids=local),
        "whole": lambda: model(batch["input_ids"], position_ids=torch.arange(LENGTH)[None]),
        "whole mask": lambda: model(**{**given, "attention_mask": batch["attention_mask"]}),
        "square mask": lambda: model(**{**given, "attention_mask": torch.ones(2, 1, len(ids[0]), len(ids[0]))}),
        "three": lambda: model(**{**given, "position_ids": positions.expand(3, 2, -1)}),
        "packed": lambda: model(**given, cu_seq_lens_q=torch.tensor([0, 5])),
        "dtensor": lambda: model(input_ids=spread, position_ids=positions),
        "nothing": lambda: model(position_ids=positions),
        "one of them": lambda: model(**given, labels=ids if last else None),
        "unlike": lambda: model(**{**given, "attention_mask": None if last else given["attention_mask"]}),
        "dynamic": lambda: dynamic(**given),
        "longrope": lambda: _longrope(D.Contiguous(LENGTH), batch),
        "longrope, all beyond": lambda: _longrope(layout, batch),
        "fnet": lambda: fnet(input_ids=ids, position_ids=positions),
        "roberta": lambda: roberta(**given),
        "cross": lambda: across(**given, encoder_hidden_states=states),
        "inside": lambda: model.model.layers[0].self_attn(states, (states[:1, :, :4], states[:1, :, :4]), None),
        "rule": lambda: _by_own_rule(model, given),
        "watch": seen,
        "after": lambda: model(**given),
    }
    return each_said(found)


def _by_own_rule(model: Any, given: dict[str, Any]) -> None:
    """A model whose mask has a rule of its own, as those of images in a text have."""
    from transformers.models.llama import modeling_llama

    original = modeling_llama.create_causal_mask

    def with_rule(**kwargs: Any) -> Any:
        return original(**kwargs, or_mask_function=lambda b, h, q, k: q == k)

    modeling_llama.create_causal_mask = with_rule
    try:
        model(**given)
    finally:
        modeling_llama.create_causal_mask = original


def _longrope(layout: Any, batch: Any) -> None:
    """Ranks with different frequencies are refused; beyond the limit, all have those of the whole sequence."""
    torch.manual_seed(0)
    factors = {
        "short_factor": [1.0, 2.0],
        "long_factor": [3.0, 7.0],
        "original_max_position_embeddings": LENGTH // 2 + 1,
    }
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, **factors}
    model = llama(rope_parameters=parameters, max_position_embeddings=2 * LENGTH).eval()
    whole = model(input_ids=batch["input_ids"]).logits
    part = D.shard_batch({"input_ids": batch["input_ids"]}, layout)
    found = ch.models.run_on_clearhead(model, layout=layout)(**part.inputs).logits
    assert torch.allclose(found, layout.shard(whole, 1), atol=1e-5)


def parallel_heads(rank: int) -> str:
    """Activations that are DTensors."""
    layout = D.ZigZag(LENGTH)
    model = ch.models.run_on_clearhead(made("llama"), layout=layout)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    given = D.shard_batch(batch_of("none"), layout).inputs
    attention = model.model.layers[0].self_attn
    attention.v_proj.register_forward_hook(
        lambda module, args, output: distribute_tensor(output.detach(), mesh, [Replicate()])
    )
    return said(lambda: model(**given))


def models(rank: int) -> dict[str, str]:
    """Models that cannot have a layout."""
    layout = D.ZigZag(LENGTH)
    kinds: dict[str, Any] = {
        "mamba": transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1)
        ),
        "lfm2": transformers.Lfm2ForCausalLM(
            transformers.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"], full_attn_idxs=None)
        ),
        "chunked": transformers.Llama4ForCausalLM(
            transformers.Llama4TextConfig(**SMALL, head_dim=4, num_key_value_heads=2, num_local_experts=2)
        ),
        "t5": transformers.T5Model(transformers.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1)),
        "esm": transformers.EsmModel(transformers.EsmConfig(**SMALL, token_dropout=True)),
        "bloom": transformers.BloomModel(transformers.BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=4)),
    }
    found = {
        name: said(lambda model=model: ch.models.run_on_clearhead(model, layout=layout))
        for name, model in kinds.items()
    }
    found["lstm"] = said(lambda: ch.models.run_on_clearhead(_with_lstm(), layout=layout))
    found["wrapper"] = said(lambda: ch.models.run_on_clearhead(torch.nn.Sequential(llama()), layout=layout))
    found["empty"] = said(lambda: ch.models.run_on_clearhead(llama(), layout=D.Contiguous([LENGTH, 0])))
    found["numbers"] = said(lambda: ch.models.run_on_clearhead(llama(), layout=D.ZigZag(LENGTH, 2)))
    found["no layout"] = said(lambda: ch.models.run_on_clearhead(llama(), layout=[0, 1]))
    return found


def _with_lstm() -> Any:
    model = llama()
    model.model.norm = torch.nn.LSTM(16, 16)
    return model


def batches(rank: int) -> dict[str, str]:
    """Batches that are not the same, or are not whole."""
    layout, batch = D.ZigZag(LENGTH), batch_of("right")
    last = rank == dist.get_world_size() - 1
    unlike = copy.deepcopy(batch)
    unlike["input_ids"][0, 0] += last
    return {
        "ids": said(lambda: D.shard_batch(unlike, layout)),
        "mask": said(lambda: D.shard_batch({**batch, "attention_mask": None} if last else batch, layout)),
        "after": said(lambda: D.shard_batch(batch, layout)),
    }


def everything(rank: int) -> dict[str, Any]:
    return {f.__name__: f(rank) for f in (calls, models, batches, parallel_heads)}
