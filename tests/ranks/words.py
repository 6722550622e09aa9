"""What calls say, on each rank: the words of their errors, or "done"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import clearhead as ch


def said(call: Callable[[], Any], error: type[Exception] = ch.ClearheadError) -> str:
    try:
        call()
    except error as raised:
        return str(raised)
    return "done"


def each_said(calls: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    return {name: said(call) for name, call in calls.items()}
