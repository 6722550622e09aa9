"""The findings of `diagnose`, and how they are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

from clearhead.explanation.diagnosis import shown
from clearhead.explanation.diagnosis.finding import SEVERITIES, Finding


class Diagnosis(Sequence[Finding]):
    """The result of `diagnose`: a sequence of `Finding`s, the gravest first.

    >>> import torch, clearhead as ch
    >>> x = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(0))
    >>> print(ch.diagnose(x, x, x, mask=torch.ones(8, 8)))
    1 error.
    error: a mask of 0 and 1 (input mask)
      mask is float32, (8, 8), and holds 64 ones and 0 zeros: a float mask is added
      to the scores, and hides nothing.
      → Pass mask.bool() where 1 means "may attend", mask == 0 where it means "may
        not"; one row a sequence, (B, Lk), as Padding(mask.bool()), or
        mask.bool()[:, None, None].
    >>> ch.diagnose(x, x, x).errors
    []

    `errors`, `warnings`, `notes`: the findings of one severity. `looked_for`: the faults that were looked for, in
    words. `print` keeps to 80 columns, and prints equal findings of several layers once. `markdown()`, and a notebook's
    display, show names of layers as text, whatever they hold. `to_dict()`: plain values.
    """

    def __init__(self, findings: Iterable[Finding], looked_for: Iterable[str]) -> None:
        self._findings = sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
        self.looked_for = list(looked_for)

    @overload
    def __getitem__(self, which: int) -> Finding: ...

    @overload
    def __getitem__(self, which: slice) -> list[Finding]: ...

    def __getitem__(self, which: Any) -> Any:
        return self._findings[which]

    def __len__(self) -> int:
        return len(self._findings)

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self if finding.severity == "error"]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self if finding.severity == "warning"]

    @property
    def notes(self) -> list[Finding]:
        return [finding for finding in self if finding.severity == "note"]

    def __repr__(self) -> str:
        return shown.text(self._findings, self.looked_for)

    def _repr_html_(self) -> str:
        return shown.html(self._findings, self.looked_for)

    def markdown(self) -> str:
        """The findings as Markdown, with a heading for each."""
        return shown.markdown(self._findings, self.looked_for)

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as plain values, which JSON can hold: "findings" and "looked_for"."""
        return {"findings": [finding.to_dict() for finding in self], "looked_for": list(self.looked_for)}
