"""How the site is built: `make docs`. Every cell is run, and what is wrong with a page is an error."""

import hashlib
import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # of the kernels that run the cells: a page's numbers are those of one thread
sys.path.insert(0, str(Path(__file__).parent / "ext"))

# What the cells import by name, beside the packages: the examples, and the helpers that check an exercise
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*(str(Path(__file__).parent / folder) for folder in ("../examples", "course")), os.environ.get("PYTHONPATH", "")]
)
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # of the command clearhead

os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # tqdm's, where there are no widgets

import torch

import clearhead

KINDS = (".py", ".js", ".css", ".json", ".txt", ".h", ".cpp", ".safetensors")


def digest() -> str:
    """Of all that cells import from here: where it changes, every cell is run again."""
    root, found = Path(__file__).parents[1], hashlib.sha256(torch.__version__.encode())
    folders = (Path(clearhead.__file__).parent, root / "examples", root / "docs" / "course")
    for file in sorted(file for folder in folders for file in folder.rglob("*") if file.suffix in KINDS):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()[:16]


project = "clearhead"
copyright = "the clearhead developers, Apache-2.0"
version = release = clearhead.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinx_design",
    "access",
    "docstrings",
    "mathml",
    "notebooks",
    "reference",
]
exclude_patterns = ["jupyter_execute", "ext", "static"]

# Pages
myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
myst_dmath_double_inline = True
html_math_renderer = "mathml"
nitpicky = True
smartquotes = False  # "lower_right" is to be copied
highlight_language = "none"

# Cells
# Each is run once for what it depends on: its page, clearhead, the examples and the helpers of the course. So a second
# build runs what has changed; CLEARHEAD_DOCS_CELLS=force runs all.
nb_execution_mode = os.environ.get("CLEARHEAD_DOCS_CELLS", "cache")
nb_execution_cache_path = str(Path(__file__).parents[1] / "build" / "cells" / digest())
nb_execution_timeout = 300
nb_execution_show_tb = True  # a cell that raises is a warning, with its traceback, and so fails the build
nb_output_stderr = "warn"  # and so does one that warns
nb_merge_streams = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Notebooks
# Where the built site is published, "owner/repository/branch" on GitHub: then each chapter has a link that opens it in
# Colab. Nothing is published yet.
colab = ""

# Reference
default_role = "public"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
# What no page here describes: other libraries' types, and those of clearhead that are not public
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|np|numpy|matplotlib|pandas|collections|contextlib|pathlib|os|types)\..*"),
    (
        r"py:class",
        r"Tensor|Phi|Residual|Edges|Part|Align|Kind|Cached|Record|Words|Outcome|Origin|ByTile|Visible|LayerName|"
        r"Linear|HeadView|Array|ArrayT|Integers|Rows|AlignLike|LengthsLike|MaskLike|BiasLike|TokensLike|Index|Nested|"
        r"Result|R[1-4]|Source|Pairs|Each|Writer|OfHeads|Picture|Model|Queries|EllipsisType|Axes|Colormap|DataFrame|"
        r"PreTrainedModel|PreTrainedTokenizerBase|Path|Heads|DocumentEdges|HeadNumbers|Layers|Mode",
    ),
    (r"py:.*", r"clearhead\.(?!nn\.[a-zA-Z]|testing\.)[a-z_]+\..*"),
]

# Looks
html_theme = "furo"
pygments_style, pygments_dark_style = "a11y-light", "github-dark"
html_title = f"clearhead {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = html_show_sourcelink = False
html_show_search_summary = False  # they are fetched, which a browser refuses to pages from disk
html_theme_options = {"navigation_with_keys": True}
