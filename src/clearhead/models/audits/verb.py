"""`audit` and `assert_attends`: does a model attend as expected, whatever computes it?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead.base.arrays import Array
from clearhead.base.errors import ClearheadError
from clearhead.base.output.text import said
from clearhead.base.shapes import Sizes
from clearhead.masks.base import Mask
from clearhead.masks.padding import Padding
from clearhead.models.audits.audit import Expected, expected_of
from clearhead.models.audits.audit import audit as compare_masks
from clearhead.models.audits.audit_report import AuditReport, Finding, TestResult
from clearhead.models.audits.audited_model import AuditedModel
from clearhead.models.audits.influence import Influence, measure_influence
from clearhead.models.audits.probes import Positions, choose_probes
from clearhead.models.audits.reachability import AllowedPairs, Reachability
from clearhead.models.checks import run
from clearhead.models.recording import Recording
from clearhead.models.watch import watch_own

Level = Literal["outputs", "layers", "all"]
PROBES = 3  # that change many inputs
ROUNDING = 1e-5  # of the usual movement: below it, an output whose gradient is zero moved by rounding alone

LEAK_CODES = {
    "padding": "padding-reaches-outputs",
    "another sequence": "sequences-mix",
    "another document": "documents-mix",
    "a later position": "later-positions-reach-outputs",
    "an earlier position": "window-exceeded",
}


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
    recording, given = _test_given(audited, mask, padding)
    tokens = _find_tokens(audited, padding)
    reach = _find_reach(audited, mask, tokens, recording)
    tests = [given, *_test_influence(audited, reach, tokens)]
    return AuditReport(_describe_mask(mask), level, tests, {}, audited.forwards)


def _describe_mask(mask: Expected) -> str:
    return said(mask, mask.title) if isinstance(mask, Mask) else "every position" if mask is None else str(type(mask))


def _test_given(audited: AuditedModel, mask: Expected, padding: Array | None) -> tuple[Recording | None, TestResult]:
    """Whether each attention call was given the expected mask; and the recording, where the calls can be recorded."""
    if not isinstance(audited.model, nn.Module):
        return None, TestResult("given", None, "the model is a function, whose calls are not recorded")
    try:
        with watch_own(audited.model, padding) as seen:
            audited.run()
        found = compare_masks(seen.calls, mask)
    except ClearheadError as error:
        return None, TestResult("given", None, str(error).splitlines()[0])
    if found.ok():
        return seen, TestResult("given", True, f"each of {len(found)} attention calls was given this mask")
    worst = next(call for call in found.calls if not call.most <= 1e-6)
    finding = Finding("mask-differs", "given", str(found), str(worst.layer), worst.name)
    return seen, TestResult("given", False, "attention calls were given another mask", (finding,))


def _find_tokens(audited: AuditedModel, padding: Array | None) -> Tensor:
    """Which positions are tokens, bool (B, L): by the argument, or by the batch's attention mask."""
    shape = audited.shape
    mask = padding
    if mask is None and isinstance(audited.batch, dict):
        mask = audited.batch.get("attention_mask")
    if mask is None or tuple(mask.shape) != shape:
        return torch.ones(shape, dtype=torch.bool)
    return torch.as_tensor(mask).cpu() != 0


def _find_reach(audited: AuditedModel, mask: Expected, tokens: Tensor, recording: Recording | None) -> Reachability:
    """What may reach what, by the expected mask of each self-attention layer."""
    batch, length = audited.shape
    masks: list[Mask]
    if recording is not None:
        calls = [call for call in recording.calls if call.kind == "self" and call.shape[2:] == (length, length)]
        masks = [expected for _, expected in expected_of(calls, mask)]
        heads = max((call.shape[1] for call in calls), default=1)
    else:
        masks, heads = [mask] if isinstance(mask, Mask) else [], 1
    sizes = Sizes(batch, heads, length, length, align="lower_right")
    words = Padding(tokens)
    made = {}
    for one in masks:
        if id(one) not in made:
            made[id(one)] = AllowedPairs.from_mask(one if bool(tokens.all()) else one & words, sizes)
    return Reachability([made[id(one)] for one in masks], unlimited=recording is None)


def _test_influence(audited: AuditedModel, reach: Reachability, tokens: Tensor) -> Iterator[TestResult]:
    generator = torch.Generator().manual_seed(audited.seed)
    if audited.has_ids:
        positions = Positions(reach, tokens, ~(audited.find_special() & tokens))
        probes, coverage = choose_probes(positions, PROBES, generator)

        def change_ids(changed: Tensor | None) -> Tensor:
            return audited.run(None if changed is None else audited.replace_ids(changed))

        with torch.no_grad():
            found = measure_influence(change_ids, positions, probes)
        yield _judge("ids", found, positions)
    positions = Positions(reach, tokens, torch.ones_like(tokens))
    probes, coverage = choose_probes(positions, PROBES, generator)

    def change_vectors(changed: Tensor | None) -> Tensor:
        if changed is None:
            return audited.run()
        if not audited.has_ids:
            return audited.run(audited.replace_vectors(audited.inputs, changed))
        with audited.embeddings_replaced(changed):
            return audited.run()

    try:
        with torch.no_grad():
            found = measure_influence(change_vectors, positions, probes)
    except ClearheadError as error:
        yield TestResult("vectors", None, str(error))
        return
    yield _judge("vectors", found, positions)


def _judge(name: str, found: Influence, positions: Positions) -> TestResult:
    findings = []
    if found.leaks:
        leak = found.leaks[0]
        if leak.size > ROUNDING:
            relation = positions.relate(leak.output, leak.source) if leak.source else "several inputs together"
            text = f"output {leak.output} moves when {relation}, input {leak.source}, changes: {leak.size:.2g} of the usual"
            findings.append(Finding(LEAK_CODES.get(relation, "outputs-leak"), name, text, output=leak.output, source=leak.source))
    if found.unmoved:
        probe, still = found.unmoved[0]
        output = tuple(still.nonzero()[0].tolist())
        text = f"{int(still.sum())} outputs stay when inputs change that should reach them, the first is {output}"
        findings.append(Finding("inputs-ignored", name, text, output=output))
    return TestResult(name, not findings, "outputs keep every bit" if not findings else "outputs move", tuple(findings))
