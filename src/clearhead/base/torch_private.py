"""Every private name of PyTorch's that clearhead uses: one table of its purposes, and of what happens without it.

A private name begins with `_`, or is reached through one that does; another version of PyTorch may not have it.
Each is looked up here once: when clearhead is imported, or, where that would import the compiler, when it is needed.
Where one is missing, a slower way stands in for it, or a function that raises an `UnsupportedError` where it is used.
The compiler follows some of these functions. So they are plain functions, and C functions are used without a wrapper.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.base.private import ABSENT, RAISES, Part, look, missing

PARTS: dict[str, Part] = {}


def _refusing(name: str) -> Callable[..., Any]:
    """A function that stands in for a missing name, and raises."""

    def refused(*args: Any, **given: Any) -> Any:
        raise missing(name, PARTS[name].serves, "PyTorch")

    return refused


def _part(name: str, serves: str, without: str = RAISES, instead: Any = ABSENT) -> Any:
    """The object of this name; where it is missing, `instead`, or a function that raises."""
    PARTS[name] = Part(serves, without)
    found = look(name)
    if found is not ABSENT:
        return found
    return _refusing(name) if instead is ABSENT else instead


def _there(name: str, serves: str, without: str) -> bool:
    """Whether something has this name, such as an attribute of every module."""
    PARTS[name] = Part(serves, without)
    return look(name) is not ABSENT


def _first_missing(serves: str, without: str, *names: str) -> str:
    """The first of these attributes that a module does not have, or ""."""
    every = [f"torch.nn.Module().{name}" for name in names]
    there = [_there(name, serves, without) for name in every]
    return "" if all(there) else every[there.index(False)]


def _later(name: str, serves: str, without: str) -> Callable[[], Any]:
    """A function that gives the object of this name, or None. The object's module is imported when it is asked for."""
    PARTS[name] = Part(serves, without)

    def found() -> Any:
        there = look(name)
        return None if there is ABSENT else there

    return found


# ---------------------------------------------------------------------------------------- the transforms of torch.func

_SEES = "to see whether torch.func.vmap, grad or jvp is at work"
_WHICH = "to see which transforms of torch.func are at work"
_stack = _part("torch._C._functorch.get_interpreter_stack", _WHICH, "an UnsupportedError inside a transform", None)
# the innermost transform, or None
interpreter: Callable[[], Any] = _part(
    "torch._C._functorch.peek_interpreter_stack", _SEES, "all of the stack is asked for", _stack or ABSENT
)
_kinds = [
    _part(f"torch._C._functorch.TransformType.{name}", _WHICH, "transforms are compared by their names", None)
    for name in ("Grad", "Jvp", "Vmap")
]
GRAD, JVP, VMAP = _kinds if all(kind is not None for kind in _kinds) else ("Grad", "Jvp", "Vmap")
_named = isinstance(GRAD, str)


def _of_no_transform() -> None:
    if interpreter() is not None:
        _refusing("torch._C._functorch.get_interpreter_stack")()


_interpreters: Callable[[], Any] = _stack or _of_no_transform


def transforms() -> list[Any]:
    """The kinds of the transforms of `torch.func` that are at work: `GRAD`, `JVP`, `VMAP`, …"""
    return [i.key().name if _named else i.key() for i in _interpreters() or ()]


def _wrapped_by_none(tensor: Tensor) -> bool:
    return interpreter() is not None and bool(_refusing("torch._C._functorch.is_functorch_wrapped_tensor")())


is_wrapped: Callable[[Tensor], bool] = _part(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "to see whether a transform of torch.func has wrapped a tensor",
    "an UnsupportedError inside a transform",
    _wrapped_by_none,
)
is_batched: Callable[[Tensor], bool] = _part(
    "torch._C._functorch.is_batchedtensor", "to see whether torch.func.vmap has hidden a dimension of a tensor"
)
get_unwrapped: Callable[[Tensor], Tensor] = _part(
    "torch._C._functorch.get_unwrapped", "to read a tensor below the transforms of torch.func"
)
without_transforms: Callable[[], Any] = _part(
    "torch._C._DisableFuncTorch", "to read values on the host inside a transform of torch.func"
)

# ------------------------------------------------------------ a batch of losses: torch.autograd.grad(is_grads_batched)

_LOSSES = "to compute the gradients of a batch of losses (is_grads_batched=True)"
_enter = _part("torch._C._vmapmode_increment_nesting", _LOSSES)
_leave = _part("torch._C._vmapmode_decrement_nesting", _LOSSES, RAISES, None)
remove_batch_dim: Callable[..., Tensor] = _part("torch._remove_batch_dim", _LOSSES)
add_batch_dim: Callable[..., Tensor] = _part("torch._add_batch_dim", _LOSSES)


def batches_of_losses() -> int:
    """How many batches of losses are around here."""
    if _leave is None:
        _refusing("torch._C._vmapmode_decrement_nesting")()
    level: int = _enter() - 1
    _leave()
    return level


def _of_no_batch(tensor: Tensor) -> bool:
    return batches_of_losses() > 0 and bool(_refusing("torch._C._functorch.is_legacy_batchedtensor")())


is_batch_of_losses: Callable[[Tensor], bool] = _part(
    "torch._C._functorch.is_legacy_batchedtensor", _LOSSES, "an UnsupportedError for a batch of losses", _of_no_batch
)

# ------------------------------------------------------------------------------------------- derivatives, forward mode


def _tried_level() -> int:
    zero = torch.zeros((), dtype=torch.float32, device="cpu")
    try:
        forward_ad.make_dual(zero, zero)  # type: ignore[no-untyped-call]
    except RuntimeError:  # there is no level
        return -1
    return 0


# the level of forward mode, -1 outside of it
dual_level: Callable[[], int] = (
    partial(getattr, forward_ad, "_current_level")
    if _there(
        "torch.autograd.forward_ad._current_level",
        "to see whether torch.autograd.forward_ad is at work",
        "a dual number is made, which fails outside of forward mode",
    )
    else _tried_level
)
_node = _part(
    "torch._C._current_autograd_node",
    "to see whether a backward pass runs, where the number of its task is missing",
    "nothing where the number of the task is there; else an UnsupportedError",
    None,
)


def _task_by_node() -> int:
    if _node is None:
        _refusing("torch._C._current_graph_task_id")()
    return -1 if _node() is None else 0


# the number of the backward pass that runs in this thread, or -1
backward_task: Callable[[], int] = _part(
    "torch._C._current_graph_task_id",
    "to see whether a backward pass repeats a call",
    "the operation that the backward pass computes now is asked for",
    _task_by_node,
)

# ------------------------------------------------------------------------------- what compiles, traces, casts, follows


def _autocast_of_any() -> bool:
    kinds = ("cpu", "cuda", "xpu", "mps")
    return any(torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) for kind in kinds)


def _traced_state() -> Any:
    return True if torch.jit.is_tracing() else None  # type: ignore[attr-defined, no-untyped-call]


any_autocast: Callable[[], bool] = _part(
    "torch._C._is_any_autocast_enabled",
    "to see whether torch.autocast is at work",
    "each kind of device that PyTorch itself names is asked",
    _autocast_of_any,
)
jit_state: Callable[[], Any] = _part(
    "torch._C._get_tracing_state",
    "to see whether torch.jit.trace is at work",
    "torch.jit.is_tracing() is asked",
    _traced_state,
)


class _Unknown:
    @staticmethod
    def try_get() -> Any:
        return True


TracingContext: Any = _part(
    "torch._guards.TracingContext",
    "to see whether this thread or another one compiles",
    "while one thread compiles, code in the others is taken for compiled too",
    _Unknown,
)


class _ByName(type):
    def __instancecheck__(cls, thing: Any) -> bool:
        return any(kind.__name__ == "FakeTensor" for kind in type(thing).__mro__)


class _Fake(metaclass=_ByName):
    pass


FakeTensor: Any = _part(
    "torch._subclasses.fake_tensor.FakeTensor",
    "to see whether a tensor has a shape alone",
    "a fake tensor is known by the name of its class",
    _Fake,
)
_modes = _part(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "to count the modes that follow operations, where their number is missing",
    "nothing where the number is there; else an UnsupportedError",
)


dispatch_modes: Callable[[], int] = _part(
    "torch._C._len_torch_dispatch_stack",
    "to see whether a mode follows each operation (make_fx, fake tensors)",
    "the modes are listed",
    lambda: len(_modes()),
)
_FOLLOWS = "to see whether fake tensors, make_fx or functionalization follow each operation"
_WITHIN = "an UnsupportedError inside a mode that follows operations"
_keys = [f"torch._C._TorchDispatchModeKey.{name}" for name in ("FAKE", "PROXY", "FUNCTIONAL")]
_tracers = [_part(name, _FOLLOWS, _WITHIN, None) for name in _keys]
_unknown = [name for name, key in zip(_keys, _tracers, strict=True) if key is None]
_mode_of = _part("torch._C._get_dispatch_mode", _FOLLOWS, _WITHIN)
if _unknown:
    _mode_of = _refusing(_unknown[0])


def fake_mode() -> Any:
    """The mode of fake tensors that is at work, or None. To be asked where a dispatch mode is at work."""
    return _mode_of(_tracers[0])


def tracing_modes() -> Iterator[Any]:
    """The modes that follow each operation, None for a mode that is not at work. To be asked as `fake_mode` is."""
    return (_mode_of(key) for key in _tracers)


function_modes: Callable[[], int] = _part(
    "torch._C._len_torch_function_stack",
    "to see whether a function mode may change what a function computes",
    "one is taken to be at work, so that results of mask functions are not kept",
    lambda: 1,
)

# -------------------------------------------------------------------------------------------------------- the compiler

# the callback that compiles the frames that this thread runs next; None in eager code. It is a C function, which the
# compiler cannot enter
compiler_here: Callable[[], Any] = _part(
    "torch._C._dynamo.eval_frame.get_eval_frame_callback", "to see whether a monitored model runs in compiled code"
)
_compile_with = _part(
    "torch._C._dynamo.eval_frame.set_eval_frame",
    "to run a function in eager code inside compiled code",
    "torch.compiler.disable is used, where the compiler has been imported",
    None,
)
cached_code: Callable[[Any], Any] = _part(
    "torch._C._dynamo.eval_frame._debug_get_cache_entry_list",
    "to see whether a model has been compiled before it is monitored",
)
assert_async: Callable[..., Any] = _part("torch._assert_async", "to check values in compiled code")
_skip_code = _later(
    "torch._dynamo.eval_frame.skip_code",
    "to keep a function mode from being compiled by itself",
    "compiled code inside a watched model may be chosen for another call",
)
_handlers = _later(
    "torch._dynamo.variables.torch.TorchInGraphFunctionVariable._get_handlers",
    "to have the compiler list PyTorch's functions before one is replaced",
    "compiled code inside a watched model may hide its calls",
)
PARTS["_dynamo_marked_constant"] = Part("to have a function's result compiled in", "compiled code pauses at it")
PARTS["_torchdynamo_disable"] = Part("to keep the compiler out of a function", "compiled code pauses inside it")
PARTS["_torchdynamo_disable_msg"] = Part("to say why the compiler is kept out", "PyTorch gives no reason")
_NOT_SEEN = "a model that is compiled so is not refused: its merged calls are missing from the record"
PARTS["_orig_mod"] = Part("to see that torch.compile(model) wraps a model", _NOT_SEEN)
PARTS["_torchdynamo_orig_callable"] = Part("to see that a module's forward is compiled", _NOT_SEEN)


def mark_constant(function: Any) -> None:
    """Have the compiler run the function while it compiles, and compile its result in."""
    function._dynamo_marked_constant = True


def mark_eager(function: Any, why: str) -> None:
    """Have the compiler leave the function out of its code."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = why


def run_eagerly(function: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """The result of a function, with nothing compiled that it calls."""
    if _compile_with is None:
        apart = torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function  # type: ignore[no-untyped-call]
        return apart(*args, **given)
    before = _compile_with(None)
    try:
        return function(*args, **given)
    finally:
        _compile_with(before)


def skip_code(code: Any) -> None:
    """Have the compiler leave this code out, and list PyTorch's functions now."""
    skip, handlers = _skip_code(), _handlers()
    if skip is not None:
        skip(code)
    if handlers is not None:
        handlers()


def wraps_compiled(module: nn.Module) -> bool:
    """Whether the module is the result of `torch.compile(model)`."""
    return "_orig_mod" in parts_of(module)[2]


compiled_call: Callable[[Any], Any] = (
    attrgetter("_compiled_call_impl")
    if _there("torch.nn.Module._compiled_call_impl", "to see whether model.compile() has compiled a module", RAISES)
    else _refusing("torch.nn.Module._compiled_call_impl")
)


def forward_is_compiled(module: nn.Module) -> bool:
    """Whether the module's own forward was given to `torch.compile`."""
    return hasattr(module.forward, "_torchdynamo_orig_callable")


# ------------------------------------------------------------------------------------------ contexts around operations

without_functions: Callable[[], AbstractContextManager[object]] = _part(
    "torch._C.DisableTorchFunction", "to hide operations of its own from function modes, such as that of a watch"
)
without_subclasses: Callable[[], AbstractContextManager[object]] = _part(
    "torch._C.DisableTorchFunctionSubclass",
    "to have PyTorch's functions take lazy weights as plain tensors",
    "the operations are hidden from function modes too",
    without_functions,
)
_IN_OPERATOR = "to differentiate inside a custom operator, where compiled code calls a part of one's own"
_dispatch_key = _part("torch._C.DispatchKey", _IN_OPERATOR, RAISES, None)
_included = _part("torch._C._dispatch_tls_local_include_set", _IN_OPERATOR)
_excluded = _part("torch._C._dispatch_tls_local_exclude_set", _IN_OPERATOR)
_forced = _part("torch._C._ForceDispatchKeyGuard", _IN_OPERATOR)


def dispatched_with_autograd() -> Any:
    """A context in which operations reach autograd, in the body of a custom operator."""
    if _dispatch_key is None:
        _refusing("torch._C.DispatchKey")()
    without = _excluded()
    without = without.remove(_dispatch_key.AutogradFunctionality).remove(_dispatch_key.ADInplaceOrView)
    return _forced(_included(), without)


function_mode_stack: Callable[[], list[Any]] = _part(
    "torch.overrides._get_current_function_mode_stack", "to watch a model whose layers ask for function modes"
)
pop_function_mode: Callable[[], Any] = _part(
    "torch.overrides._pop_mode_temporarily", "to watch a model whose layers ask for function modes"
)

# ----------------------------------------------------------------------------------------------- PyTorch's own kernels

# torch's own function: its name in torch.nn.functional may be a wrapper of another's
OWN_SDPA = _part(
    "torch._C._nn.scaled_dot_product_attention",
    "to know PyTorch's own attention, where its public name has been replaced",
    "the function of the public name when clearhead is imported",
    F.scaled_dot_product_attention,
)
_OWN_CODE, _UNTOLD = "to tell of attention that a module computes in its own code", "this attention goes unnoticed"


def _those_there(*names: str) -> list[Any]:
    """The objects of these names, without those that are missing."""
    return [one for name in names if (one := _part(name, _OWN_CODE, _UNTOLD, None)) is not None]


PRIVATE_SOFTMAX = _those_there("torch._softmax", "torch._safe_softmax")
SOFTMAX_OPERATIONS = _those_there("torch.ops.aten._softmax", "torch.ops.aten._safe_softmax")
# the operations that F.scaled_dot_product_attention calls inside
_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention", "attention_math")
FUSED_OPERATIONS = _those_there(*(f"torch.ops.aten._scaled_dot_product_{name}" for name in _KERNELS))
_TWICE = "to differentiate PyTorch's fused kernel on a CPU twice"
_ONCE = "PyTorch's plain operations compute what needs gradients there, with the whole matrix in memory"
flash = _part("torch._scaled_dot_product_flash_attention_for_cpu", _TWICE, _ONCE, None)
flash_backward = _part(
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default", _TWICE, _ONCE, None
)
_choice = _part("torch._fused_sdp_choice", _TWICE, _ONCE, None)
UNKNOWN = -1
# which of its kernels PyTorch would run: a number of torch.nn.attention.SDPBackend
fused_choice: Callable[..., int] = (
    _choice if None not in (_choice, flash, flash_backward) else lambda *args, **given: UNKNOWN
)
_FAST = "to record the fast path of torch.nn.MultiheadAttention and torch.nn.TransformerEncoderLayer"
_FAST_RAISES = "an UnsupportedError where such a layer runs in a watched model"
native_attention = _part("torch._native_multi_head_attention", _FAST, _FAST_RAISES, None)
encoder_layer = _part("torch._transformer_encoder_layer_fwd", _FAST, _FAST_RAISES, None)


def check_fast_path() -> None:
    """Raise where the fast path of PyTorch's own layers could not be seen."""
    if native_attention is None:
        _refusing("torch._native_multi_head_attention")()
    if encoder_layer is None:
        _refusing("torch._transformer_encoder_layer_fwd")()


_AMX = "to see whether PyTorch's kernel has matrix instructions (AMX)", "clearhead's own kernel is taken"
amx: dict[torch.dtype, Callable[[], bool]] = {
    torch.bfloat16: _part("torch.cpu._is_amx_tile_supported", *_AMX, bool),
    torch.float16: _part("torch.cpu._is_amx_fp16_supported", *_AMX, bool),
}

# ------------------------------------------------------------------------------------------------------------- tensors


def _without_memory(tensor: Tensor) -> bool:
    try:
        return tensor.numel() > 0 and not tensor.is_meta and tensor.data_ptr() == 0
    except RuntimeError:  # of a subclass, or inside a transform: no such zeros
        return False


is_zero_tensor: Callable[[Tensor], bool] = _part(
    "torch.Tensor._is_zerotensor",
    "to see whether a tensor is PyTorch's zeros without memory",
    "a tensor whose address is 0 is taken for one",
    _without_memory,
)
data_address: Callable[[Tensor], int] = _part(
    "torch._C._data_address", "to see whether a tensor was given other memory", "tensor.data_ptr()", Tensor.data_ptr
)


def _always(tensor: Tensor) -> bool:
    return True


# how often a tensor has been written to, where `uncounted` is False: in inference mode writes are not counted
version: Callable[[Tensor], int] = attrgetter("_version")
uncounted: Callable[[Tensor], bool] = (
    Tensor.is_inference
    if _there(
        "torch.Tensor._version",
        "to see whether a tensor has been written to",
        "all tensors are taken for tensors of inference mode: they are copied, or their results are not kept",
    )
    else _always
)
_has_base = _there(
    "torch.Tensor._base",
    "to see whether a tensor is a view of a parameter",
    "every tensor is taken for one, and copied where it is recorded",
)


def whole_of(tensor: Tensor) -> Tensor:
    """The tensor that this one is a view of, or itself."""
    if not _has_base:
        return nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu"))
    return tensor if tensor._base is None else tensor._base


wrapper_subclass: Callable[..., Any] = _part("torch.Tensor._make_wrapper_subclass", "to make lazy weights")
tree_map_only: Callable[..., Any] = _part(
    "torch.utils._pytree.tree_map_only", "to find lazy weights among the arguments of an operation"
)
PARTS["torch._ops.OpOverload._schema"] = Part("to see which arguments an operation on lazy weights writes to", RAISES)


def arguments_of(operation: Any) -> Any:
    """The arguments that an operation of PyTorch's is declared with."""
    schema = getattr(operation, "_schema", None)
    return _refusing("torch._ops.OpOverload._schema")() if schema is None else schema.arguments


def _sizes_of_rows(rows: Tensor) -> Tensor:
    return torch.tensor([tuple(row.shape) for row in rows.unbind()], device="cpu")


def _nested(padded: Tensor, inside: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor([row[keep] for row, keep in zip(padded, inside, strict=True)])


_NESTED = "to compute with the nested tensors that nn.TransformerEncoder makes"
nested_sizes: Callable[[Tensor], Tensor] = _part(
    "torch.Tensor._nested_tensor_size", _NESTED, "the rows are taken apart", _sizes_of_rows
)
nested_from_mask: Callable[[Tensor, Tensor], Tensor] = _part(
    "torch._nested_tensor_from_mask", _NESTED, "the rows are put together one by one", _nested
)

# ------------------------------------------------------------------------------------------------------------- modules

_HELD = "to read what a module holds, and to make a copy of it over other parameters"
_READ = "it is read by named_parameters() and the like, and a copy raises an UnsupportedError"
_held = _first_missing(_HELD, _READ, "_parameters", "_buffers", "_modules")
Held = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def parts_of(module: Any) -> Held:
    """The module's own parameters, buffers and modules, by their names."""
    if _held:
        own = {"recurse": False, "remove_duplicate": False}
        return dict(module.named_parameters(**own)), dict(module.named_buffers(**own)), dict(module.named_children())
    return module._parameters, module._buffers, module._modules


def put_parts(module: Any, held: Held) -> None:
    """Give a module other parameters, buffers and modules, which need not be of the types that it takes."""
    if _held:
        _refusing(_held)()
    module.__dict__.update(zip(("_parameters", "_buffers", "_modules"), held, strict=True))


_HOOKS = "to see whether hooks change what a layer computes"
_CALLED = "layers are called, and an UnsupportedError where one must not be"
_hooks = _first_missing(_HOOKS, _CALLED, "_forward_hooks", "_forward_pre_hooks")
_MARKS = "to take away the hooks of a model that shares its sequences out over ranks"
_marks = _first_missing(_MARKS, RAISES, "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")


def may_have_hooks(layer: Any) -> bool:
    """Whether a hook may see or change what a layer computes."""
    return bool(_hooks or layer._forward_hooks or layer._forward_pre_hooks)


def has_hooks(layer: Any) -> bool:
    """The same, for a layer that must not be called where it has hooks."""
    if _hooks:
        _refusing(_hooks)()
    return may_have_hooks(layer)


def remove_hooks(module: Any, ours: Callable[[Any], bool]) -> None:
    """Take away the forward hooks of a module for which `ours(hook)` is True."""
    if _hooks or _marks:
        _refusing(_hooks or _marks)()
    for hooks, marks in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_always_called),
    ):
        for number in [number for number, hook in hooks.items() if ours(hook)]:
            del hooks[number]
            marks.pop(number, None)


_call_there = _there("torch.nn.Module._call_impl", "to see which module of a watched model runs", RAISES)


def call_of_modules() -> str:
    """The name of the method of `nn.Module` that runs a module and its hooks."""
    if not _call_there:
        _refusing("torch.nn.Module._call_impl")()
    return "_call_impl"
