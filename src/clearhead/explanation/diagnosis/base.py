"""The base class of checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from clearhead.explanation.diagnosis.case import Case
from clearhead.explanation.diagnosis.finding import Finding, Severity


class Check(ABC):
    """A search for one kind of fault in a call. The docstring of a subclass says by which number it judges, and why.

    `name`: the name of its findings. `looks_for`: the fault in words, which are printed where nothing was found.
    """

    name: ClassVar[str]
    looks_for: ClassVar[str]

    @abstractmethod
    def find(self, case: Case) -> Iterator[Finding]:
        """The findings in this call."""

    def finding(self, case: Case, severity: Severity, evidence: str, remedy: str, **where: Any) -> Finding:
        return Finding(self.name, severity, evidence, remedy, {**case.where, **where})
