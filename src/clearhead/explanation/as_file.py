"""An explanation as a file, whose ending says the form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.base.errors import require
from clearhead.base.pages import write_page
from clearhead.base.written import check_writable, ending_of, replacing

if TYPE_CHECKING:
    from clearhead.explanation.explanation import Explanation

TEXTS: dict[str, Callable[[Explanation], str]] = {
    ".html": lambda explanation: explanation.html(),
    ".md": lambda explanation: explanation.markdown(),
    ".txt": lambda explanation: f"{explanation}\n",
    ".py": lambda explanation: explanation.script(),
    ".json": lambda explanation: json.dumps(explanation.to_dict(), ensure_ascii=False),
}
ENDINGS = (*TEXTS, ".png", ".svg", ".pdf")
WHAT = "explanation"


def write(explanation: Explanation, path: Any) -> Path:
    """See `Explanation.write`."""
    ending = ending_of(path, ENDINGS, WHAT)
    check_writable(path, WHAT)
    if ending in TEXTS:
        return write_page(path, TEXTS[ending](explanation), WHAT)
    figure = np.asarray(explanation.plot()).flat[0].figure
    try:
        with replacing(path, WHAT) as part:
            figure.savefig(part, format=ending[1:], bbox_inches="tight")
    finally:
        require("matplotlib.pyplot", "plot", "a picture").close(figure)
    return Path(path)
