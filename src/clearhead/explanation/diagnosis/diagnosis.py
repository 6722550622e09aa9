"""The findings of `diagnose`, and how they are shown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, overload

from clearhead.base.output.text import escaped, printable

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
    "layer", "run", "sequence", "head" (or "heads"), "query", "key", "input", "parameter" that apply.
    """

    name: str
    severity: Severity
    evidence: str
    remedy: str
    where: Mapping[str, object] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """`where` in words."""
        return ", ".join(
            str(value) if name == "layer" else f"{name} {_value(value)}" for name, value in self.where.items()
        )

    def to_dict(self) -> dict[str, object]:
        """The finding as plain values, which JSON can hold."""
        return asdict(self)


def _value(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    return ", ".join(map(str, value[:6])) + (", …" if len(value) > 6 else "")


WIDTH = 80
COLOURS = {"error": "#c62828", "warning": "#b26a00", "note": "#546e7a"}


class _Group(NamedTuple):
    """Findings of one name and severity. The first is shown whole, and the places of the others."""

    first: Finding
    places: list[str]

    @property
    def title(self) -> str:
        return f"{self.first.severity}: {self.first.name}"

    @property
    def also(self) -> str:
        """A sentence with the places of the other findings."""
        others = [place for place in self.places[1:] if place]
        more = f"; and {len(others) - 4} more" if len(others) > 4 else ""
        return f"Also in {'; '.join(others[:4])}{more}." if others else ""


def text(findings: Sequence[Finding], unexamined: Sequence[str]) -> str:
    lines = [_headline(findings)]
    for group in _groups(findings):
        place = printable(group.places[0])
        lines.append(_wrapped(group.title + (f" ({place})" if place else ""), "", "  "))
        lines.append(_wrapped(printable(group.first.evidence), "  "))
        lines += [_wrapped(printable(group.also), "  ")] if group.also else []
        lines.append(_wrapped(printable(group.first.remedy), "  → ", "    "))
    return "\n".join([*lines, *map(_wrapped, _name_unexamined(unexamined))])


def html(findings: Sequence[Finding], unexamined: Sequence[str]) -> str:
    parts = [f"<p>{escaped(_headline(findings))}</p>"]
    for group in _groups(findings):
        first, place = group.first, group.places[0]
        parts.append(
            f'<div style="border-left: 3px solid {COLOURS[first.severity]}; padding-left: 0.6em; margin: 0.6em 0">'
            f"<b>{escaped(group.title)}</b>{' ' + escaped(f'({place})') if place else ''}<br>"
            f"{escaped(first.evidence)} {escaped(group.also)}<br>→ {escaped(first.remedy)}</div>"
        )
    return "\n".join([*parts, *(f"<p>{escaped(line)}</p>" for line in _name_unexamined(unexamined))])


def markdown(findings: Sequence[Finding], unexamined: Sequence[str]) -> str:
    parts = [_literal(_headline(findings))]
    for group in _groups(findings):
        place = f" ({_literal(group.places[0])})" if group.places[0] else ""
        parts.append(f"### {_literal(group.title)}{place}")
        parts.append(f"{_literal(group.first.evidence)} {_literal(group.also)}".strip())
        parts.append(f"**Instead:** {_literal(group.first.remedy)}")
    return "\n\n".join([*parts, *map(_literal, _name_unexamined(unexamined))]) + "\n"


def _groups(findings: Sequence[Finding]) -> list[_Group]:
    found: dict[tuple[str, str], _Group] = {}
    for finding in findings:
        group = found.setdefault((finding.severity, finding.name), _Group(finding, []))
        group.places.append(finding.place)
    return list(found.values())


def _headline(findings: Sequence[Finding]) -> str:
    if not findings:
        return "Nothing found."
    counts = [(sum(f.severity == severity for f in findings), severity) for severity in SEVERITIES]
    return ", ".join(f"{n} {severity}{'s' if n > 1 else ''}" for n, severity in counts if n) + "."


def _name_unexamined(unexamined: Sequence[str]) -> list[str]:
    return [f"Not examined: {', '.join(unexamined)}. Use ch.audit."] if unexamined else []


def _wrapped(words: str, first: str = "", rest: str | None = None) -> str:
    return textwrap.fill(
        words, WIDTH, initial_indent=first, subsequent_indent=first if rest is None else rest, break_on_hyphens=False
    )


def _literal(words: str) -> str:
    """Text that Markdown, and the HTML in it, show as it is."""
    return re.sub(r"([\\`*_{}\[\]()#+\-.!|~<>&$:@])", r"\\\1", printable(words))


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
    Not examined: the mask you expect, the backend's output. Use ch.audit.
    >>> ch.diagnose(x, x, x).errors
    []

    `errors`, `warnings`, `notes`: the findings of one severity. `unexamined`: what no check looked at, in
    words. `print` keeps to 80 columns, and prints equal findings of several layers once. `markdown()`, and a notebook's
    display, show names of layers as text, whatever they hold. `to_dict()`: plain values.
    """

    def __init__(self, findings: Iterable[Finding], unexamined: Iterable[str]) -> None:
        self._findings = sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
        self.unexamined = list(unexamined)

    @overload
    def __getitem__(self, which: int) -> Finding: ...

    @overload
    def __getitem__(self, which: slice) -> list[Finding]: ...

    def __getitem__(self, which: int | slice) -> Finding | list[Finding]:
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
        return text(self._findings, self.unexamined)

    def _repr_html_(self) -> str:
        return html(self._findings, self.unexamined)

    def markdown(self) -> str:
        """The findings as Markdown, with a heading for each."""
        return markdown(self._findings, self.unexamined)

    def to_dict(self) -> dict[str, object]:
        """The diagnosis as plain values, which JSON can hold: "findings" and "unexamined"."""
        return {"findings": [finding.to_dict() for finding in self], "unexamined": list(self.unexamined)}
