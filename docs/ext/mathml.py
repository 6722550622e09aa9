"""Mathematics as MathML, made when the site is built: nothing runs, and nothing is fetched, when it is read.

LaTeX that cannot be converted is an error of the build, with the page and the line.
"""

from html import escape

from docutils import nodes
from math_core import LatexError, LatexToMathML
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

CONVERTER = LatexToMathML(annotation=True)  # the LaTeX stays beside it, to be copied
LOG = logging.getLogger(__name__)


def converted(node: nodes.Node, displaystyle: bool) -> str:
    try:
        return CONVERTER.convert_with_local_state(node.astext(), displaystyle=displaystyle)
    except LatexError as error:
        LOG.error("this formula is no LaTeX that can be converted: %s\n%s", node.astext(), error, location=node)
        return ""


def inline(writer, node: nodes.math) -> None:
    formula, ending = converted(node, displaystyle=False), escape(node.get("ending", ""))
    writer.body.append(f'<span class="unbroken">{formula}{ending}</span>' if ending else formula)
    raise nodes.SkipNode


class Endings(SphinxPostTransform):
    """What ends a phrase after a formula belongs to it, so that no line begins with a full stop."""

    default_priority = 900

    def run(self, **options) -> None:
        for formula in list(self.document.findall(nodes.math)):
            after = formula.next_node(descend=False, siblings=True)
            text = after.astext() if isinstance(after, nodes.Text) else ""
            if rest := text.lstrip(".,:;!?)]"):
                formula["ending"] = text[: len(text) - len(rest)]
                after.parent.replace(after, nodes.Text(rest))
            elif text:
                formula["ending"] = text
                after.parent.remove(after)


def block(writer, node: nodes.math_block) -> None:
    """A formula on lines of its own; one with a label has its number beside it, and is a target of links."""
    anchor = f' id="{node["ids"][0]}"' if node.get("ids") else ""
    number = f'<span class="eqno">({node["number"]})</span>' if node.get("number") else ""
    # tabindex: a formula that is wider than the page scrolls, by the keyboard too
    opening = f'<div class="formula"{anchor} tabindex="0">'
    writer.body.append(f"{opening}{converted(node, displaystyle=True)}{number}</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_post_transform(Endings)
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
