"""A sample of the audits that `tests/every_audit.py` makes of every architecture, and the page that it writes."""

import os
import re

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")

from zoo.registry import names  # noqa: E402

from audits import architectures, table  # noqa: E402

EXACT = {"exact", "rounding"}
# one for each way to attention, to padding, to documents and to a mask
SAMPLE = {
    "llama": {},
    "bert": {},
    "t5": {},
    "whisper": {},
    "xlnet": {},
    "gemma3_text": {},
    "mamba": {},
    "vit": {"plain": "not examined"},
    "aimv2_text_model": {"plain": "**leaks**"},
    "mobilebert": {"right padding": "**leaks**", "left padding": "**leaks**"},
    "gpt_oss": {"packed": "**leaks**"},
    "lfm2_moe": {"packed": "**leaks**"},
}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample(name):
    row = architectures.audit_architecture(name)
    _, cells = table.make_row(row)
    for case in row["cases"]:
        expected = SAMPLE[name].get(case)
        assert cells[case] in ({expected} if expected else EXACT), row["cases"][case]
    assert not any(case["once"] for case in row["cases"].values())


def move_outputs(name, case):
    """How far outputs move, without the audit, when inputs change that must not reach them; and the gradient of these.

    Both as a part of what inputs do that may reach them.
    """
    torch.manual_seed(0)
    model, (given, *_) = architectures.small_model(name)
    ids, (batch, _) = (
        given["input_ids"],
        architectures.make_cases(model, given, architectures.find_group(name).kind)[case],
    )
    hidden, kept = (torch.zeros(ids.shape, dtype=torch.bool) for _ in range(2))
    if "padding" in case:
        hidden, kept = batch["attention_mask"] == 0, batch["attention_mask"] == 1
        hidden, kept = hidden[-1:].expand(2, -1) & hidden, kept
    else:
        border = architectures.DOCUMENT if case == "packed" else ids.shape[1] // 2
        first = (torch.arange(ids.shape[1]) < border).expand(ids.shape)
        hidden, kept = (first, ~first) if case == "packed" else (~first, first)

    def run(changed):
        other = ids.roll(1, 1).roll(1, 0)
        return model(**{**batch, "input_ids": torch.where(changed, other, ids)})[0]

    with torch.no_grad():
        base = run(torch.zeros_like(hidden))
        moved, usual = ((run(changed) - base).abs().amax(-1)[kept].max() for changed in (hidden, kept))
    leaves = []

    def replace(module, args, result):
        if not leaves and args[0].shape == ids.shape:
            leaves.append(result.detach().requires_grad_())
            return leaves[0]
        return None

    handle = model.get_input_embeddings().register_forward_hook(replace)
    output = run(torch.zeros_like(hidden))
    handle.remove()
    factors = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad((output * factors)[kept].sum(), leaves[0])
    sizes = gradient.abs().amax(-1)
    return float(moved / usual), float(sizes[hidden].max() / sizes[kept].max())


LEAKS = [(name, case) for name, cells in SAMPLE.items() for case, cell in cells.items() if cell == "**leaks**"]
HEALTHY = [("llama", "packed"), ("llama", "plain"), ("bert", "right padding"), ("bert", "left padding")]


@pytest.mark.parametrize(("name", "case"), LEAKS + HEALTHY)
def test_a_leak_is_a_dependence_without_the_audit_too(name, case):
    moved, gradient = move_outputs(name, case)
    if (name, case) in LEAKS:
        assert moved > 1e-3 and gradient > 1e-6, (moved, gradient)
    else:
        assert moved == gradient == 0, (moved, gradient)


def test_each_mask_has_one_source():
    named = [name for group in architectures.GROUPS for name in group.names]
    assert len(named) == len(set(named))
    assert set(named) <= set(names())
    assert {group.kind for group in architectures.GROUPS} <= set(table.KINDS)


def read_page():
    text = table.PATH.read_text(encoding="utf-8")
    body = text.split("path, or reason |\n")[1].split("\n\n")[0]
    return text, {line.split(" | ")[0][2:]: line for line in body.splitlines()[1:]}


def test_the_page_has_the_outcomes_of_the_sample():
    text, rows = read_page()
    version = re.search(r"^transformers (\S+),", text, re.MULTILINE)
    assert version is not None
    if version[1] != transformers.__version__:
        pytest.skip(f"docs/audited_models.md is of transformers {version[1]}, installed is {transformers.__version__}")
    assert set(rows) <= set(table.list_built())
    for name, cells in SAMPLE.items():
        columns = rows[name].split(" | ")
        assert all(columns[2 + table.COLUMNS.index(case)] == cell for case, cell in cells.items()), rows[name]
        assert columns.count("**leaks**") == list(cells.values()).count("**leaks**"), rows[name]


def test_the_page_counts_its_rows_and_has_a_source_for_each():
    text, rows = read_page()
    assert f"{len(rows)} of these were\naudited" in text
    cells = [dict(zip(table.COLUMNS, line.split(" | ")[2:], strict=False)) for line in rows.values()]
    assert table.count_outcomes(cells) in text
    listed = re.findall(
        r"[\w.-]+",
        " ".join(line.split(" | ")[2] for line in text.split("## The masks")[1].splitlines() if " | " in line),
    )
    assert set(rows) <= set(listed)


def test_a_finding_with_one_seed_alone_is_no_leak():
    case = {
        "findings": [],
        "once": [["influence", "documents-mix", None, "output"]],
        "tests": {"influence": [True, "outputs keep every bit"]},
    }
    assert table.describe_case(case) == ("exact", "seen with one seed of two: documents-mix")
