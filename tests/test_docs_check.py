"""The check of the built site (docs/check.py) finds what is planted, and nothing on pages without a fault."""

import subprocess
import sys
from pathlib import Path

CHECK = Path(__file__).parents[1] / "docs" / "check.py"
PIXEL = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
INSIDE = "<html lang=en><title>inside</title><select><option>one</option></select>"  # of a page in a page
PLANTED = {
    "a request to": '<script src="https://example.invalid/x.js"></script>',
    "an error": "<script>nobody.there()</script>",
    "the console": '<script>console.error("told")</script>',
    "not found": f'<img alt="a picture that is not there" src="missing.png"><img alt="a pixel" src="{PIXEL}">',
    "a dead link": '<a href="nowhere.html">where?</a>',
    "a dead anchor": '<a href="good.html#nowhere">where?</a>',
    "a picture without words": f'<img src="{PIXEL}">',
    "wider than 390 pixels": '<div style="width: 500px">wide</div>',
    "formulas without": "<math><mi>x</mi></math>",
    "a barrier in the light page: color-contrast": '<p style="color: #eee; background: #fff">pale</p>',
    "a barrier in the dark page: button-name": "<button></button>",
    "a barrier in the light page: select-name": f'<iframe title="inside" srcdoc="{INSIDE}"></iframe>',
}
GOOD = f'<h1 id="top">Good</h1><a href="#top">up</a><img alt="a pixel" src="{PIXEL}">'
GOOD += '<a href="https://example.invalid">a link out of the site</a>'
SEARCH = '<ul id="search-results"></ul><script>{}</script>'
NOTHING = 'document.querySelector("ul").innerHTML = "<p class=search-summary>Your search did not match any documents."'
FOUND = 'document.querySelector("ul").innerHTML = "<li><a href=good_1.html>softmax</a></li>"'


def faults_of(folder):
    """In a process of its own, as `make docs` runs it: Playwright can be started only once at a time."""
    run = subprocess.run([sys.executable, CHECK, folder], capture_output=True, text=True)
    found = run.stdout.splitlines()
    assert run.returncode == bool(found), run.stderr
    return found


def written(folder, pages):
    for name, body in pages.items():
        text = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title><body style="margin:0">'
            f"<article>{body}</article>"
        )
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return folder


def test_a_site_without_a_fault(tmp_path):
    pages = {f"good_{i}": GOOD for i in range(10)} | {"search": SEARCH.format(FOUND)}
    assert faults_of(written(tmp_path, pages)) == []


def test_each_planted_fault_is_found(tmp_path):
    pages = {f"bad_{i}": body for i, body in enumerate(PLANTED.values())}
    found = faults_of(written(tmp_path, pages | {"good": GOOD, "search": SEARCH.format(NOTHING)}))
    for i, fault in enumerate(PLANTED):
        assert any(line.startswith(f"bad_{i}.html: {fault}") for line in found), (fault, found)
    assert "search for softmax: nothing found" in found
    assert not [line for line in found if line.startswith("good")]
