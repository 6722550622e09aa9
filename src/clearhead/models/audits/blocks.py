"""The blocks of a model, recorded in one forward pass and run alone with other hidden states."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from clearhead.base.torch_state.versions import Versions
from clearhead.models.audits.audited_model import find_tensors, repeatable

HIDDEN = ("hidden_states", "x", "src", "tgt", "input", "inputs")
CACHES = (
    "cache",
    "past_key_values",
    "past_key_value",
    "cache_params",
    "layer_past",
)  # a second run would add its keys again


class Block:
    """One block of a model, with the inputs of its call: an element of a list of modules, such as a decoder layer.

    `hidden`: the hidden states that it was called with, (B, L, C). `name`: its name in the model.
    """

    def __init__(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> None:
        self.name, self.module, self._seed = name, module, seed
        self._args = args
        self._kwargs = {key: None if key in CACHES else value for key, value in kwargs.items()}
        self._key = _find_hidden(args, kwargs)
        self._versions = Versions([] if self._key is None else [("hidden", self.hidden)])

    @property
    def hidden(self) -> Tensor:
        found: Any = self._args[self._key] if isinstance(self._key, int) else self._kwargs[str(self._key)]
        assert isinstance(found, Tensor)
        return found

    @property
    def can_run(self) -> bool:
        """Whether hidden states were found, and the model has not written to them since."""
        if self._key is None or not self._versions.known:  # writes to tensors of inference mode are not counted
            return False
        return self._versions.changed([("hidden", self.hidden)]) is None

    def run_from_leaf(self) -> tuple[Tensor, Tensor]:
        """A leaf that requires grad, the hidden states, and the block's output."""
        leaf = self.hidden.detach().clone().requires_grad_()
        return leaf, self.run(leaf)

    def run(self, hidden: Tensor) -> Tensor:
        """The block's output for other hidden states, (B, L, C)."""
        args, kwargs = list(self._args), dict(self._kwargs)
        if isinstance(self._key, int):
            args[self._key] = hidden.clone()  # a block may write to its input
        else:
            kwargs[str(self._key)] = hidden.clone()
        with repeatable(self.module, self._seed):
            result = self.module(*args, **kwargs)
        for tensor in find_tensors(result):
            if tensor.shape == hidden.shape:
                return tensor
        raise LookupError(f"{self.name} returns no tensor of the shape of its input, {tuple(hidden.shape)}")


def _find_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str | None:
    """Where the hidden states are: the number of an argument, or a keyword."""

    def fits(value: Any) -> bool:
        return isinstance(value, Tensor) and not value.is_nested and value.is_floating_point() and value.ndim == 3

    for number, value in enumerate(args):
        if fits(value):
            return number
    return next((name for name in HIDDEN if fits(kwargs.get(name))), None)


@contextmanager
def record_blocks(model: nn.Module, seed: int) -> Iterator[list[Block]]:
    """Record the outermost elements of lists of modules that are called inside the `with`, in the order of their calls.

    Their inputs are not copied. A block that is called several times is listed for each call.
    """
    names = {module: name for name, module in model.named_modules()}
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential))
    elements = dict.fromkeys(element for module in lists for element in module)
    found: list[Block] = []
    depth, thread = 0, threading.get_ident()

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal depth
        if threading.get_ident() != thread:  # another thread may run the model meanwhile
            return
        depth += 1
        if depth == 1:
            found.append(Block(names[module], module, args, dict(kwargs), seed))

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= threading.get_ident() == thread

    handles = [part.register_forward_pre_hook(enter, with_kwargs=True) for part in elements]
    handles += [part.register_forward_hook(leave, always_call=True) for part in elements]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def locate_change(block: Block, changed_hidden: Tensor, outputs: Tensor) -> tuple[str, tuple[int, ...] | None]:
    """The first module inside a block where outputs (bool (B, L)) differ that must not, and the heads that differ.

    The heads are known where the difference is first seen at the input of a projection that joins the heads.
    """
    base, other = (_run_traced(block, hidden) for hidden in (block.hidden, changed_hidden))
    before = "its input"
    for (name, module, is_input, one), (*_, two) in zip(base, other, strict=False):
        if one.shape == two.shape:
            differs = (one != two) & outputs[..., None].to(one.device)
            if bool(differs.any()):
                heads = _find_heads(block.module, name, module, differs) if is_input else None
                place = f"between {before} and the input of {name}" if is_input else f"in {name or 'the block'}"
                return place, heads
        before = f"the {'input' if is_input else 'output'} of {name or 'the block'}"
    return "", None


Traced = tuple[str, nn.Module, bool, Tensor]  # a module with its name, whether the tensor is its input, (B, L, C)


def _run_traced(block: Block, hidden: Tensor) -> list[Traced]:
    """The inputs of the innermost modules of a block, and the outputs of all, in the order of the computation."""
    names = {module: name for name, module in block.module.named_modules()}
    batch, length, _ = block.hidden.shape
    found: list[Traced] = []

    def keep(module: nn.Module, is_input: bool, values: Any) -> None:
        for tensor in find_tensors(values):
            by_position = _put_positions_second(tensor, batch, length)
            if by_position is not None:
                found.append((names[module], module, is_input, by_position.detach().clone()))
            return

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        if next(module.children(), None) is None:
            keep(module, True, args[:1])

    handles = [module.register_forward_pre_hook(enter) for module in names]
    handles += [module.register_forward_hook(lambda module, _, result: keep(module, False, result)) for module in names]
    try:
        block.run(hidden)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _put_positions_second(tensor: Tensor, batch: int, length: int) -> Tensor | None:
    """A tensor of a module with its positions second, (B, L, C); None where none of its dimensions is L."""
    if not tensor.is_floating_point() or tensor.ndim < 3 or tensor.shape[0] != batch:
        return None
    for dim in (1, 2):
        if tensor.shape[dim] == length:
            return tensor.transpose(1, dim).reshape(batch, length, -1)
    return None


def _find_heads(block: nn.Module, name: str, module: nn.Module, differs: Tensor) -> tuple[int, ...] | None:
    """The heads whose features differ at the input of a projection, by the width that the module around it names."""
    around = block.get_submodule(name.rpartition(".")[0])
    widths = ("head_dim", "attention_head_size", "d_head", "key_value_proj_dim")
    width = next((getattr(around, w) for w in widths if isinstance(getattr(around, w, None), int)), None)
    heads = next(
        (getattr(around, h) for h in ("num_heads", "n_heads", "n_head") if isinstance(getattr(around, h, None), int)),
        None,
    )
    features = differs.shape[-1]
    if width is None and heads and features % heads == 0:
        width = features // heads
    if not width or features % width:
        return None
    return tuple(differs.flatten(0, 1).any(0).view(-1, width).any(1).nonzero()[:, 0].tolist())
