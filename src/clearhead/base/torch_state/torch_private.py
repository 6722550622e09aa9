"""Private names of PyTorch that clearhead uses, with their purposes: the compiler, kernels, tensors and modules.

`active.py` has the names of modes and transforms. The compiler traces some of these functions, so they are plain
functions, and C functions are used without a wrapper.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.torch_state.private import MissingName, find_private, find_private_later, requires

# -------------------------------------------------------------------------------------------------------- the compiler

_COMPILER = "to see what torch.compile compiles, and to leave functions out of it"
# the callback that compiles the frames that this thread runs next; None in eager code. It is a C function, which the
# compiler cannot enter
compiler_here: Callable[[], Any] = find_private("torch._C._dynamo.eval_frame.get_eval_frame_callback", _COMPILER)
_compile_with = find_private("torch._C._dynamo.eval_frame.set_eval_frame", _COMPILER)
cached_code: Callable[[Any], Any] = find_private("torch._C._dynamo.eval_frame._debug_get_cache_entry_list", _COMPILER)
assert_async: Callable[..., Any] = find_private("torch._assert_async", "to check values in compiled code")
_skip_code = find_private_later("torch._dynamo.eval_frame.skip_code", _COMPILER)
_handlers = find_private_later("torch._dynamo.variables.torch.TorchInGraphFunctionVariable._get_handlers", _COMPILER)


def mark_constant(function: Any) -> None:
    """Have the compiler run the function while it compiles, and compile its result in."""
    function._dynamo_marked_constant = True


def mark_eager(function: Any, why: str) -> None:
    """Have the compiler leave the function out of its code."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = why


def run_eagerly(function: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """The result of a function, with nothing compiled that it calls."""
    before = _compile_with(None)
    try:
        return function(*args, **given)
    finally:
        _compile_with(before)


def skip_code(code: Any) -> None:
    """Have the compiler leave this code out, and list PyTorch's functions now."""
    _skip_code()(code)
    _handlers()()


def wraps_compiled(module: nn.Module) -> bool:
    """Whether the module is the result of `torch.compile(model)`."""
    return "_orig_mod" in parts_of(module)[2]


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile(module)` has wrapped; any other module itself."""
    return parts_of(module)[2].get("_orig_mod") or module


compiled_call: Callable[[Any], Any] = requires(_COMPILER, "torch.nn.Module._compiled_call_impl")(
    attrgetter("_compiled_call_impl")
)


def forward_is_compiled(module: nn.Module) -> bool:
    """Whether the module's own forward was given to `torch.compile`."""
    return hasattr(module.forward, "_torchdynamo_orig_callable")


to_another_dtype = find_private("torch.ops.aten._to_copy.default", "to change a dtype inside FlexAttention's kernel")

# ------------------------------------------------------------------------------------------ contexts around operations

_MODES = "to hide operations of its own, and lazy weights, from modes and subclasses that follow functions"
without_functions: Callable[[], AbstractContextManager[object]] = find_private("torch._C.DisableTorchFunction", _MODES)
without_subclasses: Callable[[], AbstractContextManager[object]] = find_private(
    "torch._C.DisableTorchFunctionSubclass", _MODES
)
_IN_OPERATOR = "to differentiate inside a custom operator, where compiled code calls a user-defined part"
_autograd_key = find_private("torch._C.DispatchKey.AutogradFunctionality", _IN_OPERATOR)
_inplace_key = find_private("torch._C.DispatchKey.ADInplaceOrView", _IN_OPERATOR)
_included = find_private("torch._C._dispatch_tls_local_include_set", _IN_OPERATOR)
_excluded = find_private("torch._C._dispatch_tls_local_exclude_set", _IN_OPERATOR)
_forced = find_private("torch._C._ForceDispatchKeyGuard", _IN_OPERATOR)


@requires(_IN_OPERATOR, "torch._C.DispatchKey.AutogradFunctionality", "torch._C.DispatchKey.ADInplaceOrView")
def dispatched_with_autograd() -> Any:
    """A context in which operations reach autograd, in the body of a custom operator."""
    return _forced(_included(), _excluded().remove(_autograd_key).remove(_inplace_key))


function_mode_stack: Callable[[], list[Any]] = find_private("torch.overrides._get_current_function_mode_stack", _MODES)
pop_function_mode: Callable[[], Any] = find_private("torch.overrides._pop_mode_temporarily", _MODES)

# ----------------------------------------------------------------------------------------------- PyTorch's own kernels

# torch's own function: its name in torch.nn.functional may be a wrapper of another's
_OWN_CODE = "to know PyTorch's own attention, and attention that a module computes in its own code"
OWN_SDPA = find_private("torch._C._nn.scaled_dot_product_attention", _OWN_CODE)
_SOFTMAX = ("torch._softmax", "torch._safe_softmax")
_ATEN_SOFTMAX = ("torch.ops.aten._softmax", "torch.ops.aten._safe_softmax")
_KERNELS = (  # F.scaled_dot_product_attention calls these
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "torch.ops.aten._scaled_dot_product_flash_attention",
    "torch.ops.aten._scaled_dot_product_efficient_attention",
    "torch.ops.aten._scaled_dot_product_cudnn_attention",
    "torch.ops.aten._scaled_dot_product_attention_math",
)


def _find_those_there(names: tuple[str, ...]) -> list[Any]:
    found = [find_private(name, _OWN_CODE) for name in names]
    return [one for one in found if not isinstance(one, MissingName)]


PRIVATE_SOFTMAX = _find_those_there(_SOFTMAX)
SOFTMAX_OPERATIONS = _find_those_there(_ATEN_SOFTMAX)
FUSED_OPERATIONS = _find_those_there(_KERNELS)
_TWICE = "to differentiate PyTorch's fused kernel on a CPU twice"
flash = find_private("torch._scaled_dot_product_flash_attention_for_cpu", _TWICE)
flash_backward = find_private("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default", _TWICE)
# which of its kernels PyTorch would run: a number of torch.nn.attention.SDPBackend
fused_choice: Callable[..., int] = find_private("torch._fused_sdp_choice", _TWICE)
_FAST = "to record the fast path of torch.nn.MultiheadAttention and torch.nn.TransformerEncoderLayer"
native_attention = find_private("torch._native_multi_head_attention", _FAST)
encoder_layer = find_private("torch._transformer_encoder_layer_fwd", _FAST)


@requires(_FAST, "torch._native_multi_head_attention", "torch._transformer_encoder_layer_fwd")
@requires(_OWN_CODE, *_SOFTMAX, *_ATEN_SOFTMAX, *_KERNELS)
def validate_intercepted() -> None:
    """Raise if a function of PyTorch that a watch intercepts is missing."""


_AMX = "to see whether PyTorch's kernel has matrix instructions (AMX)"
amx: dict[torch.dtype, Callable[[], bool]] = {
    torch.bfloat16: find_private("torch.cpu._is_amx_tile_supported", _AMX),
    torch.float16: find_private("torch.cpu._is_amx_fp16_supported", _AMX),
}

# ------------------------------------------------------------------------------------------------------------- tensors

_MEMORY = "to see where a tensor's memory is, and whether it has been written to"
is_zero_tensor: Callable[[Tensor], bool] = find_private("torch.Tensor._is_zerotensor", _MEMORY)
data_address: Callable[[Tensor], int] = find_private("torch._C._data_address", _MEMORY)
uncounted: Callable[[Tensor], bool] = Tensor.is_inference  # whether writes to a tensor are not counted
# how often a tensor has been written to
version: Callable[[Tensor], int] = requires(_MEMORY, "torch.Tensor._version")(attrgetter("_version"))


@requires(_MEMORY, "torch.Tensor._base")
def whole_of(tensor: Tensor) -> Tensor:
    """The tensor that this one is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


# of an operation in autograd's graph: later operations of a thread have larger numbers
order_of: Callable[[Any], int] = requires(_MEMORY, "torch.autograd.graph.Node._sequence_nr")(
    methodcaller("_sequence_nr")
)
_LAZY = "to make lazy weights, and to find them, and other tensors, in what functions take and give"
wrapper_subclass: Callable[..., Any] = find_private("torch.Tensor._make_wrapper_subclass", _LAZY)
tree_map_only: Callable[..., Any] = find_private("torch.utils._pytree.tree_map_only", _LAZY)
# those that an operation of PyTorch is declared with
arguments_of: Callable[[Any], Any] = requires(_LAZY, "torch.ops.aten.add.Tensor._schema")(
    attrgetter("_schema.arguments")
)

# ------------------------------------------------------------------------------------------------------------- modules

Held = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
OF_MODULES = ("_parameters", "_buffers", "_modules")  # the attributes of a module that `parts_of` gives
_MODULES = "to read what a module holds and which hooks it has, and to make a copy of it"
_of_held = requires(_MODULES, *(f"torch.nn.Module().{name}" for name in OF_MODULES))
_HOOKS = tuple(
    f"torch.nn.Module().{name}"
    for name in ("_forward_hooks", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks")
)
_of_hooks = requires(_MODULES, *_HOOKS)


@_of_held
def parts_of(module: Any) -> Held:
    """The module's own parameters, buffers and modules, by their names."""
    return module._parameters, module._buffers, module._modules


@_of_held
def put_parts(module: Any, held: Held) -> None:
    """Give a module other parameters, buffers and modules, which need not be of the types that it takes."""
    module.__dict__.update(zip(OF_MODULES, held, strict=True))


convert: Callable[..., Any] = find_private("torch.nn.Module._apply", _MODULES)


@_of_held
@_of_hooks
def read_linear(*layers: tuple[nn.Module, int]) -> list[tuple[Any, Any]]:
    """The weight and the bias of each linear layer, given with its width; none where a hook may change what a layer
    computes, or where another tensor stands for a parameter."""
    found: list[tuple[Any, Any]] = []
    for layer, _ in layers:
        if layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__:
            return []
        weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
        if type(weight) is not nn.Parameter or not (bias is None or type(bias) is nn.Parameter):
            return []
        found.append((weight, bias))
    return found


@_of_hooks
def has_hooks(layer: Any) -> bool:
    """Whether a hook, or a `forward` of the object's own, may see or change what a layer computes."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__)


@_of_hooks
def is_hooked(module: Any) -> bool:
    """Whether a module that is read without a call has hooks."""
    return bool(module._forward_pre_hooks or module._forward_hooks or module._backward_hooks)


@_of_hooks
def hooks_of(module: Any) -> tuple[list[tuple[Any, bool]], bool]:
    """The forward pre-hooks of a module, each with whether it takes keywords; and whether its output has hooks."""
    marks = module._forward_pre_hooks_with_kwargs
    before = [(hook, number in marks) for number, hook in module._forward_pre_hooks.items()]
    return before, bool(module._forward_hooks or module._backward_hooks)


def drop_hooks(copied: Any) -> None:
    """Take away the hooks of a copy whose dicts of hooks are those of the module itself."""
    every = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
    copied.__dict__.update((name, OrderedDict()) for name in every)


@requires(_MODULES, "torch.nn.Module()._forward_hooks_always_called")
def remove_hooks(module: Any, ours: Callable[[Any], bool]) -> None:
    """Take away the forward hooks of a module for which `ours(hook)` is True."""
    for hooks, marks in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_always_called),
    ):
        for number in [number for number, hook in hooks.items() if ours(hook)]:
            del hooks[number]
            marks.pop(number, None)


@requires("to see what a checkpoint repeats", "torch.utils.checkpoint._checkpoint_without_reentrant_generator")
def generator_of_checkpoints() -> str:
    """The name of the generator in `torch.utils.checkpoint` around a function that runs again."""
    name = "_checkpoint_without_reentrant_generator"
    since_2_15 = f"{name}_impl"  # `checkpoint` calls this one, and not the other
    return since_2_15 if hasattr(torch.utils.checkpoint, since_2_15) else name


@requires(_MODULES, "torch.nn.Module._call_impl")
def call_of_modules() -> str:
    """The name of the method of `nn.Module` that runs a module and its hooks."""
    return "_call_impl"
