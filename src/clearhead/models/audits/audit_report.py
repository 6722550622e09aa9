"""The report of an audit: one line for each test, and its findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from clearhead.base.output.text import said

Position = tuple[int, int]  # (sequence, position)
Level = Literal["outputs", "layers", "all"]
MOST_SHOWN = 3  # other places of a finding that a report prints


@dataclass(frozen=True)
class AuditFinding:
    """One way in which a model does not attend as expected.

    `code`: a stable name of the kind of finding, such as "padding-reaches-outputs". `test`: the test that found it.
    `text`: what was seen. `layer`, `module`, `heads`: where, as far as it is known. `output`, `source`: an output that
    depends on an input that must not influence it, each (sequence, position).
    """

    code: str
    test: str
    text: str
    layer: str | None = None
    module: str | None = None
    heads: tuple[int, ...] | None = None
    output: Position | None = None
    source: Position | None = None

    @property
    def label(self) -> str:
        """The place and the code, such as "layers.3: documents-mix", by which `audit(expect=[...])` knows it again."""
        return f"{self.module or 'outputs'}: {self.code}"


@dataclass(frozen=True)
class AuditTest:
    """The result of one test. `holds`: None where the test could not examine the model, for the reason in `text`."""

    name: str
    holds: bool | None
    text: str
    findings: tuple[AuditFinding, ...] = ()


def describe_error(error: Exception) -> str:
    """The first line of why a model could not be examined, with the kind of the error."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]


@dataclass(frozen=True, eq=False)
class AuditReport:
    """Whether a model attends as expected, by independent tests. `clearhead.audit` returns it.

    `ok`: whether no test has a finding. `findings`: those of all tests, in order, without those that were to be
    expected. `tests`: an `AuditTest` for each test. `coverage`: by relation, such as "padding", the share of the
    forbidden pairs of an input and an output that the influence test examined. `forwards`: how often the model was run.
    `known`: the labels of findings to be expected. `conclusion`: the part to examine.
    """

    expected: str
    level: Level
    tests: Sequence[AuditTest]
    coverage: dict[str, float] = field(default_factory=dict)
    forwards: int = 0
    known: Sequence[str] = ()

    @property
    def findings(self) -> list[AuditFinding]:
        return [finding for test in self.tests for finding in test.findings if finding.label not in self.known]

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def conclusion(self) -> str:
        """One sentence: which part of the program to examine."""
        failed = {finding.test for finding in self.findings}
        if not failed:
            untested = [test.name for test in self.tests if test.holds is None]
            if untested:
                return f"Not examined: {', '.join(untested)}."
            return "Every test holds, but for known findings." if self.known else "Every test holds."
        if "given" in failed:
            return "Examine the caller: the attention calls were given another mask than expected."
        if "computed" in failed:
            return "Examine the backend: it was given the expected mask and computed something else."
        if failed & {"influence", "layer", "gradient"}:
            if any(test.holds is None for test in self.tests if test.name in ("given", "computed")):
                return "Examine attention and all that mixes positions: its calls were not recorded."
            return (
                "Examine what is outside of attention: a state, a convolution, a norm, or the code that makes batches."
            )
        return "Examine positions, the cache, and what depends on the batch: the same tokens give other outputs."

    def to_dict(self) -> dict[str, object]:
        """The report as plain values, for JSON."""
        return {
            "ok": self.ok,
            "expected": self.expected,
            "level": self.level,
            "tests": [asdict(test) for test in self.tests],
            "coverage": self.coverage,
            "forwards": self.forwards,
            "known": list(self.known),
            "conclusion": self.conclusion,
        }

    def __str__(self) -> str:
        return said(self, self._describe)

    def __repr__(self) -> str:
        return f"<AuditReport: {'ok' if self.ok else f'{len(self.findings)} findings'}>"

    def _describe(self) -> str:
        head = "attends as expected" if self.ok else "does not attend as expected"
        lines = [f"{head}: {self.expected}"]
        for test in self.tests:
            new = [finding for finding in test.findings if finding.label not in self.known]
            mark = "-" if test.holds is None else "ok" if test.holds else "FAIL" if new else "known"
            lines += [f"  {mark:5}  {test.name:9}  {test.text}", *_describe_findings(new)]
        gone = set(self.known) - {finding.label for test in self.tests for finding in test.findings}
        lines += [f"  no longer found: {', '.join(sorted(gone))}"] if gone else []
        tested = ", ".join(f"{name} {share:.0%}" for name, share in self.coverage.items())
        lines += [f"  forbidden pairs that were tested: {tested}"] if tested else []
        return "\n".join([*lines, f"  {self.conclusion} ({self.forwards} forward passes)"])


def _describe_findings(findings: Sequence[AuditFinding]) -> Iterator[str]:
    """The lines of a test's findings: the first of each code in full, and the places of the others."""
    for code in dict.fromkeys(finding.code for finding in findings):
        first, *others = [finding for finding in findings if finding.code == code]
        for line in f"{first.label}: {first.text}".splitlines():
            yield f"         {line}"
        places = ", ".join(str(finding.module) for finding in others[:MOST_SHOWN])
        if others:
            yield f"         the same in {places}{f' and {len(others) - MOST_SHOWN} more' * (len(others) > MOST_SHOWN)}"
