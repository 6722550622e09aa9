"""The influence test: do outputs move when inputs change that must not reach them?"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.models.audits.audit_report import AuditFinding, AuditTest
from clearhead.models.audits.audited_model import AuditedModel
from clearhead.models.audits.movement import LEAK_CODES, Differentiate, Influence, measure_influence
from clearhead.models.audits.probes import Positions, Probe, choose_probes


@torch.no_grad()
def audit_influence(
    audited: AuditedModel, differentiate: Differentiate, positions: Positions, probes: list[Probe], number: int
) -> AuditTest:
    """Change ids, where the input has some, then vectors: the embeddings of ids, or the input itself.

    Ids go through all that a model does with them, in compiled models and other callables too. Vectors change by more,
    and at special ids too. `number`: of probes for ids, where special ids may not change.
    """
    base = audited.outputs
    findings, notes, still, rounding = [], [], [], 0.0
    broken = positions.tokens & base.isnan().any(-1).cpu()
    if bool(broken.any()):
        sequence, position = broken.nonzero()[0].tolist()
        text = f"output ({sequence}, {position}) has NaN, so what moves it is not known"
        findings.append(AuditFinding("outputs-nan", "influence", text, output=(sequence, position)))
    if audited.randomness:
        if audited.has_dropout:
            notes.append("train mode with dropout, each run with the same seed")
        else:
            text = f"two runs of the same batch differ by {audited.randomness:.2g} of the size of the outputs"
            findings.append(AuditFinding("outputs-random", "influence", text))
    if audited.has_ids:
        special = audited.find_special() & positions.input_tokens
        of_ids, by_ids = positions, probes
        if bool(special.any()):
            of_ids = Positions(positions.reach, positions.tokens, positions.input_tokens, ~special)
            by_ids, _ = choose_probes(of_ids, number, torch.Generator().manual_seed(audited.seed))
        found = measure_influence(partial(_run_with_other_ids, audited, base), differentiate, by_ids)
        findings += _judge_leaks(audited, found, of_ids, "id")
        still, rounding = found.unmoved, found.rounding
    try:
        found = measure_influence(partial(_run_with_other_vectors, audited, base), differentiate, probes)
        findings += _judge_leaks(audited, found, positions, "embedding" if audited.has_ids else "vector")
        still, rounding = found.unmoved, max(rounding, found.rounding)
    except ClearheadError as error:
        notes.append(f"embeddings not changed: {str(error).removeprefix('audit: ').splitlines()[0]}")
    if still:
        probe, outputs = still[0]
        if found.mixes and _has_no_gradient(differentiate, probe, outputs):
            place = outputs.nonzero()[0].tolist()
            text = describe_unmoved(outputs)
            findings.append(AuditFinding("inputs-ignored", "influence", text, output=(place[0], place[1])))
        else:
            notes.append(f"warning: {describe_unmoved(outputs)}")
    first = {finding.code: finding for finding in reversed(findings)}  # one finding of each code
    told = f" ({'; '.join(notes)})" if notes else ""
    if findings:
        text = f"outputs do not depend on {audited.name or 'inputs'} as expected{told}"
        return AuditTest("influence", False, text, tuple(reversed(first.values())))
    kept = f"move by rounding alone, {rounding:.1g} of the usual movement," if rounding else "keep every bit"
    return AuditTest("influence", True, f"outputs {kept} when {audited.name or 'inputs'} change{told}")


def _run_with_other_ids(audited: AuditedModel, base: Tensor, changed: Tensor | None) -> Tensor:
    return base if changed is None else audited.run(audited.replace_ids(changed))


def _run_with_other_vectors(audited: AuditedModel, base: Tensor, changed: Tensor | None) -> Tensor:
    if changed is None:
        return base
    if not audited.has_ids:
        return audited.run(audited.replace_vectors(audited.inputs, changed))
    with audited.embeddings_replaced(lambda vectors: audited.replace_vectors(vectors, changed)):
        return audited.run()


def _judge_leaks(audited: AuditedModel, found: Influence, positions: Positions, what: str) -> list[AuditFinding]:
    """The finding of a measurement: the largest leak."""
    if not found.leaks:
        return []
    leak, name = found.leaks[0], f" of {audited.name}" if audited.name else ""
    if leak.output is not None and leak.source is not None:
        relation = positions.relate(leak.output, leak.source)
        text = f"output {leak.output} moves when the {what} at {leak.source}{name}, {relation}, changes"
        code = LEAK_CODES[relation]
    else:
        text, code = f"outputs move when several inputs{name} change together", "outputs-leak"
    text += f", by {leak.size:.2g} of the usual movement"
    return [AuditFinding(code, "influence", text, output=leak.output, source=leak.source)]


def _has_no_gradient(differentiate: Differentiate, probe: Probe, outputs: Tensor) -> bool:
    """Whether outputs that stayed don't depend on the changed inputs; else their weights are below rounding."""
    try:
        gradient = differentiate(outputs)
    except Exception:  # not every model has a backward pass
        return False
    return gradient is not None and not bool((gradient[probe.changed] != 0).any())


def describe_unmoved(still: Tensor) -> str:
    """Outputs, bool (B, L), that stayed though an input changed that may influence them.

    It is a warning alone where the gradient is not zero; where no output moves with another position, as outputs of
    attention that are initialised to zero; and in a block run alone, whose keys another layer may share.
    """
    place = tuple(still.nonzero()[0].tolist())
    return f"{int(still.sum())} outputs stay when inputs change that may reach them, the first is {place}"
