"""Every message of the sources that tells the reader what to write instead, found by a walk over their syntax."""

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import clearhead

SOURCE = Path(clearhead.__file__).parent
# Verbs in the imperative: what follows "would", "to" and the like tells what something does.
ADVISES = re.compile(
    r"(?<!would )(?<!cannot )(?<!this )(?<!attention )(?<!backends )(?<!in )(?<!can )(?<!may )(?<!that )(?<!to )(?<!heads )(?<!backward )(?<!while a )(?<!as )(?<![\w'])"
    r"(?:[Pp]ass|[Uu]se|[Ww]rap|[Bb]uild|[Cc]all|[Ww]rite|Convert|Index|Append|Cut|Give|give|Compute|Let|start(?= again))\s(?!into |reaches|gives|runs|has|adds|could|was |computes|other outputs)"
    r"|instead"
)


class Site(NamedTuple):
    path: str
    line: int
    text: str  # with {} where a value stands
    pattern: re.Pattern[str]
    parts: list[str]  # of the text, between the values

    def said_in(self, message: str) -> bool:
        """Whether a message has this text. The pattern is slow, so each part is looked for first."""
        return all(part in message for part in self.parts) and self.pattern.search(message) is not None

    @property
    def where(self) -> str:
        return f"{self.path}: {' '.join(self.text.split())[:100]}"


def _parts(node: ast.AST) -> str:
    """The text that an expression makes, "\\0" where a value stands."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "\0"
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_parts, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _parts(node.left) + _parts(node.right)
    return "\0"


@functools.cache
def sites() -> list[Site]:
    """Strings of one sentence or more that advise, wherever in the code they stand; no docstrings."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path.name in ("testing.py", "_engine_comparison.py") or "front" in path.parts:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inner: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
                inner.add(id(node.value))
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called.endswith(("add_argument", "add_parser")) or called == "add":
                inner |= {id(each) for each in ast.walk(node)}  # what --help says
            if id(node) in inner or not isinstance(node, ast.JoinedStr | ast.Constant | ast.BinOp):
                continue
            text = _parts(node)
            if text.strip("\0"):
                inner |= {id(each) for each in ast.walk(node)}
            if not ADVISES.search(text) or text.count(" ") < 4:
                continue
            parts = re.split("\0+", text)
            pattern = re.compile(".*?".join(map(re.escape, parts)), re.DOTALL)
            where = path.relative_to(SOURCE).as_posix()
            found.append(Site(where, node.lineno, text.replace("\0", "{}"), pattern, parts))
    return found
