"""The directive `public`, which documents names from their docstrings, and the check that no public name is left out.

```{public}
Dot Bilinear nn.MultiHeadAttention
```
"""

import importlib
import inspect
from functools import cache

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import clearhead
from clearhead import testing

# The namespaces whose classes and functions are public
NAMESPACES = ("edits", "exercises", "explanation", "extend", "models", "nn", "reductions", "results")
OPERATORS = {"__getitem__", "__matmul__", "__and__", "__or__", "__invert__", "__add__", "__call__", "__sub__"}
LOG = logging.getLogger(__name__)


def found(name: str) -> object:
    module, _, last = f"clearhead.{name}".rpartition(".")
    return getattr(importlib.import_module(module), last)


@cache
def targets() -> dict[str, tuple[str, object]]:
    """All that the reference has to have, by its name and by the last part of that: the whole name, and the object."""
    names = [name for name in clearhead.__all__ if not inspect.ismodule(getattr(clearhead, name))]
    for space in NAMESPACES:
        inside = vars(importlib.import_module(f"clearhead.{space}"))
        names += [f"{space}.{name}" for name, value in inside.items() if public(name, value)]
    names += [f"distributed.{name}" for name in vars(clearhead.distributed) if name in clearhead.distributed.__all__]
    names += [f"testing.{name}" for name in vars(testing) if name.startswith("check_")]
    known = {name: (f"clearhead.{name}", found(name)) for name in names}
    return {name.rpartition(".")[2]: value for name, value in known.items()} | known


def public(name: str, value: object) -> bool:
    """Whether a name of a namespace is one of ours, and does not stand at the top too."""
    ours = getattr(value, "__module__", "").startswith("clearhead.")
    return ours and not name.startswith("_") and not inspect.ismodule(value) and name not in clearhead.__all__


def members(owner: object) -> list[str]:
    """What a class says in words of its own: its own methods, and those of bases that are not public."""
    names: dict[str, None] = {}
    for base in reversed(owner.__mro__) if inspect.isclass(owner) else ():
        own = base is owner or base not in {value for _, value in targets().values() if inspect.isclass(value)}
        if base.__module__.startswith("clearhead.") and own:
            names |= {name: None for name, value in vars(base).items() if told(name, value)}
    return [*names]


def told(name: str, value: object) -> bool:
    kind = isinstance(value, (property, classmethod, staticmethod)) or inspect.isfunction(value)
    return bool(kind and value.__doc__ and (not name.startswith("_") or name in OPERATORS))


class Public(SphinxDirective):
    has_content = True

    def run(self) -> list[nodes.Node]:
        lines = ["`````{eval-rst}"]
        for name in " ".join(self.content).split():
            value = found(name)
            if not inspect.isclass(value):
                lines += [f".. autofunction:: clearhead.{name}"]
            else:
                kind = "exception" if issubclass(value, Exception) else "class"
                lines += [f".. auto{kind}:: clearhead.{name}"]
                lines += [f"   :members: {', '.join(members(value))}"] if members(value) else []
            lines.append("")
        return self.parse_text_to_nodes("\n".join([*lines, "`````"]))


def complete(app: Sphinx, env) -> None:
    documented = env.get_domain("py").objects
    for name in sorted({whole for whole, _ in targets().values()} - documented.keys()):
        LOG.warning("%s is public, and no page of docs/reference has it", name)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("public", Public)
    app.connect("env-check-consistency", complete)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
