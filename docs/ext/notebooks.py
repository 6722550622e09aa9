"""The course as notebooks: each chapter beside its page, with its outputs, and all in one archive with their imports.

The build runs every cell and keeps what it ran: these files are that run. A chapter's page has a link to its own.
"""

import zipfile
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
# what the chapters import or read, beside the packages
BESIDE = [*(DOCS / "course").glob("*.json"), *(DOCS / "course").glob("*.py"), *(DOCS / "course").glob("*/*.py")]
BESIDE += [DOCS.parent / "examples" / name for name in ("dates.py", "dates_data.py", "induction.py")]


def write(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.name != "html":
        return
    site = Path(app.outdir)
    run = sorted((site.parent / "jupyter_execute" / "course").glob("*.ipynb"))
    run = [notebook for notebook in run if (site / "course" / f"{notebook.stem}.html").is_file()]  # a chapter of now
    with zipfile.ZipFile(site / "course" / "course.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for notebook in run:
            (site / "course" / notebook.name).write_bytes(notebook.read_bytes())
        for file in (*run, *BESIDE):
            folder = f"{file.parent.name}/" if file.parent.parent == DOCS / "course" else ""
            archive.write(file, f"clearhead-course/{folder}{file.name}")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
