"""Bundles the programs of the pages, where the bundle is not that of the sources: `python packaging/bundle.py`.

`front/` of several packages holds the sources, modules of JavaScript; esbuild, which needs Node.js, makes one minified
file of each program, in `src/clearhead/base/bundle`. A digest beside them names the sources that they are of. A release
holds these files, so that nothing is made where it is installed. In a clone they are made when it is installed, and by
`make` after a source has changed.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUNDLE = ROOT / "src/clearhead/base/bundle"
DIGEST = BUNDLE / "sources.sha256"
MODULES = ROOT / "node_modules"
MISSING = (
    "the programs of the pages are not bundled yet, and {name} is not found. Install Node.js 18 or newer with npm "
    "(nodejs.org, or `apt-get install nodejs npm`); or install a wheel or the sources of a release of clearhead, which "
    "hold the programs."
)


def digest() -> str:
    """A digest of all that the bundle is made of."""
    sources = sorted(path for kind in ("js", "css") for path in ROOT.glob(f"src/clearhead/**/front/*.{kind}"))
    made = hashlib.sha256()
    for path in (*sources, ROOT / "packaging/bundle.mjs", ROOT / "package-lock.json"):
        content = path.read_bytes().replace(b"\r\n", b"\n")
        made.update(f"{path.relative_to(ROOT).as_posix()} {len(content)}\n".encode() + content)
    return made.hexdigest()


def current() -> bool:
    """Whether the bundle is that of the sources as they are."""
    return DIGEST.exists() and DIGEST.read_text() == digest()


def packages() -> None:
    """Installs what package-lock.json names, where it is not there."""
    installed = MODULES / ".package-lock.json"
    lock = ROOT / "package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
        installed.touch()


def bundle() -> None:
    """Makes the bundle, where it is not that of the sources."""
    if current():
        return
    packages()
    DIGEST.unlink(missing_ok=True)
    run("node", "packaging/bundle.mjs", str(BUNDLE))
    DIGEST.write_text(digest())


def run(name: str, *arguments: str) -> None:
    program = shutil.which(name)
    if program is None:
        raise SystemExit(MISSING.format(name=name))
    done = subprocess.run([program, *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"`{name} {' '.join(arguments)}` failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    packages() if sys.argv[1:] == ["--packages"] else bundle()
