"""A model run on inputs as a person has them, on a backend of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.errors import UnsupportedError
from clearhead.models.read.audit import TOLERANCE, Expected
from clearhead.models.watch import watch


def assert_attends(
    model: nn.Module, inputs: Any, mask: Expected, *, padding: Any = None, tolerance: float = TOLERANCE
) -> None:
    """Raise an AssertionError, unless every attention call of the model allows what the mask allows, and no more.

    >>> import torch, torch.nn.functional as F, clearhead as ch
    >>> class Block(torch.nn.Module):
    ...     def forward(self, x):
    ...         return F.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> ch.assert_attends(Block(), torch.rand(1, 2, 4, 8), ch.Causal())
    >>> ch.assert_attends(Block(), torch.rand(1, 2, 4, 8), ch.Causal() & ch.SlidingWindow(before=1))
    Traceback (most recent call last):
        ...
    AssertionError: 1 of 1 calls do not attend as expected. The first:
    ...

    `model` is run once on `inputs`, without gradients, in the mode that it is in: a dict of keywords, such as a
    tokenizer gives, a tuple of arguments, or one argument. `mask`: as for `Recording.check`. `padding`: as for `watch`.
    `tolerance`: how much of a query's softmax may be leaked or hidden; 0 allows not one pair.
    The message names the first call that differs, its worst head and query, where the mass went, and what may be the
    cause. Raises a `ClearheadError` where no call is seen, or the mask does not fit one. Cost: a run of the model under
    `watch`, and that of `check`.
    """
    with watch(model, padding) as seen:
        run(model, inputs)
    audit = seen.check(mask)
    if not audit.ok(tolerance):
        raise AssertionError(audit.told(tolerance))


@torch.no_grad()
def run(model: nn.Module, inputs: Any) -> Any:
    """The model's output on a mapping of keywords, a tuple of arguments, or one argument, which stay as they are."""
    if isinstance(inputs, Mapping):
        return model(**{name: _own(value) for name, value in inputs.items()})
    return model(*map(_own, inputs)) if isinstance(inputs, tuple) else model(_own(inputs))


def _own(value: Any) -> Any:
    """A copy of what a model may write to, such as a key/value cache."""
    return value if isinstance(value, Tensor) else deepcopy(value)


@contextmanager
def on_backend(model: Any, backend: str) -> Iterator[None]:
    """Another backend for a model of transformers, and for all models inside it; after it those from before."""
    before = [(config, config._attn_implementation) for config in _configs(model)]
    try:
        try:
            model.set_attn_implementation(backend)
        except (ValueError, ImportError) as error:
            raise UnsupportedError(f"{type(model).__name__} cannot run on the backend {backend!r}: {error}") from error
        yield
    finally:
        for config, implementation in before:  # one that is set is set for all inside it, which come after it
            config._attn_implementation = implementation


def _configs(model: nn.Module) -> list[Any]:
    """Every configuration, those inside others after them."""
    found = [part.config for part in model.modules() if hasattr(getattr(part, "config", None), "_attn_implementation")]
    every: dict[int, Any] = {}
    for config in found:
        _add(config, every)
    return list(every.values())


def _add(config: Any, every: dict[int, Any]) -> None:
    if id(config) in every:
        return
    every[id(config)] = config
    for name in getattr(config, "sub_configs", None) or ():
        inner = getattr(config, name, None)
        if inner is not None:
            _add(inner, every)
