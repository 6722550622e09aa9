"""Models of transformers with a layout: outputs, losses and gradients of one process; and what is refused, in words."""

import pytest
import torch
from ranks.processes import on_ranks

import clearhead as ch

pytest.importorskip("transformers", reason="the extra [models] is not installed")

D = ch.distributed
EXACT = 1e-10
NORMS_IN_FLOAT32 = 1e-7  # Gemma computes its norms, and their gradients, in float32
REFUSED = {
    "labels": "part.loss", "labels of bert": "part.loss", "cache": "use_cache=False", "past": "a cache of keys",
    "generate": "a cache of keys", "no positions": "position_ids", "local positions": "on every rank",
    "whole": "this rank's part", "whole mask": "this rank's part", "square mask": "this rank's part",
    "three": "this rank's part", "packed": "begin again", "dtensor": "DTensor", "nothing": "needs input_ids",
    "unlike": "2 rows, none", "dynamic": "(dynamic)", "longrope": "(longrope)", "longrope, all beyond": "done",
    "fnet": "no attention", "roberta": "counts positions from 1", "cross": "not shared", "inside": "in its own code",
    "rule": "the rule 'or_masks'", "watch": "in one process", "after": "done",
}  # fmt: skip
MODELS = {
    "mamba": "layers of the kind", "lfm2": "layers of the kind conv", "chunked": "chunked_attention",
    "t5": "an encoder and a decoder", "esm": "token dropout", "bloom": "takes no position_ids",
    "wrapper": "the model inside it", "empty": "no position", "numbers": "for arithmetic",
    "no layout": "pass a Layout", "lstm": "LSTM",
}  # fmt: skip


def test_the_numbers_are_those_of_one_process():
    """Windows, softcaps, sinks, grouped heads, encoders; padding, packed documents; every layout: all exact."""
    for found in on_ranks(3, "ranks.of_transformers:numbers"):
        assert len(found) == 17
        for case, apart in found.items():
            budget = {"gradients": NORMS_IN_FLOAT32} if case.startswith("gemma") else {}
            assert all(value <= budget.get(name, EXACT) for name, value in apart.items()), (case, apart)


def test_data_parallel_wrappers_beside():
    for found in on_ranks(4, "ranks.wrapped:data_parallel"):
        assert len(found) == 4 and max(found.values()) < EXACT, found


def test_checkpoints_copies_setting_back_and_the_example():
    for found in on_ranks(2, "ranks.wrapped:everything"):
        assert all(found["checkpointed"]) and len(found["checkpointed"]) == 8
        assert found["set_back"] == [4, True, True, 4, True, True, True, True, True, True, 0, 0, True]
        assert found["dropout"] and found["one_group"] < EXACT
        apart, learnt = found["example"]
        assert apart < EXACT and learnt > 1


def test_weights_that_are_sharded_are_read_where_they_are_whole():
    for found in on_ranks(2, "ranks.wrapped:read"):
        assert all(
            "fully_shard" in said and "set_reshard_after_forward(False)" in said for said in found["fully_shard"]
        )
        assert max(found["kept whole"]) < EXACT, found
        assert len(found["kept whole"]) == 4 and len(found["tensor parallel"]) == 3
        assert all("sharded (DTensor)" in said for said in found["tensor parallel"]), found


def test_what_is_refused():
    first, last = on_ranks(2, "ranks.refused:everything")
    for said in (first, last):
        for expected, words in ((REFUSED, said["calls"]), (MODELS, said["models"])):
            mine = words.pop("one of them", None)
            assert mine is None or ("part.loss" if said is last else "rank 1 of the group") in mine
            assert {name: word for name, word in words.items() if expected[name] not in word} == {}
            assert words.keys() == expected.keys()
        assert "DTensor" in said["parallel_heads"]
        assert "input_ids differs" in said["batches"]["ids"] and "attention_mask differs" in said["batches"]["mask"]
        assert said["batches"]["after"] == "done"


IDS = torch.arange(16).view(2, 8)
LAYOUT = D.ZigZag(8, 2)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ([IDS], "pass a mapping"),
        ({}, "with input_ids"),
        ({"input_ids": IDS, "inputs_embeds": IDS[..., None].float()}, "in their place"),
        ({"input_ids": IDS, "pixel_values": IDS}, "'pixel_values'"),
        ({"input_ids": IDS.tolist()}, "pass a tensor"),
        ({"input_ids": IDS[:, :7]}, r"expected \(2, 8\)"),
        ({"input_ids": IDS[0]}, "8 positions"),
        ({"input_ids": IDS, "labels": IDS[:1]}, r"expected \(2, 8\)"),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 8, 8)}, r"expected \(2, 8\)"),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 8)}, "whole numbers"),
        ({"input_ids": IDS, "position_ids": IDS[0]}, "whole sequences"),
        ({"inputs_embeds": IDS}, r"expected \(2, 8, E\)"),
    ],
)
def test_a_wrong_batch_is_refused_in_words(batch, words):
    with pytest.raises(ch.ClearheadError, match=words):
        D.shard_batch(batch, LAYOUT)


def test_a_wrong_layout_of_a_batch_and_wrong_logits():
    with pytest.raises(ch.ClearheadError, match="pass a Layout"):
        D.shard_batch({"input_ids": IDS}, 2)
    with pytest.raises(ch.ClearheadError, match="no labels"):
        D.shard_batch({"input_ids": IDS}, LAYOUT).loss(torch.zeros(2, 4, 20))
    part = D.shard_batch({"input_ids": IDS, "labels": IDS}, LAYOUT)
    for wrong, words in ((torch.zeros(2, 8, 20), "targets"), ([0.0], r"output\.logits")):
        with pytest.raises(ch.ClearheadError, match=words):
            part.loss(wrong)


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_losses_of_the_parts_are_terms_of_the_mean(shift, dtype):
    labels = IDS.masked_fill(IDS % 5 == 0, -100)
    logits = torch.randn(2, 8, 20, dtype=dtype, generator=torch.Generator().manual_seed(0))
    chunks = [[range(0, 3), range(5, 6)], [range(3, 5), range(6, 8)]]
    terms = []
    for own in (chunks, chunks[::-1]):  # each counts as the first rank
        layout = D.Layout(own, 2)
        part = D.shard_batch({"input_ids": IDS, "labels": labels}, layout, shift=shift)
        terms.append(part.loss(layout.shard(logits, 1)))
    of, to = (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)
    wide = of.double() if dtype is torch.float64 else of.float()
    mean = torch.nn.functional.cross_entropy(wide.flatten(0, 1), to.flatten())
    assert terms[0].dtype == wide.dtype and torch.allclose(sum(terms), mean, rtol=1e-6)


def test_without_any_label_the_loss_is_0():
    part = D.shard_batch({"input_ids": IDS, "labels": torch.full_like(IDS, -100)}, LAYOUT)
    logits = torch.randn(2, 4, 20, requires_grad=True)
    part.loss(logits).backward()
    assert part.tokens == 0 and not logits.grad.any()


def test_gradients_where_parameters_are_shared_out():
    """A parameter is freed between the forward and the backward pass."""
    for found in on_ranks(2, "ranks.watched:gradients"):
        assert len(found) == 4 and max(found) < 1e-5, found
