"""Masks in which the last key that a query sees is not its own: where a query stands is not read from its keys."""

import itertools
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import clearhead as ch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import GROUPED, IDS, SMALL, made  # noqa: E402

LENGTH, SLOTS = 9, 14
ROPE = {"max_position_embeddings": 64}
INDEXED = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
INDEXED |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}
INDEXED |= {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "index_topk": 2, "index_n_heads": 2}
INDEXED |= {"index_head_dim": 8, "qk_head_dim": 12}
MODELS = {
    "Llama": ("Llama", {**SMALL, **GROUPED, **ROPE}),
    "GPTNeoX": ("GPTNeoX", {**SMALL, **ROPE}),
    "DeepseekV32": ("DeepseekV32", {**SMALL, **INDEXED, **ROPE}),
    "GlmMoeDsa": ("GlmMoeDsa", {**SMALL, **INDEXED, **ROPE}),
}


class Slots(torch.nn.Module):
    """Attention over slots that are written in place, as a static cache's, by code that has no cache of a library.

    `said`: the argument that says where the queries stand.
    """

    def __init__(self, said):
        super().__init__()
        self.said, self.inner = said, Layer()
        self.embed = torch.nn.Embedding(100, 32)

    def forward(self, input_ids, attention_mask, past_key_values, **positions):
        return self.embed(input_ids) + self.inner(self.embed(input_ids), attention_mask, past_key_values, **positions)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, x, mask, slots, **positions):
        query, key, value = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        at = next(iter(positions.values())).flatten()[: x.shape[1]]
        for slot, new in zip(slots, (key, value), strict=True):
            slot[:, :, at] = new
        output = F.scaled_dot_product_attention(query, *(slot.clone() for slot in slots), attn_mask=mask)
        return output.transpose(1, 2).flatten(2)


def sparse(rng):
    """A mask (1, 1, LENGTH, LENGTH): each query sees some keys up to its own, often not its own."""
    allow = torch.from_numpy(rng.random((LENGTH, LENGTH)) < 0.4).tril(-int(rng.integers(0, 3)))
    allow[:, 0] |= ~allow.any(-1)
    return allow[None, None]


def steps_of(name, rng):
    """The layers' names, and a function that runs the model in steps and gives (1, LENGTH, E)."""
    cuts = [0, *sorted(rng.choice(np.arange(1, LENGTH), 4, replace=False).tolist()), LENGTH]
    static, allow = bool(rng.integers(2)), sparse(rng)
    width = SLOTS if static or name.startswith("slots") else LENGTH
    wide = F.pad(allow, (0, width - LENGTH))
    if name.startswith("slots"):
        torch.manual_seed(0)
        model = Slots(name.split()[1]).eval()

        def run():
            slots = [torch.zeros(1, 4, SLOTS, 8) for _ in range(2)]
            parts = []
            for low, high in itertools.pairwise(cuts):
                at = torch.arange(low, high)
                said = {model.said: at if model.said == "cache_position" else at[None]}
                parts.append(model(IDS[:1, low:high], wide[:, :, low:high], slots, **said))
            return torch.cat(parts, 1)

        return model, run, allow
    kind, sizes = MODELS[name]
    model = made(kind, times=10, **sizes, attn_implementation=str(rng.choice(["sdpa", "eager"])))

    def run():
        config = model.config
        cache = transformers.StaticCache(config=config, max_cache_len=SLOTS) if static else transformers.DynamicCache()
        if "index_topk" in sizes and not static:
            cache = transformers.DynamicCache(config=config)
        parts = []
        for low, high in itertools.pairwise(cuts):
            mask = wide[:, :, low:high] if static else wide[:, :, low:high, :high]
            mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
            given = {} if "index_topk" in sizes else {"attention_mask": mask}
            parts.append(model(IDS[:1, low:high], past_key_values=cache, **given).last_hidden_state)
        return torch.cat(parts, 1)

    return model, run, None if "index_topk" in sizes else allow


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", [*MODELS, "slots cache_position", "slots position_ids"])
def test_an_edit_and_joined_rows_are_of_the_position_that_is_meant(name, seed):
    rng = np.random.default_rng(seed)
    model, run, allow = steps_of(name, rng)
    with torch.no_grad():
        with ch.watch(model) as seen:
            plain = run()
        last = seen.names[-1]
        for query in rng.choice(LENGTH, 3, replace=False).tolist():
            with ch.edit(model, ch.edits.ScaleHeads(layers=len(seen.names) - 1, queries=query, factor=-1)):
                change = (run() - plain).abs().amax((0, 2))
            assert (change > 1e-6).nonzero().flatten().tolist() == [query]
    steps = seen[last]
    joined = steps.joined()
    assert joined.shape[2:] == (LENGTH, LENGTH)
    at = 0
    for call in steps:
        rows = call.weights.dense()[..., :LENGTH]
        torch.testing.assert_close(joined[:, :, at : at + rows.shape[2], : rows.shape[3]], rows)
        at += rows.shape[2]
    if allow is not None:
        assert torch.equal(joined.dense() > 0, allow.expand(joined.shape))
    assert steps.positions == (range(LENGTH), range(LENGTH))


def test_a_bias_and_a_mask_of_the_whole_sequence_meet_their_keys():
    """Matrices over positions, for steps whose last key in sight is an earlier one."""
    rng = np.random.default_rng(7)
    model, run, allow = steps_of("slots cache_position", rng)
    bias = torch.from_numpy(rng.standard_normal((LENGTH, LENGTH))).float()
    with torch.no_grad(), ch.watch(model) as seen:
        run()
    scores = torch.cat([call.query for call in seen], 2) @ seen[-1].key[:, :, :LENGTH].mT / 8**0.5
    wanted = (scores + bias).masked_fill(~allow, -torch.inf).softmax(-1)
    with torch.no_grad(), ch.watch(model) as seen, ch.edit(model, ch.edits.AddBias(bias)):
        run()
    for low, call in zip(np.cumsum([0, *(call.shape[2] for call in seen)]), seen, strict=False):
        found = call.weights.dense()[..., :LENGTH]
        torch.testing.assert_close(found, wanted[:, :, low : low + found.shape[2]], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["Llama", "slots cache_position"])
def test_a_table_of_a_step_counts_from_its_query(name):
    """Behind the last query of a static cache stand empty slots: they move neither distances nor neighbours."""
    for seed in range(3):
        model, run, _ = steps_of(name, np.random.default_rng(seed))
        with torch.no_grad(), ch.watch(model) as seen:
            run()
        at = 0
        for call in seen[seen.names[-1]]:
            weights = call.weights.dense()[..., :LENGTH].double()
            places = torch.arange(at, at + weights.shape[2])[:, None] - torch.arange(weights.shape[3])
            rows = ch.models.Recording([call]).table()
            # keys that no query of a prompt sees are its padding, and so are the queries there
            counted = slice(None) if call.padding is None else call.padding.queries[0]
            for head, row in enumerate(rows):
                far = (weights[0, head] * places.abs()).sum(-1)[counted].mean()
                assert row["MeanDistance (positions)"] == pytest.approx(float(far), abs=1e-5)
            at += weights.shape[2]
