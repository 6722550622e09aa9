"""A fault of a call, or what may be one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One thing that `diagnose` found.

    >>> import torch, clearhead as ch
    >>> x = torch.zeros(3, 4)
    >>> found = ch.diagnose(x, x, x, mask=torch.zeros(3, 3, dtype=torch.bool))[0]
    >>> found.name, found.severity, found.where
    ('queries that see nothing', 'error', {'query': 0})
    >>> found.evidence
    'All 3 queries of (1, 1, 3, 3) may see no key: their output is 0.'

    `name`: the kind of fault. `severity`: "error" (the result cannot be what was meant), "warning" (it is likely not
    what was meant, or it will fail elsewhere), "note" (worth knowing, and often right). `evidence`: a sentence with the
    numbers and shapes that were found. `remedy`: what to do instead. `where`: the place, with those of the keys
    "layer", "run", "sequence", "head" (or "heads"), "query", "key", "input" that apply.
    """

    name: str
    severity: Severity
    evidence: str
    remedy: str
    where: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """`where` in words."""
        return ", ".join(
            str(value) if name == "layer" else f"{name} {_value(value)}" for name, value in self.where.items()
        )

    def to_dict(self) -> dict[str, Any]:
        """The finding as plain values, which JSON can hold."""
        same = {"name": self.name, "severity": self.severity, "evidence": self.evidence, "remedy": self.remedy}
        return same | {"where": dict(self.where)}


def _value(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    return ", ".join(map(str, value[:6])) + (", …" if len(value) > 6 else "")
