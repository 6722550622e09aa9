"""Sweeps, against hooks of our own and against themselves in batches and in parts."""

from __future__ import annotations

import json
import random
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import OWN_EAGER, SIZES, SMALL, pair
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import clearhead as ch

IDS = torch.tensor([[1, 5, 9, 2, 7, 3], [4, 4, 8, 6, 0, 11]])
SAME = {**SIZES, "vocab_size": 20}


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SAME, num_key_value_heads=2)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def ablated(layer: Any, head: Any) -> ch.edits.Edit:
    return ch.edits.Ablate(layer, head)


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_sweep_is_what_hooks_do(llama: Any, batch: int) -> None:
    metric = ch.models.logit_difference(token=[7, 3], against=2)
    found = ch.models.sweep(llama, ablated, {"input_ids": IDS}, metric, batch=batch)
    assert [(row["layer"], row["head"]) for row in found] == [(n, h) for n in range(2) for h in range(4)]
    plain = float(metric(llama(input_ids=IDS)).double().mean())
    assert abs(found.plain - plain) < 1e-6
    for row in found:

        def without(module: Any, args: Any, row: Any = row) -> Any:
            x = args[0].clone()
            x[..., 8 * row["head"] : 8 * row["head"] + 8] = 0
            return (x,)

        hook = llama.model.layers[row["layer"]].self_attn.o_proj.register_forward_pre_hook(without)
        wanted = float(metric(llama(input_ids=IDS)).double().mean())
        hook.remove()
        assert abs(row["value"] - wanted) < 1e-5 and abs(row["effect"] - (wanted - plain)) < 1e-5


@torch.no_grad()
def test_positions_and_patches_in_batches(llama: Any) -> None:
    with ch.watch(llama, values=True) as seen:
        llama(input_ids=IDS.flip(1))

    def patched(layer: Any, position: int) -> list[ch.edits.Edit]:
        return [
            ch.edits.Patch(seen, layer, part="value", keys=position),
            ch.edits.Patch(seen, layer, heads=[0, 3], part="output", queries=position),
        ]

    metric = ch.models.kl(llama(input_ids=IDS))
    one, four = (
        ch.models.sweep(llama, patched, {"input_ids": IDS}, metric, ("layer", "position"), batch=batch)
        for batch in (1, 5)
    )
    assert len(one) == len(four) == 12 and abs(one.plain) < 1e-9
    assert max(abs(a["value"] - b["value"]) for a, b in zip(one, four, strict=True)) < 1e-5
    grid, rows, columns = four.grid("layer", "position")
    assert grid.shape == (2, 6) and (rows, columns) == ([0, 1], list(range(6)))
    assert np.isfinite(grid).all() and grid.max() > 1e-3


@torch.no_grad()
def test_stacks_are_named_and_padding_is_kept(llama: Any) -> None:
    torch.manual_seed(0)
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=20, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=2)
    ).eval()
    inputs = {
        "input_ids": IDS,
        "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2]),
        "decoder_input_ids": IDS[:, :3],
    }
    metric = ch.models.next_token_loss(IDS[:, :3])
    one, two = (ch.models.sweep(t5, ablated, inputs, metric, batch=batch) for batch in (1, 4))
    assert [row["layer"] for row in one] == ["encoder 0"] * 2 + ["decoder 0"] * 2 + ["decoder 0, cross"] * 2
    assert max(abs(a["value"] - b["value"]) for a, b in zip(one, two, strict=True)) < 1e-5
    bert = BertForMaskedLM(BertConfig(**SAME)).eval()
    found = ch.models.sweep(
        bert, lambda layer: ch.edits.Ablate(layer), {"input_ids": IDS}, lambda out: out.logits.std(), "layer"
    )
    assert [row["layer"] for row in found] == [0, 1]


@torch.no_grad()
@pytest.mark.parametrize("name", ["Gemma2", "GptOss", "DiffLlama"])
def test_models_that_return_weights_run_several_cells_at_once(name: str) -> None:
    model = pair(name, OWN_EAGER.get(name, SMALL))[1]
    metric = lambda out: out.last_hidden_state.flatten(1).std(1)
    one, three = (ch.models.sweep(model, ablated, {"input_ids": IDS}, metric, batch=batch) for batch in (1, 3))
    assert max(abs(a["value"] - b["value"]) for a, b in zip(one, three, strict=True)) < 1e-4
    torch.manual_seed(0)
    block, x = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval(), torch.randn(2, 5, 16)
    for mean in (True, False):  # the weights that the module returns are those of each cell
        given, weights = (x, x, x, None, True, None, mean), lambda out: out[1].square().flatten(1).sum(1)
        edit = lambda head: ch.edits.Knockout(heads=head, keys=0)
        one, three = (ch.models.sweep(block, edit, given, weights, "head", batch=batch) for batch in (1, 3))
        assert max(abs(a["value"] - b["value"]) for a, b in zip(one, three, strict=True)) < 1e-6
        assert max(abs(a["effect"]) for a in one) > 1e-3


@torch.no_grad()
def test_what_is_repeated_is_told_by_the_attention_calls(llama: Any) -> None:
    metric, places = ch.models.logit_difference(token=7), torch.arange(6)[None]
    inputs = {"position_ids": places, "input_ids": IDS}  # the first one is for all sequences
    one, three = (ch.models.sweep(llama, ablated, inputs, metric, batch=batch) for batch in (1, 3))
    assert max(abs(a["value"] - b["value"]) for a, b in zip(one, three, strict=True)) < 1e-5
    cache = {"input_ids": IDS[:, 3:], "past_key_values": llama(input_ids=IDS[:, :3], use_cache=True).past_key_values}
    with pytest.raises(ch.ClearheadError, match="DynamicCache"):
        ch.models.sweep(llama, ablated, cache, metric, batch=3)
    with pytest.raises(ch.ClearheadError, match="such as a loss, are None"):  # it is of all cells together
        ch.models.sweep(llama, ablated, {"input_ids": IDS, "labels": IDS}, lambda out: out.loss, batch=3)
    block, x = torch.nn.MultiheadAttention(16, 4).eval(), torch.randn(2, 5, 16)  # (L, B, E)
    with pytest.raises(ch.ClearheadError, match=r"have \[5\] sequences"):
        ch.models.sweep(block, ablated, (x, x, x), lambda out: out[0].std(), batch=3)

    class Learned(torch.nn.Module):
        """A call of one sequence for all."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one = torch.ones(1, 4, 5, 8)
            every = torch.nn.functional.scaled_dot_product_attention(one, one, one)
            return torch.nn.functional.scaled_dot_product_attention(x, x, x + every)

    for count in (1, 2):
        with pytest.raises(ch.ClearheadError, match="batch=1"):
            ch.models.sweep(Learned(), ablated, torch.randn(count, 4, 5, 8), lambda out: out.std(), batch=3)


@torch.no_grad()
def test_an_interrupted_sweep_goes_on(llama: Any, tmp_path: Path) -> None:
    metric, made = ch.models.logit_difference(token=7), []

    def counted(layer: Any, head: Any) -> ch.edits.Edit:
        made.append((layer, head))
        if len(made) == 6:
            raise KeyboardInterrupt
        return ablated(layer, head)

    whole = ch.models.sweep(llama, ablated, IDS, metric)
    with pytest.raises(KeyboardInterrupt):
        ch.models.sweep(llama, counted, IDS, metric, batch=2, folder=tmp_path / "kept")
    kept = tmp_path / "kept" / "sweep.jsonl"
    assert len(kept.read_text().splitlines()) == 3  # the header, and two runs of two cells
    with kept.open("a") as file:
        file.write("[1.0, 2.")  # a line that was interrupted
    found = ch.models.sweep(llama, counted, IDS, metric, batch=2, folder=tmp_path / "kept")
    assert len(made) == 6 + 8  # those that are done are made to be compared
    assert max(abs(a["value"] - b["value"]) for a, b in zip(found, whole, strict=True)) < 1e-5
    again = ch.models.sweep(llama, counted, IDS, metric, batch=2, folder=tmp_path / "kept")
    assert len(made) == 6 + 16 and again == found and "1.0, 2." not in kept.read_text()
    with pytest.raises(ch.ClearheadError, match="another sweep"):
        ch.models.sweep(llama, lambda layer: ch.edits.Ablate(layer), IDS, metric, "layer", folder=tmp_path / "kept")
    with pytest.raises(ch.ClearheadError, match="another sweep"):
        ch.models.sweep(llama, ablated, IDS.flip(1), metric, folder=tmp_path / "kept")
    kept.write_text(json.dumps(["something"]) + "\n")
    with pytest.raises(ch.ClearheadError, match=r"line 1 of .* its checksum is missing"):
        ch.models.sweep(llama, ablated, IDS, metric, folder=tmp_path / "kept")


def other_edits() -> dict[str, Any]:
    """By name: two edits of a cell, and what the error says that they differ in."""
    one, two = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0))
    at = lambda kind, *rest: lambda layer, head: kind(*rest, layers=layer, heads=head)
    return {
        "kind": (ablated, lambda layer, head: ch.edits.Knockout(layer, head, keys=0), "edits of .*Knockout"),
        "number": (
            lambda layer, head: ch.edits.ScaleHeads(layer, head, 0.5),
            lambda layer, head: ch.edits.ScaleHeads(layer, head, 0.25),
            r"edits of .*factor=0.25",
        ),
        "tensor": (at(ch.edits.AddBias, one), at(ch.edits.AddBias, two), "edits of"),
        "tensor of a bias": (
            at(ch.edits.AddBias, ch.DenseBias(one)),
            at(ch.edits.AddBias, ch.DenseBias(two)),
            "edits of",
        ),
        "mask": (
            at(ch.edits.ForceMask, ch.DenseMask(one > 0) | ch.Causal()),
            at(ch.edits.ForceMask, ch.DenseMask(two > 0) | ch.Causal()),
            "edits of",
        ),
        "function": (
            at(ch.edits.MapWeights, lambda w: w / 2),
            at(ch.edits.MapWeights, lambda w: w / 4),
            "in what its edits, its model or its metric do",
        ),
    }


@torch.no_grad()
@pytest.mark.parametrize("kind", [*other_edits(), "recording", "metric", "inputs"])
def test_the_folder_of_another_sweep_is_refused(llama: Any, tmp_path: Path, kind: str) -> None:
    metric: Any = ch.models.logit_difference(7)
    first, second, words = other_edits().get(kind, (ablated, ablated, ""))
    given = [(first, IDS, metric), (second, IDS, metric)]
    if kind == "recording":
        with ch.watch(llama, values=True) as seen:
            llama(IDS.flip(1)), llama(IDS.flip(0))
        first, second = ((lambda layer, head, run=run: ch.edits.Patch(run, layer, head)) for run in seen.runs)
        given, words = [(first, IDS, metric), (second, IDS, metric)], "in what its edits"
    if kind == "metric":  # of one name, and of one number without an edit
        plain = metric(llama(IDS)).double().mean()
        of = lambda times: lambda out: plain + times * (metric(out).double().mean() - plain)
        given, words = [(ablated, IDS, of(1)), (ablated, IDS, of(2))], "its metric do"
    if kind == "inputs":
        given, words = [(ablated, IDS, metric), (ablated, IDS.flip(0), metric)], "in its inputs"
    results = [ch.models.sweep(llama, *each, batch=8) for each in given]
    kept = ch.models.sweep(llama, *given[0], batch=8, folder=tmp_path)
    assert kept == results[0] and (kind == "inputs" or not torch.equal(results[0].values, results[1].values))
    with pytest.raises(ch.ClearheadError, match=f"another sweep, which differs .*{words}"):
        ch.models.sweep(llama, *given[1], batch=8, folder=tmp_path)
    assert ch.models.sweep(llama, *given[0], batch=8, folder=tmp_path) == kept


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"over": "heads"}, "expected one or several"),
        ({"over": ("layer", "layer")}, "expected one or several"),
        ({"make_edit": lambda layer, head: None}, "expected an edit"),
        ({"metric": lambda out: out.logits}, "expected a number"),
        ({"metric": lambda out: "much"}, "expected a number"),
        ({"batch": 0}, "batch"),
        ({"metric": ch.models.logit_difference(99)}, "token is 99"),
        ({"metric": ch.models.logit_difference(1, position=6)}, "position is 6"),
        ({"metric": ch.models.next_token_loss(IDS[:1])}, "expected"),
    ],
)
def test_wrong_arguments_are_told(llama: Any, given: dict[str, Any], words: str) -> None:
    right = {"make_edit": ablated, "inputs": {"input_ids": IDS}, "metric": ch.models.logit_difference(1)}
    with pytest.raises(ch.ClearheadError, match=words):
        ch.models.sweep(llama, **{**right, **given})


@torch.no_grad()
def test_a_batched_sweep_is_not_recorded(llama: Any) -> None:
    with pytest.warns(UserWarning, match="batch=1"), ch.watch(llama):
        ch.models.sweep(llama, ablated, IDS, ch.models.logit_difference(1), batch=4)


@torch.no_grad()
def test_a_folder_of_a_metric_that_is_no_number_and_a_broken_header(llama: Any, tmp_path: Path) -> None:
    nan = lambda out: torch.tensor(float("nan"))
    given = (llama, lambda layer: ch.edits.Ablate(layer), IDS, nan, "layer")
    for _ in range(2):
        assert len(ch.models.sweep(*given, folder=tmp_path)) == 2
    for broken in ("[" * 100_000, '{"clearhead sweep": 2}', "{}", "null", "\0"):
        (tmp_path / "sweep.jsonl").write_text(broken + "\n")
        with pytest.raises(ch.ClearheadError, match=r"line 1 of .* its checksum is missing"):
            ch.models.sweep(*given, folder=tmp_path)


@torch.no_grad()
def test_a_changed_byte_in_the_folder_is_told_or_computed_anew(llama: Any, tmp_path: Path) -> None:
    """Whatever byte differs, no other number is in the table; the error names the line."""
    given = (llama, ablated, IDS, ch.models.logit_difference(5))
    whole, file, draw = ch.models.sweep(*given, batch=2, folder=tmp_path), tmp_path / "sweep.jsonl", random.Random(0)
    raw, told = file.read_bytes(), 0
    for at in (len(raw) - 1, *(draw.randrange(len(raw)) for _ in range(60))):
        file.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << draw.randrange(8)]) + raw[at + 1 :])
        try:
            assert ch.models.sweep(*given, batch=2, folder=tmp_path) == whole
        except ch.ClearheadError as error:
            line = 1 + raw[:at].count(b"\n")
            told += f"line {line} of {str(file)!r}" in str(error)
    assert told >= 58  # the last newline belongs to a line that is computed again


@torch.no_grad()
@pytest.mark.skipif(sys.platform != "linux", reason="the limit of a file's size is Linux's")
@pytest.mark.parametrize("fault", ["a full disk", "a removed folder"])
def test_a_folder_that_cannot_be_written_to_is_told_and_the_sweep_goes_on(
    llama: Any, tmp_path: Path, fault: str
) -> None:
    metric, made, limits = ch.models.logit_difference(5), [], resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = tmp_path / "kept"
    whole = ch.models.sweep(llama, ablated, IDS, metric)

    def broken(layer: Any, head: Any) -> ch.edits.Edit:
        made.append((layer, head))
        if len(made) == 4 and fault == "a removed folder":
            shutil.rmtree(folder)
        elif len(made) == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, ((folder / "sweep.jsonl").stat().st_size + 7, limits[1]))
        return ablated(layer, head)

    try:
        with pytest.raises(ch.ClearheadError, match=f"cannot write .*{folder}.* start again with the same arguments"):
            ch.models.sweep(llama, broken, IDS, metric, folder=folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    made.clear()
    made.extend([None] * 4)  # nothing breaks again
    assert ch.models.sweep(llama, broken, IDS, metric, folder=folder) == whole


@torch.no_grad()
def test_a_sweep_goes_on_after_a_write_that_was_interrupted(llama: Any, tmp_path: Path) -> None:
    """Whatever was written of the file, the numbers are the same, and no cell that was written whole runs again."""
    metric = ch.models.logit_difference(5)
    given = (llama, lambda layer: ch.edits.Ablate(layer), IDS, metric, "layer")
    whole, file = ch.models.sweep(*given, folder=tmp_path), tmp_path / "sweep.jsonl"
    text = file.read_text()
    ends = [at for at, sign in enumerate(text) if sign == "\n"]
    for cut in (0, 40, *(end + more for end in ends for more in (-1, 0, 1))):
        file.write_text(text[:cut])
        assert ch.models.sweep(*given, folder=tmp_path) == whole
        assert file.read_text() == text, cut


def test_measures_at_their_edges() -> None:
    none, some = torch.tensor([[0.0, -torch.inf, 1.0]]), torch.zeros(1, 3)
    assert ch.models.kl(none)(none) == 0 and ch.models.kl(some)(none) == torch.inf
    assert torch.isfinite(ch.models.kl(none)(some)).all()
    for ids in (torch.tensor([[0, 3]]), torch.tensor([[0.0, 1.0]])):
        with pytest.raises(ch.ClearheadError, match="below 3"):
            ch.models.next_token_loss(ids)(torch.zeros(1, 2, 3))


def test_a_sweep_is_drawn(llama: Any) -> None:
    pytest.importorskip("matplotlib")
    found = ch.models.sweep(llama, ablated, IDS, ch.models.logit_difference(1), batch=4)
    axes = found.plot()
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("head", "layer")
    drawn = axes.images[0].get_array()
    assert np.allclose(np.asarray(drawn), found.grid("layer", "head")[0])
    ch.models.sweep(llama, lambda layer: ch.edits.Ablate(layer), IDS, ch.models.logit_difference(1), "layer").plot()


@torch.no_grad()
def test_a_grid_of_three_sides_names_the_third(llama: Any) -> None:
    """A cell of the matrix is one cell of the sweep, and never the last of several."""
    found = ch.models.sweep(
        llama,
        lambda layer, head, position: ch.edits.Ablate(layer, head, queries=position),
        {"input_ids": IDS[:, :3]},
        ch.models.logit_difference(3),
        ("layer", "head", "position"),
        batch=8,
    )
    grid, heads, positions = found.grid("head", "position", layer=1)
    by_hand = [[row["effect"] for row in found if (row["layer"], row["head"]) == (1, head)] for head in heads]
    assert np.array_equal(grid, np.array(by_hand)) and positions == [0, 1, 2]
    with pytest.raises(ch.ClearheadError, match=r"several cells .* the third side"):
        found.grid("layer", "head")
