"""Whether Triton, which makes machine code for GPUs, is installed: looked up once, and compiled code may ask."""

from __future__ import annotations

import importlib.util

from clearhead.base.tracing import constant

TRITON = importlib.util.find_spec("triton") is not None


@constant
def has_triton() -> bool:
    """Whether Triton is installed."""
    return TRITON
