"""lazy_attentions(): a model's own attention weights as lazy tensors, while its fast backend stays in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

from torch import Tensor, nn

from clearhead.base.errors import ClearheadError, UnsupportedError, require
from clearhead.base.managers import Managed, caller
from clearhead.base.numbers import check_count
from clearhead.base.torch_state.contexts import raise_in_jit_trace, without_autocast, without_function_modes
from clearhead.base.torch_state.mode import get_mode
from clearhead.inspection.deviation import measure_deviation
from clearhead.models.edits.edit import change_of, editing, unmasked
from clearhead.models.edits.recorded import edited_weights
from clearhead.models.interception.handler import Handler, why_unreadable
from clearhead.models.interception.intercepted_call import InterceptedCall
from clearhead.models.interception.interface import Marks, applied, intercept_backends, read_keywords
from clearhead.models.interception.keywords import MASKED, NAME
from clearhead.models.interception.masks import MaskStore
from clearhead.models.interception.refused import validate_model
from clearhead.models.interception.transformers_private import collected, takes_backends
from clearhead.models.lazy_matrices.lazy_attention import make_lazy
from clearhead.models.lazy_matrices.of_model import OfModel
from clearhead.models.recorder.missed import describe_deviation, reason

DENSE_BYTES = 2**30

Model = TypeVar("Model", bound=nn.Module)


def lazy_attentions(model: Model, *, max_bytes: int | None = DENSE_BYTES) -> AbstractContextManager[Model]:
    """A model's own `attentions` as lazy tensors, without the eager backend and its memory.

    >>> import torch, clearhead as ch
    >>> from transformers import LlamaConfig, LlamaModel
    >>> model = LlamaModel(LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    ...                                num_attention_heads=8, num_key_value_heads=2)).eval()
    >>> with torch.no_grad(), ch.models.lazy_attentions(model):
    ...     output = model(input_ids=torch.arange(10)[None], output_attentions=True)
    >>> output.attentions[1]
    LazyAttention((1, 8, 10, 10), torch.float32)
    >>> rollout = torch.stack(output.attentions).mean(2)  # code for eager models runs unchanged
    >>> rollout.shape
    torch.Size([2, 1, 10, 10])

    `model`: a model of transformers, or a module that holds some. Inside the `with` its outputs are bit-identical to
    those of its own backend. Each layer's weights, where the call or generate() asks for them by
    `output_attentions=True`, are a `LazyAttention`: a tensor whose parts are computed from query and key when they are
    read. It is valid after the `with`. With gradients enabled it is in the model's graph. The `with` gives the model.
    In a step of generation, with one query, the weights are an ordinary tensor, since they are smaller than the keys. A
    model that runs on "eager" gives its own weights as before. A call that an `edit` changes gives the edited weights,
    dense. `max_bytes`: how many bytes may be dense at a time, for all lazy weights in this process; None for no limit.
    Eager attention gives a query that may see nothing a uniform row; where a backend gives it 0, its row is 0. Raises a
    `ClearheadError` for a model that computes attention in its own code, and an `UnsupportedError` for a compiled
    model. A layer whose weights cannot be lazy has None, and a warning names it: in training with dropout (eager
    weights are those after dropout), and where `watch` leaves a call out. A warning names a layer, too, that a function
    of another project computes otherwise. Transformers itself refuses `model.config.output_attentions = True` on all
    backends but eager: pass it in the call. Cost: where weights are asked for, query and key of each layer are kept,
    and copied where a cache is written over: O(Lq + Lk) memory. A query or key that is written to later is an error
    where the weights are read.
    """
    if max_bytes is not None:
        check_count(max_bytes, 0, "max_bytes", most=2**63 - 1)
    validate_model(model, "lazy_attentions")
    library = require("transformers", "models", "lazy_attentions")
    parts = [part for part in model.modules() if isinstance(part, library.PreTrainedModel)]
    if not any(map(takes_backends, parts)):
        raise ClearheadError(
            f"lazy_attentions: {type(model).__name__} holds no model that attends through the attention interface of "
            "transformers. Other modules can be watched: ch.watch(model)."
        )
    return Managed("models.lazy_attentions(...)", lambda: _lazily(model, max_bytes))


@contextmanager
def _lazily(model: Model, max_bytes: int | None) -> Iterator[Model]:
    lazily = _Lazily(model, max_bytes)
    with lazily.marks.put(), intercept_backends(lambda backend: None if backend == "eager" else lazily):
        yield model


class _Lazily(Handler):
    """Gives lazy weights beside the output of each attention function that transformers looks up."""

    traced = True

    def __init__(self, model: nn.Module, max_bytes: int | None) -> None:
        self.marks, self._max_bytes, self.masks = Marks(model), max_bytes, MaskStore()
        self._names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
        self._line, self._warned, self._compared = caller(), set[int](), set[int]()

    def before(self, call: InterceptedCall) -> None:
        module = call.module
        if module is None or self.marks.attribute not in module.__dict__:
            return
        if not _asked(call.keywords) or get_mode().backward:
            return
        call.state = module, None, None
        try:
            call.state = module, *self._weights(call)
        except Exception as error:  # it would end the model's run
            self._warn_once(module, f"lazy_attentions gives None for {self._name(module)}: {reason(error)}")
        if call.own or call.backend in (NAME, MASKED):  # these would warn that they return no weights
            call.keywords.pop("output_attentions", None)

    def after(self, call: InterceptedCall, result: Any) -> Any:
        if call.state is None:
            return result
        module, lazy, source = call.state
        output = result[0] if isinstance(result, tuple) else result
        if source is not None and call.value is not None and id(module) not in self._compared and call.foreign:
            self._compare(module, source, call.value, output)
        return output, lazy

    def _name(self, module: nn.Module) -> str:
        return self._names.get(id(module)) or type(module).__name__

    def _warn_once(self, module: nn.Module, message: str) -> None:
        if id(module) not in self._warned:
            self._warned.add(id(module))
            self._line.warn(message)

    def _compare(self, module: nn.Module, source: OfModel, value: Tensor, output: Tensor) -> None:
        """Compare the first output of a layer with its lazy weights: a function of another project may add to them."""
        self._compared.add(id(module))
        uniform = None if source.masks.uniform is None else source.masks.uniform[..., 0]
        with suppress(Exception), without_function_modes(), without_autocast(value.device):
            detached = source.without_graph()
            detached.check()
            found = measure_deviation(detached.problem(), value.detach(), output.detach().transpose(1, 2), uniform)
            if not found.is_rounding:
                self._warn_once(module, describe_deviation(self._name(module), found, "lazy weights"))

    def _weights(self, call: InterceptedCall) -> tuple[Tensor, OfModel | None]:
        """The weights, and the call from which they are computed, unless an edit changes it."""
        name, query = type(call.module).__name__, call.query
        _refuse(name, query, call.key, call.keywords)
        call.check(name)
        with without_function_modes():
            masks = read_keywords(call, self.masks).masks
            bias = applied(call.own, call.keywords).get("position_bias")
            added = {"attention mask": call.mask, "position bias": bias}
            source = OfModel(query, call.key, call.score, masks, call.sinks, added)
            if editing():
                dense = _edited(source, call, masks.uniform, self._max_bytes)
                if dense is not None:
                    return dense, None
            found = make_lazy(source, (True, True), source.shape, query.dtype, query.device, self._max_bytes)
            if query.shape[2] == 1 and not source.learnt:
                return found.weights.dense(None).to(query.dtype), source
            return found, source


def _edited(source: OfModel, call: InterceptedCall, uniform: Tensor | None, most: int | None) -> Tensor | None:
    """The weights of a call that an edit changes, as an ordinary tensor; None where no edit changes it."""
    problem = source.without_graph().problem()
    blind = unmasked(call.query.detach().to(problem.query.dtype), uniform)
    change = change_of(id(call.module), problem, call.dropout_p, blind)
    if change is None:
        return None
    if source.learnt:
        raise UnsupportedError(
            f"lazy_attentions: an edit changes a call of {type(call.module).__name__}, and gradients of its weights "
            "are not followed through that. Run the model under torch.no_grad(), or outside of the edit's `with`."
        )
    dense: Tensor = edited_weights(change).dense(most)
    return dense.to(call.query.dtype)


def _asked(kwargs: dict[str, Any]) -> bool:
    """Whether the weights are wanted, by the call's own keyword or by transformers' collector of outputs."""
    if "output_attentions" in kwargs:
        return bool(kwargs["output_attentions"])
    names = collected()
    # None: a module is called by itself, or its model asks every module and keeps some of the results
    return names is None or any(name.endswith("attentions") for name in names)


def _refuse(name: str, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> None:
    if get_mode().compiled:
        what = "inside torch.compile(), which merges its operations. Run the model uncompiled"
    elif kwargs.get("dropout"):
        what = (
            f"with dropout {kwargs['dropout']}: an eager model gives the weights after dropout, which its fast backend "
            "draws in its kernel. Call model.eval(), or set the attention dropout to 0"
        )
    else:
        what = why_unreadable(query, key)
    raise_in_jit_trace()
    if what:
        raise UnsupportedError(f"lazy_attentions: {name} called attention {what}.")
