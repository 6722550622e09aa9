"""Private names of PyTorch's that clearhead uses, with their purposes, and what happens without each.

A private name begins with `_`, or is reached through one that does; another version of PyTorch may not have it. These
are of the compiler, kernels, tensors and modules; `torch_state.py` has the names that say what is at work.
Each is looked up once: when clearhead is imported, or, where that would import the compiler, when it is needed.
Where one is missing, a slower way stands in for it, or a function that raises an `UnsupportedError` where it is used.
The compiler follows some of these functions. So they are plain functions, and C functions are used without a wrapper.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.base.private import PARTS, RAISES, Part, first_missing, later, part, refusing, there

# -------------------------------------------------------------------------------------------------------- the compiler

# the callback that compiles the frames that this thread runs next; None in eager code. It is a C function, which the
# compiler cannot enter
compiler_here: Callable[[], Any] = part(
    "torch._C._dynamo.eval_frame.get_eval_frame_callback", "to see whether a monitored model runs in compiled code"
)
_compile_with = part(
    "torch._C._dynamo.eval_frame.set_eval_frame",
    "to run a function in eager code inside compiled code",
    "torch.compiler.disable is used, where the compiler has been imported",
    None,
)
cached_code: Callable[[Any], Any] = part(
    "torch._C._dynamo.eval_frame._debug_get_cache_entry_list",
    "to see whether a model has been compiled before it is monitored",
)
assert_async: Callable[..., Any] = part("torch._assert_async", "to check values in compiled code")
_skip_code = later(
    "torch._dynamo.eval_frame.skip_code",
    "to keep a function mode from being compiled by itself",
    "compiled code inside a watched model may be chosen for another call",
)
_handlers = later(
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
    return "_orig_mod" in (parts_of(module)[2] if _held else module._modules)


compiled_call: Callable[[Any], Any] = (
    attrgetter("_compiled_call_impl")
    if there("torch.nn.Module._compiled_call_impl", "to see whether model.compile() has compiled a module", RAISES)
    else refusing("torch.nn.Module._compiled_call_impl")
)


def forward_is_compiled(module: nn.Module) -> bool:
    """Whether the module's own forward was given to `torch.compile`."""
    return hasattr(module.forward, "_torchdynamo_orig_callable")


to_another_dtype = part(
    "torch.ops.aten._to_copy.default",
    "to let a caller's rule change a number's dtype inside FlexAttention's kernel",
    "such a rule is made in full",
    None,
)

# ------------------------------------------------------------------------------------------ contexts around operations

without_functions: Callable[[], AbstractContextManager[object]] = part(
    "torch._C.DisableTorchFunction", "to hide operations of its own from function modes, such as that of a watch"
)
without_subclasses: Callable[[], AbstractContextManager[object]] = part(
    "torch._C.DisableTorchFunctionSubclass",
    "to have PyTorch's functions take lazy weights as plain tensors",
    "the operations are hidden from function modes too",
    without_functions,
)
_IN_OPERATOR = "to differentiate inside a custom operator, where compiled code calls a part of one's own"
_dispatch_key = part("torch._C.DispatchKey", _IN_OPERATOR, RAISES, None)
_included = part("torch._C._dispatch_tls_local_include_set", _IN_OPERATOR)
_excluded = part("torch._C._dispatch_tls_local_exclude_set", _IN_OPERATOR)
_forced = part("torch._C._ForceDispatchKeyGuard", _IN_OPERATOR)


def dispatched_with_autograd() -> Any:
    """A context in which operations reach autograd, in the body of a custom operator."""
    if _dispatch_key is None:
        refusing("torch._C.DispatchKey")()
    without = _excluded()
    without = without.remove(_dispatch_key.AutogradFunctionality).remove(_dispatch_key.ADInplaceOrView)
    return _forced(_included(), without)


function_mode_stack: Callable[[], list[Any]] = part(
    "torch.overrides._get_current_function_mode_stack", "to watch a model whose layers ask for function modes"
)
pop_function_mode: Callable[[], Any] = part(
    "torch.overrides._pop_mode_temporarily", "to watch a model whose layers ask for function modes"
)

# ----------------------------------------------------------------------------------------------- PyTorch's own kernels

# torch's own function: its name in torch.nn.functional may be a wrapper of another's
OWN_SDPA = part(
    "torch._C._nn.scaled_dot_product_attention",
    "to know PyTorch's own attention, where its public name has been replaced",
    "the function of the public name when clearhead is imported",
    F.scaled_dot_product_attention,
)
_OWN_CODE, _UNTOLD = "to tell of attention that a module computes in its own code", "this attention goes unnoticed"


def _those_there(*names: str) -> list[Any]:
    """The objects of these names, without those that are missing."""
    return [one for name in names if (one := part(name, _OWN_CODE, _UNTOLD, None)) is not None]


PRIVATE_SOFTMAX = _those_there("torch._softmax", "torch._safe_softmax")
SOFTMAX_OPERATIONS = _those_there("torch.ops.aten._softmax", "torch.ops.aten._safe_softmax")
# the operations that F.scaled_dot_product_attention calls inside
_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention", "attention_math")
FUSED_OPERATIONS = _those_there(*(f"torch.ops.aten._scaled_dot_product_{name}" for name in _KERNELS))
_TWICE = "to differentiate PyTorch's fused kernel on a CPU twice"
_ONCE = "PyTorch's plain operations compute what needs gradients there, with the whole matrix in memory"
flash = part("torch._scaled_dot_product_flash_attention_for_cpu", _TWICE, _ONCE, None)
flash_backward = part(
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default", _TWICE, _ONCE, None
)
_choice = part("torch._fused_sdp_choice", _TWICE, _ONCE, None)
UNKNOWN = -1
# which of its kernels PyTorch would run: a number of torch.nn.attention.SDPBackend
fused_choice: Callable[..., int] = (
    _choice if None not in (_choice, flash, flash_backward) else lambda *args, **given: UNKNOWN
)
_FAST = "to record the fast path of torch.nn.MultiheadAttention and torch.nn.TransformerEncoderLayer"
_FAST_RAISES = "an UnsupportedError where such a layer runs in a watched model"
native_attention = part("torch._native_multi_head_attention", _FAST, _FAST_RAISES, None)
encoder_layer = part("torch._transformer_encoder_layer_fwd", _FAST, _FAST_RAISES, None)


def check_fast_path() -> None:
    """Raise where the fast path of PyTorch's own layers could not be seen."""
    if native_attention is None:
        refusing("torch._native_multi_head_attention")()
    if encoder_layer is None:
        refusing("torch._transformer_encoder_layer_fwd")()


_AMX = "to see whether PyTorch's kernel has matrix instructions (AMX)", "clearhead's own kernel is taken"
amx: dict[torch.dtype, Callable[[], bool]] = {
    torch.bfloat16: part("torch.cpu._is_amx_tile_supported", *_AMX, bool),
    torch.float16: part("torch.cpu._is_amx_fp16_supported", *_AMX, bool),
}

# ------------------------------------------------------------------------------------------------------------- tensors


def _without_memory(tensor: Tensor) -> bool:
    try:
        return tensor.numel() > 0 and not tensor.is_meta and tensor.data_ptr() == 0
    except RuntimeError:  # of a subclass, or inside a transform: no such zeros
        return False


is_zero_tensor: Callable[[Tensor], bool] = part(
    "torch.Tensor._is_zerotensor",
    "to see whether a tensor is PyTorch's zeros without memory",
    "a tensor whose address is 0 is taken for one",
    _without_memory,
)
data_address: Callable[[Tensor], int] = part(
    "torch._C._data_address", "to see whether a tensor was given other memory", "tensor.data_ptr()", Tensor.data_ptr
)


def _always(tensor: Tensor) -> bool:
    return True


# how often a tensor has been written to, where `uncounted` is False: in inference mode writes are not counted
version: Callable[[Tensor], int] = attrgetter("_version")
uncounted: Callable[[Tensor], bool] = (
    Tensor.is_inference
    if there(
        "torch.Tensor._version",
        "to see whether a tensor has been written to",
        "all tensors are taken for tensors of inference mode: they are copied, or their results are not kept",
    )
    else _always
)
_has_base = there(
    "torch.Tensor._base",
    "to see whether a tensor is a view of a parameter",
    "every tensor is taken for one, and copied where it is recorded",
)


def whole_of(tensor: Tensor) -> Tensor:
    """The tensor that this one is a view of, or itself."""
    if not _has_base:
        return nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu"))
    return tensor if tensor._base is None else tensor._base


wrapper_subclass: Callable[..., Any] = part("torch.Tensor._make_wrapper_subclass", "to make lazy weights")
tree_map_only: Callable[..., Any] = part(
    "torch.utils._pytree.tree_map_only",
    "to find lazy weights among the arguments of an operation, and tensors in what a model takes and gives",
)
PARTS["torch._ops.OpOverload._schema"] = Part("to see which arguments an operation on lazy weights writes to", RAISES)


def arguments_of(operation: Any) -> Any:
    """The arguments that an operation of PyTorch's is declared with."""
    schema = getattr(operation, "_schema", None)
    return refusing("torch._ops.OpOverload._schema")() if schema is None else schema.arguments


def _sizes_of_rows(rows: Tensor) -> Tensor:
    return torch.tensor([tuple(row.shape) for row in rows.unbind()], device="cpu")


nested_sizes: Callable[[Tensor], Tensor] = part(
    "torch.Tensor._nested_tensor_size",
    "to watch the nested tensors that nn.TransformerEncoder makes",
    "the rows are taken apart",
    _sizes_of_rows,
)
# ------------------------------------------------------------------------------------------------------------- modules

_HELD = "to read what a module holds, and to make a copy of it over other parameters"
_READ = "it is read by named_parameters() and the like, and a copy raises an UnsupportedError"
_held = first_missing(_HELD, _READ, "_parameters", "_buffers", "_modules")
Held = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
OF_MODULES = ("_parameters", "_buffers", "_modules")  # the attributes of a module that `parts_of` gives


def parts_of(module: Any) -> Held:
    """The module's own parameters, buffers and modules, by their names."""
    if _held:
        own = {"recurse": False, "remove_duplicate": False}
        return dict(module.named_parameters(**own)), dict(module.named_buffers(**own)), dict(module.named_children())
    return module._parameters, module._buffers, module._modules


def put_parts(module: Any, held: Held) -> None:
    """Give a module other parameters, buffers and modules, which need not be of the types that it takes."""
    if _held:
        refusing(_held)()
    module.__dict__.update(zip(OF_MODULES, held, strict=True))


convert: Callable[..., Any] = part(
    "torch.nn.Module._apply", "to convert a module that holds ALiBi's slopes, whose digits are kept"
)

_HOOKS = "to see whether hooks change what a layer computes"
_CALLED = "layers are called, and an UnsupportedError where one must not be"
_hooks = first_missing(_HOOKS, _CALLED, "_forward_hooks", "_forward_pre_hooks")
_MARKS = "to take away the hooks of a model that shares its sequences out over ranks"
_marks = first_missing(_MARKS, RAISES, "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")


def may_have_hooks(layer: Any) -> bool:
    """Whether a hook may see or change what a layer computes."""
    return bool(_hooks or layer._forward_hooks or layer._forward_pre_hooks)


def has_hooks(layer: Any) -> bool:
    """Whether a layer that must not be called has hooks."""
    if _hooks:
        refusing(_hooks)()
    return may_have_hooks(layer)


_BEFORE = "to run the forward pre-hooks of a score or a bias, which is read without a call"
_LEARNT = "an UnsupportedError where one with parameters is used"
_before = first_missing(_BEFORE, _LEARNT, "_forward_pre_hooks_with_kwargs", "_backward_hooks")


def is_hooked(module: Any) -> bool:
    """Whether a module that is read without a call has hooks, as far as PyTorch tells."""
    if _hooks or _before:
        return next(module.parameters(), None) is not None  # without parameters, hooks have nothing to put in place
    return bool(module._forward_pre_hooks or module._forward_hooks or module._backward_hooks)


def hooks_of(module: Any) -> tuple[list[tuple[Any, bool]], bool]:
    """The forward pre-hooks of a module, each with whether it takes keywords; and whether its output has hooks."""
    if _hooks or _before:
        refusing(_hooks or _before)()
    marks = module._forward_pre_hooks_with_kwargs
    before = [(hook, number in marks) for number, hook in module._forward_pre_hooks.items()]
    return before, bool(module._forward_hooks or module._backward_hooks)


def drop_hooks(copied: Any) -> None:
    """Take away the hooks of a copy whose dicts of hooks are those of the module itself."""
    every = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
    copied.__dict__.update((name, OrderedDict()) for name in every)


def remove_hooks(module: Any, ours: Callable[[Any], bool]) -> None:
    """Take away the forward hooks of a module for which `ours(hook)` is True."""
    if _hooks or _marks:
        refusing(_hooks or _marks)()
    for hooks, marks in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_always_called),
    ):
        for number in [number for number, hook in hooks.items() if ours(hook)]:
            del hooks[number]
            marks.pop(number, None)


_call_there = there("torch.nn.Module._call_impl", "to see which module of a watched model runs", RAISES)


_generator_there = there(
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
    "to see what a checkpoint computes again after an edit has ended",
    "PyTorch's own error is raised there, which does not name the edit",
)


def generator_of_checkpoints() -> str:
    """The name of the generator in `torch.utils.checkpoint` around a function that runs again; "" without one."""
    return "_checkpoint_without_reentrant_generator" if _generator_there else ""


def call_of_modules() -> str:
    """The name of the method of `nn.Module` that runs a module and its hooks."""
    if not _call_there:
        refusing("torch.nn.Module._call_impl")()
    return "_call_impl"
