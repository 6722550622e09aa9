"""The layer test: does each block of a model, run alone, depend on what it may and on nothing else?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clearhead.models.audits.audit_report import AuditFinding, AuditTest, describe_error
from clearhead.models.audits.audited_model import replace_vectors
from clearhead.models.audits.blocks import Block, locate_change
from clearhead.models.audits.expectation import Expectation
from clearhead.models.audits.gradient import compute_gradient
from clearhead.models.audits.influence import describe_unmoved
from clearhead.models.audits.movement import LEAK_CODES, Influence, measure_influence
from clearhead.models.audits.probes import Positions, Probe, choose_probes
from clearhead.models.audits.reachability import Reachability


@torch.no_grad()
def audit_layers(
    blocks: list[Block], expectation: Expectation, probes: int, seed: int, count: Callable[[float], None]
) -> AuditTest:
    """Change the recorded hidden states of each block, and compare the block's outputs to the bit.

    `count`: called with each run's share of a forward pass of the model.
    """
    examined, findings, skipped, still = 0, [], [], ""
    chosen: dict[Any, tuple[Reachability, Positions, list[Probe]]] = {}
    for block in blocks:
        expected = expectation.find_reach_of_block(block.name, block.hidden.shape[:2]) if block.can_run else None
        if expected is None:
            skipped.append(block.name)
            continue
        reach, tokens = expected
        key = reach.key
        if key not in chosen:
            positions = Positions(reach, tokens)
            generator = torch.Generator().manual_seed(seed)
            chosen[key] = reach, positions, choose_probes(positions, probes, generator)[0]
        _, positions, some = chosen[key]

        def run(changed: Tensor | None, block: Block = block) -> Tensor:
            hidden = block.hidden
            count(1 / len(blocks))
            return block.run(hidden if changed is None else replace_vectors(hidden, changed, seed))

        def differentiate(outputs: Tensor, block: Block = block) -> Tensor | None:
            return compute_gradient(block.run_from_leaf, outputs, seed)

        try:
            found = measure_influence(run, differentiate, some)
        except Exception as error:  # a block may need what only the whole model has
            skipped.append(f"{block.name} ({describe_error(error)})")
            continue
        examined += 1
        finding = _judge(block, found, positions, seed)
        findings += [finding] if finding else []
        still = still or _describe_unmoved(block, found)
    if findings:
        text = f"{len(findings)} of {examined} blocks depend on what they must not"
        return AuditTest("layer", False, text, tuple(findings))
    if not examined:
        return AuditTest("layer", None, "no block of the model could be run alone")
    left = f"; not examined: {', '.join(skipped[:3])}" if skipped else ""
    return AuditTest("layer", True, f"each of {examined} blocks, run alone, depends on what it may{left}{still}")


def _judge(block: Block, found: Influence, positions: Positions, seed: int) -> AuditFinding | None:
    """The finding of one block, with the part of it where the change is first seen."""
    if found.leaks:
        leak = found.leaks[0]
        place, heads = locate_change(block, replace_vectors(block.hidden, leak.probe.changed, seed), leak.moved)
        relation = positions.relate(leak.output, leak.source) if leak.output and leak.source else "several inputs"
        source = f"input {leak.source}, {relation}" if leak.source else "several inputs together"
        text = f"output {leak.output} depends on {source}, {place}"
        code = LEAK_CODES.get(relation, "outputs-leak")
        return AuditFinding(code, "layer", text, module=block.name, heads=heads, output=leak.output, source=leak.source)
    return None


def _describe_unmoved(block: Block, found: Influence) -> str:
    """A warning for a block with attention whose outputs stay; a convolution or a state need not reach so far."""
    has_attention = any("att" in f"{name} {type(part).__name__}".lower() for name, part in block.module.named_modules())
    if not found.unmoved or not has_attention:
        return ""
    return f"; warning: {block.name}: {describe_unmoved(found.unmoved[0][1])}"
