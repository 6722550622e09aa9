"""`audit` and `assert_attends`: does a model attend as expected, whatever computes it?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from clearhead.models.audits.influence import audit_influence
from clearhead.models.audits.layers import audit_layers
from clearhead.models.audits.probes import Positions, choose_probes
from clearhead.models.audits.sameness import audit_sameness
from clearhead.models.recording import Recording
from clearhead.models.watch import watch_own

PROBES = 2  # that change many inputs


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
    tokens, encoder_tokens = _find_tokens(audited, padding)
    recording, blocks, given = _run_recorded(audited, mask, padding, level)
    calls = [] if recording is None else recording.calls
    expectation = Expectation(mask, tokens, encoder_tokens, calls)
    tests = [given]
    if level != "outputs" and recording is not None:
        tests.append(audit_computed(expectation.calls))
    if encoder_tokens is None:
        positions = Positions(expectation.find_reach(), tokens)
    else:
        positions = Positions(expectation.find_encoder_reach(), tokens, encoder_tokens)
    probes, coverage = choose_probes(positions, PROBES, torch.Generator().manual_seed(seed))
    tests.append(audit_influence(audited, positions, probes, PROBES))
    if level != "outputs" and isinstance(model, nn.Module):
        tests.append(audit_layers(blocks, expectation, PROBES, seed))
    if level == "all" and isinstance(model, nn.Module):
        tests += [audit_gradient(audited, positions, probes), audit_sameness(audited, positions)]
    return AuditReport(expectation.text, level, tests, coverage.shares, audited.forwards)


def _run_recorded(
    audited: AuditedModel, mask: Expected, padding: Array | None, level: Level
) -> tuple[Recording | None, list[Block], TestResult]:
    """Run the model once. Gives its attention calls where they can be recorded, its blocks, and the result of the test
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


def _find_tokens(audited: AuditedModel, padding: Array | None) -> tuple[Tensor, Tensor | None]:
    """Which outputs are tokens, bool (B, L), and which inputs of an encoder, where the outputs are a decoder's.

    By the argument `padding`, or by the attention masks of the batch.
    """
    masks = audited.batch if isinstance(audited.batch, Mapping) else {}

    def read(mask: Any, shape: tuple[int, int]) -> Tensor:
        if mask is None or tuple(mask.shape) != shape:
            return torch.ones(shape, dtype=torch.bool)
        return torch.as_tensor(mask).cpu() != 0

    own = masks.get("attention_mask") if padding is None else padding
    if not audited.reads_encoder:
        return read(own, audited.output_shape), None
    return read(masks.get("decoder_attention_mask"), audited.output_shape), read(own, audited.shape)
