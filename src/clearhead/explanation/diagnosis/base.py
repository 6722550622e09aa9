"""What a check is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from clearhead.explanation.diagnosis.case import Case
from clearhead.explanation.diagnosis.finding import Finding, Severity


class Check(ABC):
    """One thing to look for in a call. A subclass says in its docstring by which number it judges, and why that one.

    `name`: of its findings. `looks_for`: the same in words, for who is told that nothing was found.
    """

    name: ClassVar[str]
    looks_for: ClassVar[str]

    @abstractmethod
    def find(self, case: Case) -> Iterator[Finding]:
        """What there is of it in this call."""

    def finding(self, case: Case, severity: Severity, evidence: str, remedy: str, **where: Any) -> Finding:
        return Finding(self.name, severity, evidence, remedy, {**case.where, **where})
