"""Pages as a reader needs them who cannot see them well, or uses no mouse: what the theme and the cells leave out.

Code that is wider than the page scrolls by the keyboard too; the words that open a folded cell are its name; and the
headings beside the page have a level. docs/check.py looks for what is still missing.
"""

from typing import Any

from sphinx.application import Sphinx

IN_THE_TREE = [('role="heading"', 'role="heading" aria-level="2"')]
IN_THE_BODY = [
    (' aria-label="Toggle hidden content"', ""),
    ('<div class="highlight"><pre>', '<div class="highlight"><pre tabindex="0">'),
]


def changed(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    for name, changes in (("furo_navigation_tree", IN_THE_TREE), ("body", IN_THE_BODY)):
        for old, new in changes:
            context[name] = context.get(name, "").replace(old, new)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("html-page-context", changed, priority=900)  # after the theme has made its tree
    return {"parallel_read_safe": True, "parallel_write_safe": True}
