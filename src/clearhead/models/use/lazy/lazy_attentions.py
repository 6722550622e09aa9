"""lazy_attentions(): a model's own attention weights as lazy tensors, its fast backend left in place."""

from __future__ import annotations

import itertools
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from inspect import unwrap
from typing import Any, TypeVar

from torch import Tensor, nn

from clearhead.base.errors import ClearheadError, UnsupportedError, require
from clearhead.base.managers import Managed
from clearhead.base.numbers import check_count
from clearhead.base.tracing import compiling, empty_of_values, in_backward, refuse_jit, transformed, unobserved
from clearhead.models.tap import interface as transformers
from clearhead.models.tap.masks import MaskStore
from clearhead.models.tap.patch import interface_replaced
from clearhead.models.tap.refused import refuse_compiled
from clearhead.models.use.edits.edit import change_of, editing, unmasked
from clearhead.models.use.edits.recorded import edited_weights
from clearhead.models.use.lazy.lazy_attention import lazy_attention
from clearhead.models.use.lazy.of_model import OfModel
from clearhead.scores.dot import Dot

DENSE_BYTES = 2**30
MARK = "_clearhead_lazy_attentions"  # in a module's __dict__, which copies and replicas of it have too

_numbers = itertools.count(secrets.randbits(48))  # marks are saved with a model: those of another process are others
Model = TypeVar("Model", bound=nn.Module)


def lazy_attentions(model: Model, *, max_bytes: int | None = DENSE_BYTES) -> AbstractContextManager[Model]:
    """A model's own `attentions`, for code that wants them, without the eager backend and its memory.

    >>> import torch, clearhead as ch
    >>> from transformers import LlamaConfig, LlamaModel
    >>> model = LlamaModel(LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    ...                                num_attention_heads=8, num_key_value_heads=2)).eval()
    >>> with torch.no_grad(), ch.lazy_attentions(model):
    ...     output = model(input_ids=torch.arange(10)[None], output_attentions=True)
    >>> output.attentions[1]
    LazyAttention((1, 8, 10, 10), torch.float32)
    >>> rollout = torch.stack(output.attentions).mean(2)  # code for eager models runs unchanged
    >>> rollout.shape
    torch.Size([2, 1, 10, 10])

    `model`: a model of transformers, or a module that holds some. Inside the `with` its outputs are bit-identical to
    those of its own backend, and each layer's weights, where they are asked for by `output_attentions=True` in the
    call, or in generate(), are a `LazyAttention`: a tensor that is computed where it is looked at, from query and key.
    It is valid after the `with`. With gradients enabled it is in the model's graph. Gives the model.
    A step of generation, one query, has its weights at once, as an ordinary tensor: they are smaller than its keys.
    A model that runs on "eager" gives its own weights, as ever; a call that an `edit` changes the edited ones, dense.
    `max_bytes`: how many bytes may stand dense at a time, of all lazy weights in this process; None for no limit.
    Where eager attention gives a query that may see nothing a uniform row, a backend that gives 0 has a row of 0.
    Raises a `ClearheadError` for a model that computes attention in its own code; an `UnsupportedError` for a compiled
    one, for one that trains with dropout (its eager weights are those after dropout), and where `watch` raises one.
    `model.config.output_attentions = True` is refused by transformers itself, but on eager: pass it in the call.
    Cost: query and key of each layer are kept, and copied where a cache is written over: O(Lq + Lk) memory, where
    weights are asked for; else nothing. A query or key that something writes to later is an error where it is read.
    """
    check_max_bytes(max_bytes)
    if not isinstance(model, nn.Module):
        raise ClearheadError(f"lazy_attentions takes a model of transformers; got a {type(model).__name__}.")
    library = require("transformers", "models", "lazy_attentions")
    parts = [part for part in model.modules() if isinstance(part, library.PreTrainedModel)]
    if not any(part._can_set_attn_implementation() for part in parts):
        raise ClearheadError(
            f"lazy_attentions: {type(model).__name__} "
            + ("computes attention in its own code, and not" if parts else "holds no model that computes attention")
            + " through the attention interface of transformers, where its weights could be taken from. "
            "Other modules can be watched: ch.watch(model)."
        )
    refuse_compiled(model, "lazy_attentions", "makes lazy")
    return Managed("lazy_attentions(...)", lambda: _lazily(model, _Interface(next(_numbers), max_bytes)))


def check_max_bytes(given: Any) -> None:
    if given is not None:
        check_count(given, 0, "max_bytes", most=2**63 - 1)


@contextmanager
def _lazily(model: Model, interface: _Interface) -> Iterator[Model]:
    for module in model.modules():
        module.__dict__[MARK] = (*module.__dict__.get(MARK, ()), interface.number)
    try:
        with interface_replaced(interface.wrap):
            yield model
    finally:
        for module in model.modules():
            left = tuple(number for number in module.__dict__.get(MARK, ()) if number != interface.number)
            if left:
                module.__dict__[MARK] = left
            else:
                module.__dict__.pop(MARK, None)


class _Interface:
    """Gives lazy weights beside the output of each attention function that transformers looks up."""

    def __init__(self, number: int, max_bytes: int | None) -> None:
        self.number, self._max_bytes = number, max_bytes
        self._masks = MaskStore()

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_interface(interface: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
            function = original(interface, attn_implementation, default)
            backend = "eager" if unwrap(function) is default else str(attn_implementation)
            return function if backend == "eager" else self._with_weights(function, backend)

        return get_interface

    def _with_weights(self, function: Callable[..., Any], backend: str) -> Callable[..., Any]:
        @wraps(function)
        def attention(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if self.number not in module.__dict__.get(MARK, ()) or not _asked(kwargs) or in_backward():
                return function(module, query, key, value, attention_mask, *args, **kwargs)
            kwargs = transformers.named(function, args, kwargs)
            lazy = self._weights(function, backend, module, query, key, attention_mask, kwargs)
            if transformers.own_name(function):  # these would warn that they give no weights
                kwargs = {name: value for name, value in kwargs.items() if name != "output_attentions"}
            output = function(module, query, key, value, attention_mask, **kwargs)
            return (output[0] if isinstance(output, tuple) else output), lazy

        return attention

    def _weights(
        self,
        function: Callable[..., Any],
        backend: str,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        name = type(module).__name__
        _refuse(name, query, key, kwargs)
        transformers.check(name, mask, backend, kwargs)
        with unobserved():
            own = transformers.own_name(function)
            kwargs = transformers.applied(own, kwargs)
            key, masks = transformers.masked(self._masks, own, backend, module, query, key, mask, kwargs)
            score = Dot(scale=kwargs.get("scaling"), softcap=kwargs.get("softcap"))
            added = {"attention mask": mask, "position bias": kwargs.get("position_bias")}
            source = OfModel(query, key, score, masks, kwargs.get("s_aux"), added)
            if (
                editing()
                and (dense := _edited(source, module, query, masks.uniform, kwargs, self._max_bytes)) is not None
            ):
                return dense
            found = lazy_attention(source, query.dtype, self._max_bytes)
            if query.shape[2] == 1 and not source.learnt:
                return found.weights.dense(None).to(query.dtype)  # type: ignore[no-any-return]
            return found


def _edited(
    source: OfModel, module: nn.Module, query: Tensor, uniform: Tensor | None, kwargs: dict[str, Any], most: int | None
) -> Tensor | None:
    """The weights of a call that an edit changes, an ordinary tensor; None where none does."""
    problem = source.without_graph().problem()
    blind = unmasked(query.detach().to(problem.query.dtype), uniform)
    change = change_of(id(module), problem, kwargs.get("dropout") or 0.0, blind)
    if change is None:
        return None
    if source.learnt:
        raise UnsupportedError(
            f"lazy_attentions: an edit changes a call of {type(module).__name__}, and gradients of its weights are not "
            "followed through that. Run the model under torch.no_grad(), or outside of the edit's `with`."
        )
    dense: Tensor = edited_weights(change).dense(most)
    return dense.to(query.dtype)


def _asked(kwargs: dict[str, Any]) -> bool:
    """Whether the weights are wanted, by the call's own keyword or by what transformers is collecting."""
    if "output_attentions" in kwargs:
        return bool(kwargs["output_attentions"])
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collected = None if capturing is None else capturing._active_collector.get()
    # None: a module that is called by itself, or a model that asks every module and keeps what it wants
    return collected is None or any(name.endswith("attentions") for name in collected)


def _refuse(name: str, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> None:
    wrong = None
    if compiling():
        wrong = "inside torch.compile(), which merges its operations", "Run the model uncompiled"
    elif kwargs.get("dropout"):
        wrong = (
            f"with dropout {kwargs['dropout']}: an eager model gives the weights after dropout, which its fast backend "
            "draws in its kernel",
            "Call model.eval(), or set the attention dropout to 0",
        )
    elif transformed():
        wrong = "inside a transform of torch.func (vmap, grad), whose tensors have no values", "Run it without one"
    elif query.is_nested or key.is_nested:
        wrong = "with nested tensors", "Run it on a padded batch and a mask"
    elif empty_of_values(query):
        wrong = "with tensors that have no values", "Run it on real inputs"
    refuse_jit()
    if wrong:
        raise UnsupportedError(f"lazy_attentions: {name} called attention {wrong[0]}. {wrong[1]}.")
