"""The course as notebooks: each chapter beside its page, with its outputs, and in an archive with what it imports; and
all in one archive.

The build runs every cell and keeps what it ran: these files are that run. A chapter's page has a link to its own
archive. Where the setting `colab` says in which branch the built site is published, there is a link beside it that
opens the chapter in Colab, and the notebook has a first cell that installs clearhead and fetches the archive there.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
# what the chapters import or read, beside the packages, and the pages that they link to
PAGES = (
    "00_before.md",
    "08_a_transformer.md",
    "glossary.md",
    "notation.md",
)  # trained.py reads the machine of chapter 8
BESIDE = [
    DOCS / "course" / name for name in ("at_scale.json", "induction_steps.json", "diagrams.py", "trained.py", *PAGES)
]
BESIDE += [*(DOCS / "course").glob("*/*.py"), *(DOCS / "course" / "data").glob("*.safetensors")]
BESIDE += [DOCS.parent / "examples" / name for name in ("dates.py", "dates_data.py", "induction.py")]
OWN = re.compile(r'<a href="(\w+)\.zip" download>[^<]*</a>')  # the link to a chapter's archive
IMPORTED = re.compile(r"^\s*(?:from|import) (\w+)", re.M)
FETCHED = """import sys

if "google.colab" in sys.modules:  # what the chapter needs, where it runs in Colab
    %pip install -q "clearhead[models,plot]"
    !wget -q https://raw.githubusercontent.com/{}/course/course.zip && unzip -qo course.zip
    %cd -q clearhead-course
"""


def badged(body: str, colab: str) -> str:
    """A page with a link that opens its notebook in Colab. `colab`: "owner/repository/branch"."""
    owner, repository, branch = colab.split("/", 2)
    start = f"https://colab.research.google.com/github/{owner}/{repository}/blob/{branch}/course"
    return OWN.sub(rf'\g<0> <a class="colab" href="{start}/\1.ipynb">Open in Colab</a>', body)


def fetching(notebook: str, colab: str) -> str:
    """A notebook with a first cell that fetches, in Colab, what the chapter imports."""
    found = json.loads(notebook)
    cell = {"cell_type": "code", "id": "colab", "metadata": {}, "execution_count": None, "outputs": []}
    found["cells"].insert(0, cell | {"source": FETCHED.format(colab).splitlines(keepends=True)})
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def needed(code: str) -> list[Path]:
    """What a chapter with this code imports and reads, of `BESIDE`."""
    found = [file for file in BESIDE if file.name in PAGES or file.name in code]
    texts = [code]
    for text in texts:  # it grows
        for name in IMPORTED.findall(text):
            files = [file for file in BESIDE if file.suffix == ".py" and name in (file.stem, file.parent.name)]
            new = [file for file in files if file not in found]
            found += new
            texts += [file.read_text(encoding="utf-8") for file in new]
            if name == "trained":
                found += [file for file in BESIDE if file.suffix == ".safetensors" and file not in found]
    return found


def code_of(notebook: str) -> str:
    """The code of a notebook's cells."""
    cells = json.loads(notebook)["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def pack(path: Path, files: Iterable[Path]) -> None:
    """Files as an archive with one folder, in which packages and data have folders of their own."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            folder = f"{file.parent.name}/" if file.parent.parent == DOCS / "course" else ""
            archive.write(file, f"clearhead-course/{folder}{file.name}")


def link(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    if app.config.colab and page.startswith("course/"):
        context["body"] = badged(context.get("body", ""), app.config.colab)


def write(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.name != "html":
        return
    site, colab = Path(app.outdir), app.config.colab
    run = sorted((site.parent / "jupyter_execute" / "course").glob("*.ipynb"))
    run = [notebook for notebook in run if (site / "course" / f"{notebook.stem}.html").is_file()]  # a chapter of now
    pack(site / "course" / "course.zip", [*run, *BESIDE])
    for notebook in run:
        text = notebook.read_text(encoding="utf-8")
        beside = site / "course" / notebook.name
        beside.write_text(fetching(text, colab) if colab else text, encoding="utf-8")
        pack(beside.with_suffix(".zip"), [notebook, *needed(code_of(text))])


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("colab", "", "html", (str,))
    app.connect("html-page-context", link)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
