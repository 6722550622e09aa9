"""The docstrings as reStructuredText. They are written as plain text, to be read in a terminal:

    Formula: …                 a line that begins with one of LABELS is a field; so is "Cost: …" after a full stop
    `mask`, `bias`: …          and one that begins with names is an item of the field Parameters, or Attributes
    Args:, Returns:, Cost:     the sections of Google's style, as the same fields
    anything else              stays a paragraph

What stands in backticks is code, and a link where it is a public class or error, or has "clearhead." before it.
"""

import inspect
import re
from textwrap import dedent

from docutils import nodes
from reference import members, targets
from sphinx import addnodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

LABEL = re.compile(r"(Formula|Rule|Takes|Gives|Returns|Raises|Cost|Memory|Sources?):? (.*)")
# a field or a name that begins within a line
LATER = re.compile(r"(?<=[.;]) (?=(?:Cost|Sources?|Raises|Returns|Gives)\b:? |(?:`\w+`(?:, | and )?)+: )")
NAMES = re.compile(r"((?:`\w+`(?:, | and )?)+): (.*)")
SPLIT = re.compile(r"(`\w+`(?:,| and|:))\n(?=\S)")  # a list of names that goes on in the next line
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Formula|Cost|Memory|Sources?):\n ")
# of a letter in a formula, as in w_ij, outside of backticks
INDEX = re.compile(r"(`[^`]*`)|(?<!\\)\b([^\W_]+)\\_([a-zA-Z0-9]{1,2}|[bhijk]{3})(?![a-zA-Z0-9\\])")
# a parameter, or the type of a property; before it is known which is shown, the short and the long name stand together
ANY = re.compile(r"(\**\w+)?: (Any)?(~?typing\.)?Any( = .*)?$")
MARKUP = re.compile(r"(`[^`]*`)(?=(\w)?)|([\\*_|])")


def escaped(text: str) -> str:
    """What is markup to reStructuredText alone is text here: `*`, `_` and `|` outside of backticks."""

    def one(found: re.Match[str]) -> str:
        literal, letter, mark = found.groups()
        return literal.replace("\\", "\\\\") + ("\\ " if letter else "") if literal else "\\" + mark

    return MARKUP.sub(one, text)


def indexed(text: str) -> str:
    return INDEX.sub(lambda found: found[1] or rf"{found[2]}\ :sub:`{found[3]}`\ ", text)


def fields(paragraph: str, parameters: set[str]) -> list[str]:
    """A paragraph, cut where a field or a list of names begins."""
    out, listed, indent = [], "", ""
    for line in LATER.sub("\n", indexed(escaped(SPLIT.sub(r"\1 ", paragraph)))).split("\n"):
        if found := NAMES.fullmatch(line):
            title = "Parameters" if parameters & set(re.findall(r"\w+", found[1])) else "Attributes"
            out += [] if listed == title else ["", f":{title}:"]
            out.append(f"   - {line}")
            listed, indent = title, "     "
        elif found := LABEL.fullmatch(line):
            out += ["", f":{found[1]}: {found[2]}"]
            listed, indent = found[1], "   "
        else:
            out.append(indent + line)
    return out


def from_section(paragraph: str) -> list[str]:
    """A section of Google's style, such as "Args:" or "Cost:", with indented lines, as a field."""
    title, _, body = paragraph.partition("\n")
    items = [" ".join(item.split()) for item in re.split(r"\n(?! )", dedent(body))]
    if title not in ("Args:", "Attributes:", "Raises:"):
        return ["", f":{title} {indexed(escaped(' '.join(items)))}"]
    pairs = [item.partition(": ") for item in items]
    listed = [f"   - `{name}`: {indexed(escaped(text))}" for name, _, text in pairs]
    return ["", ":Parameters:" if title == "Args:" else f":{title}", *listed]


def written(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    try:
        parameters = set(inspect.signature(obj).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a property, a class without a signature
        parameters = set()
    out: list[str] = []
    for paragraph in "\n".join(lines).strip("\n").split("\n\n"):
        if SECTION.match(paragraph):
            out += [*from_section(paragraph), ""]
            continue
        plain = not paragraph.lstrip().startswith(">>>")
        out += [*(fields(paragraph, parameters) if plain else paragraph.split("\n")), ""]
    lines[:] = out


def public(text: str) -> str | None:
    """The whole name of the public object that a docstring means by this."""
    name = text.partition("(")[0]
    if not (name.startswith("clearhead.") or name[:1].isupper()):
        return None
    owner, _, method = name.removeprefix("clearhead.").rpartition(".")
    known = targets()
    if owner in known and method in members(known[owner][1]):
        return f"{known[owner][0]}.{method}"
    return next((known[found][0] for found in (owner + "." + method, method, owner) if found in known), None)


def code(role, rawtext, text, line, inliner, options=None, content=None):
    """The default role: a literal, and a link if it is a public name."""
    literal = nodes.literal(rawtext, text.replace("\x00", "\\"))
    target = public(text)
    if target is None:
        return [literal], []
    link = pending_xref("", literal, refdomain="py", reftype="obj", reftarget=target, refexplicit=True, refwarn=True)
    link["refdoc"] = inliner.document.settings.env.docname
    return [link], []


def shortened(app: Sphinx, what: str, name: str, obj: object, options: object, arguments: str, result: str):
    """A default that is made anew for each object, as Python can read it."""
    return arguments and (arguments.replace("<factory>", "..."), result)


def without_any(app: Sphinx, domain: str, kind: str, content: nodes.Node) -> None:
    """The signatures without `Any`, which says nothing: the docstring does."""
    signatures = content.parent.findall(addnodes.desc_signature) if domain == "py" else ()
    for part in [part for signature in signatures for part in signature.findall(nodes.Element)]:
        said = part.astext()
        returned = isinstance(part, addnodes.desc_returns) and said.endswith("Any")
        if returned or (isinstance(part, addnodes.desc_annotation) and ANY.match(said)):
            part.parent.remove(part)
        elif isinstance(part, addnodes.desc_parameter) and ANY.match(said):
            named = 1 + isinstance(part[0], addnodes.desc_sig_operator)  # its name, with the stars before it
            default = [addnodes.desc_sig_operator("", "="), part.children[-1]] if " = " in said else []
            part.children = part.children[:named] + default


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", written)
    app.connect("autodoc-process-signature", shortened)
    app.connect("object-description-transform", without_any)
    app.add_role("public", code)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
