"""Findings as text of 80 columns, as HTML and as Markdown. Names of layers and arguments are shown as text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from clearhead.explanation.diagnosis.finding import SEVERITIES, Finding

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


def text(findings: Sequence[Finding], looked_for: Sequence[str]) -> str:
    if not findings:
        return _wrapped(_nothing(looked_for))
    lines = [_counts(findings)]
    for group in _groups(findings):
        place = _printable(group.places[0])
        lines.append(_wrapped(group.title + (f" ({place})" if place else ""), "", "  "))
        lines.append(_wrapped(_printable(group.first.evidence), "  "))
        if group.also:
            lines.append(_wrapped(_printable(group.also), "  "))
        lines.append(_wrapped(_printable(group.first.remedy), "  → ", "    "))
    return "\n".join(lines)


def html(findings: Sequence[Finding], looked_for: Sequence[str]) -> str:
    if not findings:
        return f"<p>{escape(_nothing(looked_for))}</p>"
    parts = [f"<p>{escape(_counts(findings))}</p>"]
    for group in _groups(findings):
        first, place = group.first, group.places[0]
        parts.append(
            f'<div style="border-left: 3px solid {COLOURS[first.severity]}; padding-left: 0.6em; margin: 0.6em 0">'
            f"<b>{escape(group.title)}</b>{' ' + escape(f'({place})') if place else ''}<br>"
            f"{escape(first.evidence)} {escape(group.also)}<br>→ {escape(first.remedy)}</div>"
        )
    return "\n".join(parts)


def markdown(findings: Sequence[Finding], looked_for: Sequence[str]) -> str:
    if not findings:
        return _literal(_nothing(looked_for)) + "\n"
    parts = [_literal(_counts(findings))]
    for group in _groups(findings):
        place = f" ({_literal(group.places[0])})" if group.places[0] else ""
        parts.append(f"### {_literal(group.title)}{place}")
        parts.append(f"{_literal(group.first.evidence)} {_literal(group.also)}".strip())
        parts.append(f"**Instead:** {_literal(group.first.remedy)}")
    return "\n\n".join(parts) + "\n"


def _groups(findings: Sequence[Finding]) -> list[_Group]:
    found: dict[tuple[str, str], _Group] = {}
    for finding in findings:
        group = found.setdefault((finding.severity, finding.name), _Group(finding, []))
        group.places.append(finding.place)
    return list(found.values())


def _counts(findings: Sequence[Finding]) -> str:
    counts = [(sum(f.severity == severity for f in findings), severity) for severity in SEVERITIES]
    return ", ".join(f"{n} {severity}{'s' if n > 1 else ''}" for n, severity in counts if n) + "."


def _nothing(looked_for: Sequence[str]) -> str:
    return f"Nothing found. Looked for: {'; '.join(looked_for)}."


def _printable(words: str) -> str:
    """The words in one line, without characters that a terminal would take for a command."""
    return "".join(letter if letter.isprintable() else "�" for letter in words)


def _wrapped(words: str, first: str = "", rest: str | None = None) -> str:
    return textwrap.fill(
        words, WIDTH, initial_indent=first, subsequent_indent=first if rest is None else rest, break_on_hyphens=False
    )


def _literal(words: str) -> str:
    """Text that Markdown, and the HTML in it, show as it is."""
    return re.sub(r"([\\`*_{}\[\]()#+\-.!|~<>&$:@])", r"\\\1", _printable(words))
