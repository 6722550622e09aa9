"""Builds as scikit-build-core does, after the programs of the pages have been bundled."""

from typing import Any

from bundle import bundle
from scikit_build_core import build as plain
from scikit_build_core.build import *  # noqa: F403 - the hooks that are not here


def build_wheel(*arguments: Any, **options: Any) -> str:
    bundle()
    return plain.build_wheel(*arguments, **options)


def build_editable(*arguments: Any, **options: Any) -> str:
    bundle()
    return plain.build_editable(*arguments, **options)


def build_sdist(*arguments: Any, **options: Any) -> str:
    bundle()
    return plain.build_sdist(*arguments, **options)
