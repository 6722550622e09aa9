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
from clearhead.models.audits.influence import LEAK_CODES, ROUNDING, Influence, measure_influence
from clearhead.models.audits.layers import audit_layers
from clearhead.models.audits.probes import Positions, choose_probes
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
    tests += _audit_influence(audited, expectation)
    if level != "outputs" and isinstance(model, nn.Module):
        tests.append(audit_layers(blocks, expectation, PROBES, seed))
    return AuditReport(expectation.text, level, tests, {}, audited.forwards)


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
def _audit_influence(audited: AuditedModel, expectation: Expectation) -> Iterator[TestResult]:
    """Change ids, where the input has some, and vectors: the embeddings of ids, or the input itself."""
    reach, tokens = expectation.find_reach(), expectation.tokens
    base = audited.run()

    def change_ids(changed: Tensor | None) -> Tensor:
        return base if changed is None else audited.run(audited.replace_ids(changed))

    def change_vectors(changed: Tensor | None) -> Tensor:
        if changed is None:
            return base
        if not audited.has_ids:
            return audited.run(audited.replace_vectors(audited.inputs, changed))
        with audited.embeddings_replaced(changed):
            return audited.run()

    special = audited.find_special() & tokens
    kinds = [("ids", change_ids, ~special)] if audited.has_ids else []
    for name, change, changeable in (*kinds, ("vectors", change_vectors, torch.ones_like(tokens))):
        positions = Positions(reach, tokens, changeable)
        generator = torch.Generator().manual_seed(audited.seed)
        try:
            found = measure_influence(change, positions, choose_probes(positions, PROBES, generator)[0])
        except ClearheadError as error:
            yield TestResult(name, None, str(error).splitlines()[0])
            continue
        yield _judge(name, found, positions)


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
