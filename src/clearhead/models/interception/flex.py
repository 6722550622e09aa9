"""Calls of PyTorch's flex_attention in eager code, which no function mode sees: another source of calls."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clearhead.models.interception.handler import ModelHandler
from clearhead.models.interception.intercepted_call import InterceptedCall
from clearhead.models.interception.masks import MaskStore, Recorded
from clearhead.models.interception.patch import replaced
from clearhead.models.interception.place import BY_HEAD

# In eager code flex_attention calls this function of its module, and then compiles a function that it calls with all of
# its arguments. In compiled code it calls neither.
MODULE, PREPARES = "torch.nn.attention.flex_attention", "setup_compilation_env"


@contextmanager
def intercept_flex(handler: ModelHandler, innermost: bool = False) -> Iterator[None]:
    """Intercept each call of flex_attention, under whatever name the function was imported."""
    flex, here = importlib.import_module(MODULE), _Here()
    if not hasattr(flex, PREPARES):  # a version in which these calls cannot be seen
        yield
        return

    def compiling(compiler: Callable[..., Any]) -> Callable[..., Any]:
        def compiled(*args: Any, **kwargs: Any) -> Any:
            function = compiler(*args, **kwargs)
            if not here.prepares:  # another thread compiles a function of its own
                return function
            here.prepares = False
            if handler.idle:
                return function
            return lambda *given: handler.compute(handler.begin(lambda: _read(handler, *given)), function, *given)

        return compiled

    def preparing(prepare: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def setup_compilation_env(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with prepare(*args, **kwargs) as backend, replaced(torch, "compile", compiling, innermost):
                here.prepares = True
                yield backend

        return setup_compilation_env

    with replaced(flex, PREPARES, preparing, innermost):
        yield


class _Here(threading.local):
    prepares = False  # whether flex_attention prepares a call in this thread


def _read(
    handler: ModelHandler,
    query: Tensor,  # (B, H, Lq, E)
    key: Tensor,  # (B or 1, Hk, Lk, E)
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: Any,
) -> InterceptedCall:
    handler.check(query, key)
    key, value = (t.expand(query.shape[0], -1, -1, -1) for t in (key, value))
    first = [torch.zeros((), dtype=torch.int64, device=query.device)] * 4
    score = query.new_zeros(())
    change = None if score_mod(score, *first) is score else score_mod  # without a change the function is the identity
    read_masks = partial(masks_of, handler.masks, block_mask[-1])
    return InterceptedCall(query, key, value, "flex_attention", read_masks, BY_HEAD, scale=scale, change=change)


def masks_of(store: MaskStore, rule: Callable[..., Tensor]) -> Recorded:
    """The `mask_mod` of a BlockMask as a mask. In eager code it alone counts, and not the blocks made of it."""
    if rule is importlib.import_module(MODULE).noop_mask:
        return Recorded()
    return Recorded(store.rule(rule), by_rule=True)
