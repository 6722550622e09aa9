"""Functions of other projects that compute a model's attention: what they compute is not known."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch.nn.functional as F

from clearhead.base.torch_private import OWN_SDPA
from clearhead.models.tap.patch import original

KNOWN = ("torch", "transformers", "clearhead")  # the packages whose functions compute softmax(score + mask) · value


def is_foreign(function: Callable[..., Any]) -> bool:
    """Whether a function, or a function inside it, belongs to none of the known packages.

    A plain function is judged by the module of its globals, since `functools.wraps` copies the name of the module.
    """
    inside: Any = function
    while inside is not None:
        if isinstance(inside, partial):
            inside = inside.func
            continue
        if inside is OWN_SDPA:  # a function of C, without a module
            return False
        inside = getattr(inside, "__func__", inside)  # of a bound method
        plain = isinstance(inside, FunctionType)
        named = inside.__globals__.get("__name__") if plain else getattr(inside, "__module__", None)
        if str(named).partition(".")[0] not in KNOWN:
            return True
        inside = getattr(inside, "__wrapped__", None)
    return False


def is_sdpa_foreign() -> bool:
    """Whether a function of another project stands in the place of F.scaled_dot_product_attention."""
    return is_foreign(original(F, "scaled_dot_product_attention"))
