"""A pytest plugin: the fixture `assert_attends` audits a model's attention, and `--attends` says how much it examines.

Nothing of clearhead is imported before the fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--attends",
        default="layers",
        choices=["outputs", "layers", "all"],
        help="the level of clearhead.audit in the fixture assert_attends",
    )


@pytest.fixture
def assert_attends(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`clearhead.assert_attends`, at the level that `--attends` gives, unless the call gives another."""
    import clearhead

    def check(*args: Any, **options: Any) -> None:
        __tracebackhide__ = True
        clearhead.assert_attends(*args, **{"level": request.config.getoption("--attends"), **options})

    return check
