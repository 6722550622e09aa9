"""The letters of the course: whether each formula keeps the table of docs/course/notation.md.

    python docs/letters.py

prints each letter that a chapter uses and the table does not give to this chapter, with the formula that it stands in;
each letter that has two rows; and each row that names a chapter without its letter. Letters of shapes in brackets, as
`(B, L, E)`, and of the titles and axes of pictures are read too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

COURSE = Path(__file__).parent / "course"
GREEK = re.findall("[a-z]+", "alpha beta gamma delta epsilon kappa lambda mu omega phi varphi sigma tau theta ell rho")
NAMES = "qkvo"  # an index that is a part of a name: L_q is another letter than L_k, and w_i is the same as w_j
WORD = re.compile(r"\\(?:mathrm|mathtt|text|operatorname|begin|end)\{[^}]*\}")
TOKEN = re.compile(r"\\(?P<command>[A-Za-z]+)|(?P<letter>[A-Za-z])|(?P<mark>[_^'{}])")
GROUP = re.compile(r"\s*(?:\{((?:[^{}]|\{[^{}]*\})*)\}|(\\[A-Za-z]+|[A-Za-z0-9]))")
CELL = re.compile(r"^```\{code-cell\} ipython3\n(?:---\n.*?\n---\n)?(.*?)^```", re.S | re.M)
FENCE = re.compile(r"^```(?!\{math\}).*?^```", re.S | re.M)
SHAPE = re.compile(r"\(((?:(?:…|\w[\w ·/−-]*), )+\w[\w ·/−-]*|(?:[A-Z][a-z]?),)\)")
SHOWN = ("title", "label", "xlabel", "ylabel")


class Letter(NamedTuple):
    """A letter as a formula writes it. `indices`: what counts it, `ij` of w_{ij}; a number there is left out."""

    name: str
    primes: str = ""
    indices: str = ""

    def __str__(self) -> str:
        return self.name + self.primes + (f" with the index {self.indices}" if self.indices else "")


class Row(NamedTuple):
    """A row of the table: the ways in which its letter is written, and the chapters that may use it."""

    written: tuple[Letter, ...]
    chapters: frozenset[int]


def letters(latex: str) -> Iterator[Letter]:
    """Every letter of a formula, those in indices too. Functions and words have none."""
    latex, accent = WORD.sub(r"\\word", latex), ""
    place = 0
    while found := TOKEN.search(latex, place):
        place = found.end()
        command = found["command"]
        if command in ("hat", "bar", "tilde"):
            accent = command + " "
            continue
        if found["mark"] or (command and command not in GREEK):
            continue
        name, accent = accent + (command or found["letter"]), ""
        primes, indices = "", ""
        while place < len(latex) and latex[place] in "'_^":
            sign, place = latex[place], place + 1
            if sign == "'":
                primes += sign
                continue
            group = GROUP.match(latex, place)
            assert group is not None, latex
            place, inner = group.end(), group[1] or group[2]
            if sign == "_" and inner in NAMES:
                name += f"_{inner}"
                continue
            within = [*letters(inner)]
            yield from within
            if sign == "_":
                indices += "".join(each.name for each in within)
        yield Letter(name, primes, indices)


def formulas(page: str) -> list[str]:
    """What stands between dollars, or in a block of mathematics."""
    blocks = re.findall(r"^```\{math\}\n(.*?)^```", page, re.S | re.M)
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page))
    return blocks + [one or two for one, two in re.findall(r"\$\$(.*?)\$\$|\$([^$]+)\$", text, re.S)]


def shapes(page: str) -> Iterator[str]:
    """The letters of each shape that stands in brackets, `Lq` as L_q."""
    for found in SHAPE.finditer(page):
        tokens = re.findall(r"\b[A-Z][qkv]?\b", found[1])
        if tokens and not re.search(r"\b[A-Z]\w*[a-z]{2}|_", found[1]):
            yield from ("_".join(token) for token in tokens)


def pictures(page: str) -> Iterator[str]:
    """The letters that stand alone in a title or at an axis of a picture."""
    for cell in CELL.findall(page):
        code = "\n".join(line for line in cell.splitlines() if not line.startswith((":tags:", "%")))
        for node in ast.walk(ast.parse(code)):
            shown = [key.value for key in node.keywords if key.arg in SHOWN] if isinstance(node, ast.Call) else []
            for text in map(said, shown):
                yield from re.findall(r"(?<![\w'’])([B-HJ-Zb-zα-ωℓ])(?![\w'’])", text)


def said(node: ast.expr) -> str:
    """A text of the code, with 0 for each number that is put in; nothing where it is no text."""
    if isinstance(node, ast.JoinedStr):
        return "".join(said(part) for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else "0"


UNICODE = {"σ": "sigma", "θ": "theta", "λ": "lambda", "ω": "omega", "ℓ": "ell", "κ": "kappa", "φ": "varphi"}


def used(page: str) -> dict[Letter, str]:
    """Each letter of a chapter, and where it stands first."""
    found: dict[Letter, str] = {}
    for formula in formulas(page):
        for letter in letters(formula):
            found.setdefault(letter, " ".join(formula.split())[:60])
    for name in shapes(page):
        found.setdefault(Letter(name), "a shape")
    for name in pictures(page):
        found.setdefault(Letter(UNICODE.get(name, name)), "a picture")
    return found


def table(page: str) -> list[Row]:
    """The rows of the table: their first cell, and the chapters, their last."""
    rows = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| $"):
            written = tuple([*letters(formula)][-1] for formula in re.findall(r"\$([^$]+)\$", cells[0]))
            spans = re.findall(r"(\d+)(?:–(\d+))?", cells[-1])
            rows.append(Row(written, frozenset(n for a, b in spans for n in range(int(a), int(b or a) + 1))))
    return rows


def faults(course: Path = COURSE) -> Iterator[str]:
    """What is wrong, one sentence each."""
    rows: dict[str, Row] = {}
    for row in table((course / "notation.md").read_text(encoding="utf-8")):
        for name in {letter.name for letter in row.written}:
            if name in rows:
                yield f"notation.md: {name} has two rows, and one letter stands for one thing"
            rows[name] = row
    seen: dict[str, set[int]] = {}
    for path in sorted(course.glob("*.md")):
        number = re.match(r"(\d\d)_(?!before)", path.name)
        for letter, formula in used(path.read_text(encoding="utf-8")).items():
            row = rows.get(letter.name, Row((), frozenset()))
            if number is not None:
                seen.setdefault(letter.name, set()).add(int(number[1]))
            if letter not in row.written and formula not in ("a shape", "a picture"):
                yield f"{path.name}: {letter}, in {formula!r}, is not in the table"
            elif not row.written:
                yield f"{path.name}: {letter}, in {formula}, is not in the table"
            elif number is not None and int(number[1]) not in row.chapters:
                yield f"{path.name}: {letter}, in {formula!r}, has a meaning that the table gives to other chapters"
    for row in dict.fromkeys(rows.values()):
        where = set().union(*(seen.get(letter.name, set()) for letter in row.written))
        if row.chapters != where:
            missing = ", ".join(map(str, sorted(row.chapters - where)))
            if missing:
                yield f"notation.md: {row.written[0]} is not used in chapter {missing}"


if __name__ == "__main__":
    found = [*faults()]
    print(*found, sep="\n")
    sys.exit(f"{len(found)} faults" if found else 0)
