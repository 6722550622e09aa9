"""`audit` and `assert_attends`: does a model attend as expected, whatever computes it?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.arrays import Array
from clearhead.base.errors import ClearheadError
from clearhead.models.audits.audit import Expected
from clearhead.models.audits.audit import audit as compare_masks
from clearhead.models.audits.audit_report import AuditReport, Finding, Level, TestResult
from clearhead.models.audits.audited_model import AuditedModel
from clearhead.models.audits.blocks import Block, record_blocks
from clearhead.models.audits.computed import audit_computed
from clearhead.models.audits.expectation import Expectation
from clearhead.models.audits.gradient import audit_gradient
from clearhead.models.audits.influence import LEAK_CODES, ROUNDING, Influence, compare_outputs, measure_influence
from clearhead.models.audits.layers import audit_layers
from clearhead.models.audits.probes import Positions, Probe, choose_probes
from clearhead.models.audits.sameness import audit_sameness
from clearhead.models.recording import Recording
from clearhead.models.watch import watch_own

PROBES = 3  # that change many inputs


def audit(
    model: Any,
    batch: Any,
    mask: Expected,
    *,
    padding: Array | None = None,
    level: Level = "layers",
    inputs: str | None = None,
    output: Callable[[Any], Tensor] | None = None,
    seed: int = 0,
) -> AuditReport:
    """Test whether a model attends as expected."""
    audited = AuditedModel(model, batch, inputs, output, seed)
    tokens = _find_tokens(audited, padding)
    recording, blocks, given = _run_recorded(audited, mask, padding, level)
    expectation = Expectation(mask, tokens, [] if recording is None else recording.calls)
    tests = [given]
    if level != "outputs" and recording is not None:
        tests.append(audit_computed(expectation.calls))
    positions = Positions(expectation.find_reach(), tokens, torch.ones_like(tokens))
    generator = torch.Generator().manual_seed(seed)
    probes, coverage = choose_probes(positions, PROBES, generator)
    tests += _audit_influence(audited, positions, probes)
    if level != "outputs" and isinstance(model, nn.Module):
        tests.append(audit_layers(blocks, expectation, PROBES, seed))
    if level == "all" and isinstance(model, nn.Module):
        tests += [audit_gradient(audited, positions, probes), audit_sameness(audited, positions)]
    return AuditReport(expectation.text, level, tests, coverage.shares, audited.forwards)


def _run_recorded(
    audited: AuditedModel, mask: Expected, padding: Array | None, level: Level
) -> tuple[Recording | None, list[Block], TestResult]:
    """Run the model once: its attention calls where they can be recorded, its blocks, and the result of the test
    whether each call was given the expected mask."""
    if not isinstance(audited.model, nn.Module):
        return None, [], TestResult("given", None, "the model is a function, whose calls are not recorded")
    in_layers = level != "outputs"
    blocks: list[Block] = []
    try:
        with torch.no_grad(), watch_own(audited.model, padding, values=in_layers, compares=False) as seen:
            with record_blocks(audited.model, audited.seed) if in_layers else nullcontext([]) as blocks:
                audited.run()
        found = compare_masks(seen.calls, mask)
    except ClearheadError as error:
        return None, blocks, TestResult("given", None, str(error).splitlines()[0])
    if found.ok():
        return seen, blocks, TestResult("given", True, f"each of {len(found)} attention calls was given this mask")
    worst = next(call for call in found.calls if not call.most <= 1e-6)
    finding = Finding("mask-differs", "given", str(found), str(worst.layer), worst.name)
    return seen, blocks, TestResult("given", False, "attention calls were given another mask", (finding,))


def _find_tokens(audited: AuditedModel, padding: Array | None) -> Tensor:
    """Which positions are tokens, bool (B, L): by the argument, or by the batch's attention mask."""
    mask = padding
    if mask is None and isinstance(audited.batch, Mapping):
        mask = audited.batch.get("attention_mask")
    if mask is None or tuple(mask.shape) != audited.shape:
        return torch.ones(audited.shape, dtype=torch.bool)
    return torch.as_tensor(mask).cpu() != 0


@torch.no_grad()
def _audit_influence(audited: AuditedModel, positions: Positions, probes: list[Probe]) -> Iterator[TestResult]:
    """Change ids, where the input has some, and vectors: the embeddings of ids, or the input itself."""
    base = audited.run()
    distance, moved = compare_outputs(base, audited.run(seed=audited.seed + 1))
    if bool(moved.any()):
        yield _judge_repeated(audited, float(distance.max()))

    def change_ids(changed: Tensor | None) -> Tensor:
        return base if changed is None else audited.run(audited.replace_ids(changed))

    def change_vectors(changed: Tensor | None) -> Tensor:
        if changed is None:
            return base
        if not audited.has_ids:
            return audited.run(audited.replace_vectors(audited.inputs, changed))
        with audited.embeddings_replaced(lambda vectors: audited.replace_vectors(vectors, changed)):
            return audited.run()

    if audited.has_ids:
        special = audited.find_special() & positions.tokens
        by_ids = probes
        if bool(special.any()):
            positions = Positions(positions.reach, positions.tokens, ~special)
            by_ids = choose_probes(positions, PROBES, torch.Generator().manual_seed(audited.seed))[0]
        yield _judge("ids", measure_influence(change_ids, positions, by_ids), positions)
    try:
        yield _judge("vectors", measure_influence(change_vectors, positions, probes), positions)
    except ClearheadError as error:
        yield TestResult("vectors", None, str(error).splitlines()[0])


def _judge_repeated(audited: AuditedModel, distance: float) -> TestResult:
    """Two runs of the same batch differ: a finding in eval mode."""
    if isinstance(audited.model, nn.Module) and audited.model.training:
        return TestResult("repeat", None, "the model is in train mode with dropout: each run has the same seed")
    text = f"two runs of the same batch differ by {distance:.2g} of the outputs' size, with other seeds"
    return TestResult("repeat", False, text, (Finding("outputs-random", "repeat", text),))


def _judge(name: str, found: Influence, positions: Positions) -> TestResult:
    findings = []
    leak = found.leaks[0] if found.leaks else None
    if leak is not None and leak.size > ROUNDING:
        known = leak.output is not None and leak.source is not None
        relation = positions.relate(leak.output, leak.source) if known else "several inputs together"
        text = f"output {leak.output} moves when input {leak.source}, {relation}, changes: {leak.size:.2g} of the usual"
        code = LEAK_CODES.get(relation, "outputs-leak")
        findings.append(Finding(code, name, text, output=leak.output, source=leak.source))
    if found.unmoved:
        _, still = found.unmoved[0]
        output = tuple(still.nonzero()[0].tolist())
        text = f"{int(still.sum())} outputs stay when inputs change that should reach them, the first is {output}"
        findings.append(Finding("inputs-ignored", name, text, output=(output[0], output[1])))
    text = "outputs move that must not" if findings else "outputs that must not move keep every bit"
    return TestResult(name, not findings, text, tuple(findings))
