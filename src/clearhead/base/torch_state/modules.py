"""What modules of PyTorch's need: their hooks, copies, and the values of their parameters.

Hooks are for scores and biases, which are read without a call. The values that parameters were given are for
`reset_parameters`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from clearhead.base.errors import ClearheadError, UnsupportedError
from clearhead.base.managers import caller
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.tensor_kind import has_own_dispatch, is_dtensor, is_readable
from clearhead.base.torch_state.torch_private import drop_hooks, hooks_of, is_hooked, parts_of, put_parts

Module = TypeVar("Module", bound=nn.Module)
Change = Callable[[Tensor], Tensor]
Values = tuple[float, ...]


def values_of(tensor: Tensor) -> Values | None:
    """Its numbers, in order; None where they can't be read."""
    known = is_readable(tensor) and not has_own_dispatch(tensor)
    return tuple(tensor.detach().flatten().tolist()) if known else None


def set_again(name: str, tensor: Tensor, values: Values | None) -> None:
    """Write the numbers of `values_of` to a tensor of as many numbers."""
    if values is None or len(values) != tensor.numel():
        was = "without values (meta)" if values is None else f"with {len(values)} numbers"
        raise ClearheadError(
            f"reset_parameters: {name}, shape {tuple(tensor.shape)}, was given {was}, so nothing says what it is "
            f"to be.\nLoad a state dict in place of it, or pass a {name} that was made outside of torch.device('meta')."
        )
    numbers = torch.tensor(values, dtype=tensor.dtype, device=tensor.device).reshape(tensor.shape)
    if is_dtensor(tensor):
        from torch.distributed.tensor import distribute_tensor

        numbers = distribute_tensor(numbers, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    with torch.no_grad():
        tensor.copy_(numbers)


def with_parameters(
    module: Module, change: Callable[[nn.Parameter], Tensor], buffer: Change = lambda b: b, every: bool = False
) -> Module:
    """A copy of a module over other parameters and buffers; without `every`, the module itself where it has none. The
    module is not touched: other threads may be calling it."""
    if not (every or any(parts_of(module))):
        return module
    copied = module.__new__(type(module))
    copied.__dict__ = module.__dict__.copy()
    parameters, buffers, modules = parts_of(module)
    inside = (
        {name: None if p is None else change(p) for name, p in parameters.items()},
        {name: None if b is None else buffer(b) for name, b in buffers.items()},
        {name: None if m is None else with_parameters(m, change, buffer, every) for name, m in modules.items()},
    )
    put_parts(copied, inside)
    return copied


def after_hooks(module: Module, *inputs: Any) -> Module:
    """A score or a bias as its forward pre-hooks leave it; they are run once, here, since nothing calls the module.

    Where it has hooks the result is a copy without them, so that a later call, whose hooks put other tensors in place,
    does not change what this call still reads.
    """
    if not is_hooked(module):
        return module
    before, of_output = hooks_of(module)
    name = type(module).__name__
    had = None if get_mode().compiled else dict(vars(module))  # the compiler would take in what the hooks replace
    for hook, keywords in before:
        if (hook(module, inputs, {}) if keywords else hook(module, inputs)) is not None:
            raise UnsupportedError(
                f"a forward pre-hook of {name} gave other inputs. The hook is run before attention() reads the module, "
                "so that it can set weights, and what it returns has no use: let it return None.\nChange query and key "
                "before the call."
            )
    if of_output and not get_mode().compiled:
        caller().warn(
            f"{name} has a forward hook or a backward hook, which is not run: attention() reads a score or a bias part "
            "by part, and no output of the whole exists. Forward pre-hooks are run. To see weights call "
            "clearhead.weights(query, key, score=score); to change scores pass score=score.then(function)."
        )
    made = None if had is None else {name for name, value in vars(module).items() if value is not had.get(name)}
    return settled(module, made)


def settled(module: Module, names: set[str] | None = None, inside: bool = False) -> Module:
    """A copy of a module with hooks, without them: the tensors that they have set are parameters of the copy.

    So they are in another dtype where its parameters are. `names`: these tensors; None: all attributes that are
    floating-point tensors. `inside`: whether the hooks of modules inside are taken away too. The module itself where
    it has no hooks.
    """
    if not (any(map(is_hooked, module.modules())) if inside else is_hooked(module)):
        return module
    copied = with_parameters(module, lambda p: p, every=True)
    for one in [*copied.modules()] if inside else [copied]:
        if is_hooked(one):
            _settle(one, names)
    return copied


def _settle(copied: nn.Module, names: set[str] | None) -> None:
    parameters, buffers, modules = parts_of(copied)
    of_hooks = {
        name: value
        for name, value in vars(copied).items()
        if isinstance(value, Tensor) and (value.is_floating_point() if names is None else name in names)
    }
    for name in of_hooks:
        del copied.__dict__[name]
    put_parts(copied, (parameters | of_hooks, buffers, modules))
    drop_hooks(copied)
