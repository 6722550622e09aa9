"""Pages as a reader needs them who cannot see them well, or uses no mouse: what the theme and the cells leave out.

Code and tables that are wider than the page scroll by the keyboard too; the words that open a folded cell are its name;
the headings beside the page have a level; and the parameters of a function, each on its line, are no list of
definitions. docs/check.py looks for what is still missing.
"""

import re
from typing import Any

from sphinx.application import Sphinx

IN_THE_TREE = [('role="heading"', 'role="heading" aria-level="2"')]
IN_THE_BODY = [
    (' aria-label="Toggle hidden content"', ""),
    ('<div class="highlight"><pre>', '<div class="highlight"><pre tabindex="0">'),
    ('<div class="table-wrapper', '<div tabindex="0" class="table-wrapper'),
]
SIGNATURE = re.compile(r'<dt class="sig .*?</dt>', re.S)
IN_A_SIGNATURE = [("dl", "parameters"), ("dd", "parameter")]


def signature(found: re.Match[str]) -> str:
    text = found[0]
    for tag, name in IN_A_SIGNATURE:
        text = text.replace(f"<{tag}>", f'<div class="{name}">').replace(f"</{tag}>", "</div>")
    return text


def changed(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    for name, changes in (("furo_navigation_tree", IN_THE_TREE), ("body", IN_THE_BODY)):
        for old, new in changes:
            context[name] = context.get(name, "").replace(old, new)
    context["body"] = SIGNATURE.sub(signature, context["body"])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("html-page-context", changed, priority=900)  # after the theme has made its tree
    return {"parallel_read_safe": True, "parallel_write_safe": True}
