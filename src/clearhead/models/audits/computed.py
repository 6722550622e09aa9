"""The computed test: is each call's output softmax(scores) · value of its own inputs, with the expected mask?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.base.output.text import said
from clearhead.biases.base import Added
from clearhead.inspection.deviation import Deviation, measure_deviation
from clearhead.masks.base import Mask, Spans
from clearhead.masks.causal import Causal
from clearhead.masks.padding import Padding
from clearhead.models.audits.audit_report import AuditFinding, AuditTest
from clearhead.models.audits.audited_model import DROPOUT
from clearhead.models.audits.given import infinite_bias
from clearhead.models.recordings.attention_call import AttentionCall, find_uncounted_rows
from clearhead.problem._recorded import RecordedMask
from clearhead.problem.problem import Problem
from clearhead.problem.visible import Visible, resolve
from clearhead.scores.base import Pairwise


class Mistake(NamedTuple):
    """A known wrong formula: its code in findings, what it is in words, and the problem that it computes."""

    code: str
    text: str
    problem: Problem


class ComputedTest:
    """Compares each call with the formula under its expected mask; names the wrong formula that it equals."""

    def __init__(self) -> None:
        self._examined, self._reason = 0, "no call gives an output for each head"
        self._findings: list[AuditFinding] = []

    def add(self, call: AttentionCall, expected: Mask) -> None:
        """Judge one call, if its output is known."""
        value, outcome = call.value, call.outcome
        if value is None or outcome is None:
            self._reason = "the values were not recorded: watch(model, values=True)"
        elif outcome.dropped:
            self._reason = DROPOUT
        elif outcome.output is not None:
            self._examined += 1
            uncounted = find_uncounted_rows(call)
            problem = _make_expected_problem(call, expected)
            found = measure_deviation(problem, value, outcome.output, uncounted)
            if not found.is_rounding:
                code = self._findings[0].code if self._findings else None
                finding = _explain(call, expected, problem, value, outcome.output, uncounted, found, code)
                self._findings.append(finding)

    def make_test(self) -> AuditTest:
        """Return the result for all calls."""
        if not self._examined:
            return AuditTest("computed", None, self._reason)
        if self._findings:
            text = f"{len(self._findings)} of {self._examined} calls compute another formula"
            return AuditTest("computed", False, text, tuple(self._findings))
        text = f"each of {self._examined} calls equals softmax(scores) · value with this mask"
        return AuditTest("computed", True, text)


def _make_expected_problem(call: AttentionCall, expected: Mask) -> Problem:
    """The problem of a call with the expected mask, and its padding, in place of its own mask."""
    problem = call.problem
    if call.padding is not None and call.padding.keys is not None:
        expected = expected & Padding(call.padding.keys)
    infinite = infinite_bias(problem)  # hides pairs as a mask does
    if infinite is not None and problem.bias is not None and problem.bias.dense is not None:
        finite = problem.bias.dense.masked_fill(infinite, 0.0)
        problem = problem._replace(bias=problem.bias._replace(dense=finite))
    return problem._replace(visible=_resolve(expected, problem))


def _resolve(mask: Mask, problem: Problem) -> Visible:
    return resolve(mask, problem.sizes._replace(align="lower_right"), as_written=False)


def _explain(
    call: AttentionCall,
    expected: Mask,
    problem: Problem,
    value: Tensor,
    output: Tensor,
    uncounted: Tensor | None,
    found: Deviation,
    only: str | None,
) -> AuditFinding:
    """The finding of a call that differs, with the first wrong formula that its output equals.

    `only`: the code of the mistakes that are tried, those of the first call that differs; None tries all.
    """
    sequence, head, query = found.row
    others = (torch.arange(problem.sizes.heads, device=value.device) != head).view(1, -1, 1)  # they may be right
    uncounted = others if uncounted is None else others | uncounted
    code, what = "formula-differs", "none of the known mistakes"
    for mistake in list_mistakes(call, expected, problem):
        if only not in (None, mistake.code):
            continue
        given = value
        if mistake.problem.key.shape[1] != value.shape[1]:  # tiled key heads have tiled values
            given = value.repeat(1, mistake.problem.key.shape[1] // value.shape[1], 1, 1)
        if measure_deviation(mistake.problem, given, output, uncounted).is_rounding:
            code, what = mistake.code, mistake.text
            break
    text = (
        f"backend {call.backend}, head {head}, query {query} of sequence {sequence}: the output differs by "
        f"{found.ratio:.2g} times its rounding. It equals {what}."
    )
    return AuditFinding(code, "computed", text, str(call.layer), call.name, (head,), (sequence, query))


def list_mistakes(call: AttentionCall, expected: Mask, problem: Problem) -> Iterator[Mistake]:
    """Known wrong formulas: one mistake each, then pairs of a wrong mask and another mistake.

    `problem`: the call with its expected mask.
    """
    masks = [
        Mistake(code, f"the formula with {text}", problem._replace(visible=visible))
        for code, text, visible in _list_masks(call, expected, problem)
    ]
    others = list(_list_other_mistakes(problem))
    yield from masks
    yield from others
    for one in masks:
        for other in others:
            yield Mistake(
                one.code, f"{one.text}, and {other.text}", other.problem._replace(visible=one.problem.visible)
            )


def _list_masks(call: AttentionCall, expected: Mask, problem: Problem) -> Iterator[tuple[str, str, Visible | None]]:
    """Wrong masks: a code, the mask in words, and the mask."""
    sizes, title = problem.sizes, said(expected, expected.title)
    yield "mask-ignored", "no mask", None
    lost = (
        "packed-mask-ignored" if "Documents" in title else "window-lost" if "SlidingWindow" in title else "only-causal"
    )
    yield lost, "a causal mask alone", _resolve(Causal(), problem)
    if sizes.queries != sizes.keys:
        upper_left = resolve(Causal(), sizes._replace(align="upper_left"), as_written=False)
        yield "causal-upper-left", "a causal mask aligned at the upper left", upper_left
    if call.problem.visible is not None:
        yield "given-mask-differs", "the mask that the call was given", call.problem.visible
    yield "mask-inverted", "the mask inverted", _resolve(~expected, problem)
    yield "causal-added", "the mask and a causal mask", _resolve(expected & Causal(), problem)
    assert problem.visible is not None
    spans = problem.visible.spans
    if not spans.plain:
        return
    start, stop = torch.broadcast_tensors(spans.start, spans.stop)  # type: ignore[no-untyped-call]
    own = torch.arange(start.shape[-1], device=start.device) + sizes.keys - sizes.queries  # positions of the queries
    for code, text, low, high in (
        ("window-too-wide", "a window one key wider", start - 1, stop),
        ("window-too-narrow", "a window one key narrower", torch.minimum(start + 1, own), stop),
        ("future-key", "one key more on the right", start, stop + 1),
        ("last-key-masked", "the last key masked", start, stop.clamp(max=sizes.keys - 1)),
        ("first-key-masked", "the first key masked", start.clamp(min=1), stop),
    ):
        shifted = Spans(low.clamp(0, sizes.keys), high.clamp(0, sizes.keys))
        yield code, text, _resolve(RecordedMask(shifted, sizes), problem)


def _list_other_mistakes(problem: Problem) -> Iterator[Mistake]:
    """Wrong scales, and parts of the formula that are left out."""
    scores = problem.scores
    if isinstance(scores, Pairwise):
        width = scores.query.shape[-1]
        for text, scale in (("1/√E", width**-0.5), ("1", 1.0), ("1/E", 1 / width), ("√E", width**0.5)):
            if abs(scale - scores.scale) > 1e-9:
                changed = problem._replace(scores=scores._replace(scale=scale))
                yield Mistake("wrong-scale", f"a scale of {text}", changed)
        if scores.softcap is not None:
            changed = problem._replace(scores=scores._replace(softcap=None))
            yield Mistake("softcap-lost", "the formula without softcap", changed)
        if 1 < scores.key.shape[1] < problem.sizes.heads:
            tiled = scores.key.repeat(1, problem.sizes.heads // scores.key.shape[1], 1, 1)
            changed = problem._replace(scores=scores._replace(key=tiled))
            yield Mistake("key-heads-tiled", "key heads repeated by repeat, not repeat_interleave", changed)
    if problem.sinks is not None:
        yield Mistake("sinks-lost", "the formula without sinks", problem._replace(sinks=None))
    if problem.bias is not None:
        yield Mistake("bias-lost", "the formula without its bias", problem._replace(bias=None))
    visible, sizes = problem.visible, problem.sizes
    if visible is not None and problem.bias is None:

        def allowed(*sides: slice) -> Tensor:
            batch, heads, queries, keys = sides
            return visible.spans.keep(batch, heads, queries, keys, sizes.keys).float()

        added = problem._replace(visible=None, bias=Added(function=allowed))
        yield Mistake("mask-added", "the bool mask added as 0 and 1", added)
        causal = added._replace(visible=_resolve(Causal(), problem))
        yield Mistake("mask-added", "the bool mask added as 0 and 1, and a causal mask", causal)
