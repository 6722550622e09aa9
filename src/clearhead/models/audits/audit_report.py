"""The report of an audit: one line for each test, and its findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from clearhead.base.output.text import said

Position = tuple[int, int]  # (sequence, position)
Level = Literal["outputs", "layers", "all"]


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


@dataclass(frozen=True)
class AuditTest:
    """The result of one test. `holds`: None where the test could not examine the model, for the reason in `text`."""

    name: str
    holds: bool | None
    text: str
    findings: tuple[AuditFinding, ...] = ()


@dataclass(frozen=True, eq=False)
class AuditReport:
    """Whether a model attends as expected, by independent tests. `clearhead.audit` returns it.

    `ok`: whether no test has a finding. `findings`: those of all tests, in order. `tests`: a `AuditTest` for each
    test. `coverage`: by relation, such as "padding", the share of the forbidden pairs of an input and an output that
    the influence test examined. `forwards`: how often the model was run. `conclusion`: the part to examine.
    """

    expected: str
    level: Level
    tests: Sequence[AuditTest]
    coverage: dict[str, float] = field(default_factory=dict)
    forwards: int = 0

    @property
    def findings(self) -> list[AuditFinding]:
        return [finding for test in self.tests for finding in test.findings]

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def conclusion(self) -> str:
        """One sentence: which part of the program to examine."""
        failed = {test.name for test in self.tests if test.holds is False}
        if not failed:
            untested = [test.name for test in self.tests if test.holds is None]
            return f"Not examined: {', '.join(untested)}." if untested else "Every test holds."
        if "given" in failed:
            return "Examine the caller: the attention calls were given another mask than expected."
        if "computed" in failed:
            return "Examine the backend: it was given the expected mask and computed something else."
        if failed & {"influence", "layer", "gradient"}:
            return (
                "Examine what is outside of attention: a state, a convolution, a norm, or the code that makes batches."
            )
        return "Examine positions and the cache: the same tokens give other outputs."

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return {
            "ok": self.ok,
            "expected": self.expected,
            "level": self.level,
            "tests": [asdict(test) for test in self.tests],
            "coverage": self.coverage,
            "forwards": self.forwards,
            "conclusion": self.conclusion,
        }

    def __str__(self) -> str:
        return said(self, self._describe)

    def __repr__(self) -> str:
        return f"<AuditReport: {'ok' if self.ok else f'{len(self.findings)} findings'}>"

    def _describe(self) -> str:
        head = "attends as expected" if self.ok else "does not attend as expected"
        marks = {True: "ok", False: "FAIL", None: "-"}
        lines = [f"{head}: {self.expected}"]
        for test in self.tests:
            lines.append(f"  {marks[test.holds]:4}  {test.name:9}  {test.text}")
            lines += [f"        {finding.code}: {finding.text}" for finding in test.findings]
        tested = ", ".join(f"{name} {share:.0%}" for name, share in self.coverage.items())
        lines += [f"  forbidden pairs that were tested: {tested}"] if tested else []
        return "\n".join([*lines, f"  {self.conclusion} ({self.forwards} forward passes)"])
