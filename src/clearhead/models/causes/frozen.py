"""A run of a model in which the residual stream alone has a gradient, so that each layer has its direct effect."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clearhead.base.errors import UnsupportedError
from clearhead.base.managers import Delayed
from clearhead.base.torch_state.torch_private import parts_of, tree_map_only
from clearhead.explanation.modules.projection import Linear, Norm
from clearhead.models.causes.metrics import at_position
from clearhead.models.model_calls import call_without_grad
from clearhead.models.origins.called import CalledLayer
from clearhead.models.origins.find import given_heads, near
from clearhead.models.origins.ran import kind_of, layer_of
from clearhead.models.recording import Recording
from clearhead.models.watch import watch_own

# What these give of a run is a constant: the size that a norm divides by, and the gate that a result is multiplied by.
SIZES = {torch.rsqrt, Tensor.rsqrt, torch.sqrt, Tensor.sqrt, torch.norm, Tensor.norm, torch.linalg.norm}
SIZES |= {torch.linalg.vector_norm, torch.std, Tensor.std, torch.var, Tensor.var}
GATES = {torch.sigmoid, Tensor.sigmoid, torch.softmax, Tensor.softmax, F.softmax}
POWERS = {torch.pow, Tensor.pow, Tensor.__pow__}
NORMS = {F.layer_norm: True, F.rms_norm: False, F.normalize: False}  # whether each takes the mean away
# These are not linear: the parts of what goes through them, behind the last block, do not add up.
TANH = {torch.tanh, Tensor.tanh}
BENDS = TANH | {F.gelu, F.silu, F.elu, F.selu, F.celu, F.mish, F.softplus, torch.erf, Tensor.erf, torch.exp, Tensor.exp}
BENDS |= {F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.logsumexp, Tensor.logsumexp}


class First(NamedTuple):
    """A first run of a model: its calls, the name of the linear layer that ran last, and the width of its input."""

    seen: Recording
    last: str
    width: int | None


def first_run(model: nn.Module, inputs: Any) -> First:
    """A run of the model on these inputs, without gradients."""
    ran: list[tuple[str, int | None]] = [("", None)]

    def hook(name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            ran.append((name, args[0].shape[-1] if args and isinstance(args[0], Tensor) else None))

        return _here(before)

    with watch_own(model, values=True) as seen, ExitStack() as stack:
        with Delayed():
            for name, module in model.named_modules():
                if kind_of(module) is Linear:
                    stack.callback(module.register_forward_pre_hook(hook(name)).remove)
        call_without_grad(model, inputs)
    return First(seen, *ran[-1])


def _here(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, which does nothing in other threads: they may run the model meanwhile."""
    thread = threading.get_ident()
    return lambda *args: hook(*args) if threading.get_ident() == thread else None


class Written(NamedTuple):
    """A layer's result as it entered the residual stream, with a gradient. `call`: the number of the call whose heads
    the layer was given; None for other layers."""

    name: str
    result: Tensor
    call: int | None


class Frozen:
    """Hooks on the modules of a model, so that a gradient flows through its residual stream and nowhere else.

    - A layer with weights of two axes or more takes its inputs as constants, and its result is a leaf of the graph:
      linear layers, embeddings, experts. Layers behind the last block, such as the unembedding, stay in the graph.
      Modules around an attention module are left whole, whatever weights they hold themselves. A result of another
      width than the residual stream is a constant: it mixes or scales what the stream holds, and adds nothing to it.
    - A norm divides by its size of this run, a constant, so it is linear in its input: a module, a function of
      `torch.nn.functional`, or a size computed by hand.
    - A gate, a sigmoid or a softmax, has its value of this run.
    - Other functions stay as they are. `bends` names those that the gradient went through and that are not linear.

    `before`: a run on the same inputs. `now`: the calls of the run with these hooks.
    """

    def __init__(self, model: nn.Module, before: First, now: Recording) -> None:
        self.model, self.before, self.now = model, before, now
        names = {call.name for call in before.seen.calls}
        self.around = {"", *(name[:end] for name in names for end, letter in enumerate(name) if letter == ".")}
        modules = dict(model.named_modules())
        self.blocks, self.told = _blocks(modules, names, before.last)
        writers = [one for call in before.seen.calls if call.origin is not None for one in call.origin.writers]
        self.widths = {one.out for one in writers} | ({before.width} if before.width else set())
        self.adapted = {id(one.source.module) for one in writers if isinstance(one.source, CalledLayer)}
        self.written: list[Written] = []
        self._found: set[int] = set()  # the numbers of calls whose heads a layer was given
        self._functions = _Functions()
        self.bends = self._functions.bends
        self._running: dict[int, tuple[bool, int | None]] = {}  # by module: whether it is cut, and its call

    @contextmanager
    def hooked(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                kind, adapted = kind_of(module), id(module) in self.adapted
                matrices = [one for one in parts_of(module)[0].values() if one is not None and one.ndim >= 2]
                if kind is Norm:
                    stack.callback(module.register_forward_hook(_here(self._linear(name))).remove)
                elif kind is None and "Norm" in type(module).__name__ and not any(module.children()):
                    stack.callback(module.register_forward_hook(_here(self._unknown(name))).remove)
                elif name not in self.around and (matrices or adapted):
                    before, after = map(_here, self._cut(name, kind is Linear or adapted))
                    # before the caller's hooks, which are a part of the layer
                    stack.callback(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
                    stack.callback(module.register_forward_hook(after).remove)
            stack.enter_context(self._functions)
            yield

    def before_cap(self, logits: Tensor) -> Tensor | None:
        """The logits c · x of a model that ends in a softcap, c · tanh(x); None where these logits are something else.

        The numbers say whether the last tanh of the run is one, and tell c.
        """
        if self._functions.tanh is None:
            return None
        given, capped = self._functions.tanh
        if capped.shape != logits.shape:
            return None
        ends = [at_position(one.detach(), -1).double() for one in (capped, logits)]
        cap = (ends[0] * ends[1]).sum() / ends[0].square().sum()
        coarsest = max((capped.dtype, logits.dtype), key=lambda dtype: torch.finfo(dtype).eps)
        return cap.to(logits.dtype) * given if near(cap * ends[0], ends[1], coarsest) else None

    def _call_of(self, x: Tensor) -> int | None:
        """The number of the call whose heads a layer is given now; None where it is given other numbers."""
        for number in range(len(self.now.calls) - 1, -1, -1):
            outcome = None if number in self._found else self.now.calls[number].outcome
            if outcome is not None and outcome.output is not None and given_heads(x, outcome.output):
                self._found.add(number)
                return number
        return None

    def _behind(self, name: str) -> bool:
        """Whether a module runs behind the last block, so that its input is the residual stream."""
        if len(self.now.calls) < len(self.before.seen.calls) or any(_within(name, block) for block in self.blocks):
            return False
        return self.told or name == self.before.last  # names without numbers do not show where a block ends

    def _cut(self, name: str, linear: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The hooks that run before and after a module with weights. `linear`: whether it may write heads."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            number = None
            if linear and len(args) == 1 and isinstance(args[0], Tensor):
                number = self._call_of(args[0])
            cut = number is not None or not self._behind(name)
            self._running[id(module)] = cut, number
            return tree_map_only(Tensor, Tensor.detach, (args, kwargs)) if cut else None

        def after(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
            cut, number = self._running.pop(id(module))

            def leaf(one: Tensor) -> Tensor:
                if not one.is_floating_point():
                    return one
                if self.widths and (one.ndim == 0 or one.shape[-1] not in self.widths):
                    return one.detach()
                own = one.detach().requires_grad_()
                self.written.append(Written(name, own, number))
                return own.clone()  # the model may write to it

            return tree_map_only(Tensor, leaf, result) if cut else None

        return before, after

    @staticmethod
    def _linear(name: str) -> Callable[..., Any]:
        """The hook that makes a norm linear in its input."""

        def after(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
            if len(args) != 1 or not isinstance(args[0], Tensor) or not args[0].requires_grad:
                return None
            norm = layer_of(module) or CalledLayer(Norm, module, args[0], result).read(name)
            assert isinstance(norm, Norm)
            linear = _linearized(norm, args[0], result)
            return _refused(name, module, result) if linear is None else linear

        return after

    @staticmethod
    def _unknown(name: str) -> Callable[..., Any]:
        """The hook of a norm of another kind, which is an error where it stands in the residual stream."""

        def after(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
            return _refused(name, module, result) if isinstance(result, Tensor) else None

        return after


class _Functions(TorchFunctionMode):
    """Takes the gradient from sizes and gates, and makes the norms of `torch.nn.functional` linear.

    `bends`: the names of other functions that the gradient went through. `tanh`: the input and the result of the last
    one with a gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bends: list[str] = []
        self.tanh: tuple[Tensor, Tensor] | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in SIZES or func in GATES or (func in POWERS and _root(*args, **kwargs)):
            return result.detach()
        if func in NORMS and isinstance(result, Tensor) and result.requires_grad:
            given, weight, bias = (args[0] if args else kwargs["input"]), None, None
            if func is not F.normalize:
                weight, bias = ((args[n] if len(args) > n else kwargs.get(s)) for n, s in ((2, "weight"), (3, "bias")))
            norm = Norm(weight, bias if NORMS[func] else None, 0.0, NORMS[func])
            linear = _linearized(norm, given, result)
            return result if linear is None else linear
        if func in BENDS and isinstance(result, Tensor) and result.requires_grad:
            result.register_hook(lambda grad: self.bends.append(func.__name__))  # type: ignore[no-untyped-call]
            if func in TANH:
                self.tanh = (args[0] if args else kwargs["input"]), result
        return result


def _root(base: Any, exponent: Any = None, **_: Any) -> bool:
    """Whether a power is a root or a quotient, as of a norm's size."""
    return isinstance(exponent, int | float) and (exponent < 0 or 0 < exponent < 1)


def _linearized(norm: Norm, given: Tensor, result: Tensor) -> Tensor | None:
    """A norm's result, linear in its input at its size of this run; None where the layer computes something else.

    Gemma's norms learn the factor less 1, and T5's layer norm takes no mean away: the numbers say which it is. So they
    do where the layer does not tell its ε.
    """
    x, wanted = given.detach().double(), result.detach().double()
    weight = x.new_ones(()) if norm.weight is None else norm.weight.detach().to(x)
    factors = [weight] if norm.weight is None else [weight, 1.0 + weight]
    shift = 0.0 if norm.bias is None else norm.bias.detach().to(x)
    for centred in (norm.centred, not norm.centred):
        inner = x - x.mean(-1, keepdim=True) if centred else x
        size = (inner.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
        for factor in factors:
            direction = inner * factor
            told = (direction * (wanted - shift)).sum(-1, keepdim=True)
            told = told / direction.square().sum(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
            for scale in (size, told) if norm.eps else (told,):
                if near(direction * scale + shift, wanted, result.dtype):
                    moved = given - given.mean(-1, keepdim=True) if centred else given
                    through = moved * (scale * factor).to(given.dtype)
                    return result.detach() + (through - through.detach())
    return None


def _refused(name: str, module: nn.Module, result: Tensor) -> Tensor:
    """The same result, where a gradient that reaches it, through the residual stream, is an error."""

    def reached(grad: Tensor) -> None:
        raise UnsupportedError(
            f"{name} is a {type(module).__name__} in the residual stream, no layer norm or RMS norm with its weights."
        )

    if not result.requires_grad:
        return result
    result = result.view_as(result)
    result.register_hook(reached)  # type: ignore[no-untyped-call]
    return result


def _within(name: str, block: str) -> bool:
    return name == block or name.startswith(f"{block}.")


def _blocks(modules: dict[str, nn.Module], names: set[str], last: str) -> tuple[set[str], bool]:
    """The paths of the model's blocks, and whether numbers in the names of modules tell them.

    A block is on the path of a module of attention, and stands beside blocks of its own class; it ends with the first
    number in the path, unless that number is of a module around the whole model. `last`: the last linear layer.
    """
    found, told = set(), True
    for name in names:
        parts = name.split(".") if name in modules else []
        paths = [".".join(parts[: n + 1]) for n in range(len(parts))]
        numbered = [path for path, part in zip(paths, parts, strict=True) if part.isdecimal()]
        told = told and bool(numbered)
        for path in numbered or paths:
            around = path.rpartition(".")[0]
            alike = {
                other
                for other, module in modules.items()
                if other and other.rpartition(".")[0] == around and type(module) is type(modules[path])
            }
            if len(alike) > 1 or (numbered and not _within(last, path)):
                found |= alike
                break
        else:
            found |= set(numbered[:1])
    return found, told
