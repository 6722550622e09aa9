"""The numbers of a linear layer or a norm, found by calling its module.

A layer may compute more than its own weight says: an adapter or a hook adds to it, its weight is stored as integers, or
is fetched from elsewhere when the layer runs. Only a call of the module runs all of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from clearhead.base.arrays import accumulated
from clearhead.base.errors import ClearheadError, UnsupportedError
from clearhead.base.torch_state.contexts import without_autocast
from clearhead.base.torch_state.probing import probing
from clearhead.base.torch_state.tensor_kind import is_dtensor
from clearhead.base.torch_state.torch_private import has_hooks
from clearhead.explanation.modules.projection import Linear, Norm

BLOCK = 1024  # rows of the identity in one call
LARGE = 2.0**10  # beside numbers of this size a bias, or a norm's ε, costs few digits
TRIED = 8  # random rows with which a layer is compared with its weights
KEPT_WHOLE = "model.set_reshard_after_forward(False); model.set_reshard_after_backward(False)"
ROWS = 6  # of a run, whose results are compared


class CalledLayer:
    """A linear layer or a norm whose numbers are read by calling its module, when they are first needed.

    Args:
        kind: `Linear` or `Norm`.
        module: The module that ran.
        x: What the module was given, (..., in).
        result: What it returned, (..., out).
    """

    def __init__(self, kind: type[Linear] | type[Norm], module: nn.Module, x: Tensor, result: Tensor) -> None:
        self.kind, self.module = kind, module
        self.out, self.width = result.shape[-1], x.shape[-1]
        self.given, self.gave = few_rows(x), few_rows(result)
        self.draws = any(part.training for part in module.modules())  # dropout may have changed the result
        self._read: Linear | Norm | None = None

    def read(self, name: str) -> Linear | Norm:
        """The layer. Raises an `UnsupportedError` where the module computes something else. `name`: for messages."""
        if self._read is None:
            check_whole(self.module, name)
            with _called(self.module, self.given):
                self._read = self._norm(name) if self.kind is Norm else self._linear(name)
        return self._read

    def _linear(self, name: str) -> Linear:
        bias = self._call(self._rows(1, 0), name)[0]
        scale = LARGE if bool(bias.any()) else 1.0
        weight = bias.new_empty(self.out, self.width)
        exact = accumulated(bias.dtype)
        for start in range(0, self.width, BLOCK):
            rows = self._rows(min(BLOCK, self.width - start), start, scale)
            weight[:, start : start + len(rows)] = ((self._call(rows, name).to(exact) - bias.to(exact)) / scale).T
        found = Linear(weight, bias if scale != 1.0 else None)
        generator = torch.Generator("cpu").manual_seed(0)
        rows = torch.randn(TRIED, self.width, generator=generator, dtype=torch.float64, device="cpu")
        rows = rows.to(self._rows(1, 0))
        if not _agree(found, rows, self._call(rows, name)):
            raise UnsupportedError(
                f"{name}, a {_described(self.module)}, gives no linear function of its input: its results on the rows "
                "of the identity do not add up to those on other rows. It may round its input, as int8 activations "
                "are, or draw numbers."
            )
        if not self.draws and not _agree(found, self.given, self.gave):
            raise ClearheadError(
                f"{name}, a {_described(self.module)}, gives other numbers now than in the run that was recorded. "
                "Read the recording before an adapter, a hook or a weight changes."
            )
        return found

    def _norm(self, name: str) -> Norm:
        """The factor and the shift of a norm, from vectors whose mean is 0 and whose mean square is large."""
        row = torch.ones(self.width, dtype=torch.float64, device="cpu")
        row[1::2] = -1.0
        row -= row.mean()
        row *= LARGE / row.square().mean().sqrt()
        plus, minus = self._call(torch.stack([row, -row]).to(self._rows(1, 0)), name).to(row)
        weight, shift = (plus - minus) / 2 / (row / LARGE), (plus + minus) / 2
        return Norm(weight, shift if bool(shift.any()) else None, 0.0, isinstance(self.module, nn.LayerNorm))

    def _rows(self, count: int, start: int, scale: float = 0.0) -> Tensor:
        """Rows of the identity, times `scale`, as the module takes them."""
        tensors = (*self.module.parameters(), *self.module.buffers())
        dtype = next((t.dtype for t in tensors if t.is_floating_point()), self.given.dtype)
        rows = torch.zeros(count, self.width, dtype=dtype, device=self.given.device)
        rows.diagonal(start).fill_(scale)
        return rows

    def _call(self, rows: Tensor, name: str) -> Tensor:
        """The module's results on these rows, (n, out)."""
        try:
            found: Tensor = self.module(rows.unsqueeze(0))[0]
        except Exception as error:
            raise UnsupportedError(
                f"{name}, a {_described(self.module)}, cannot be called on the rows of the identity, "
                f"{tuple(rows.shape)}, to read what it computes: {type(error).__name__}: {error}"
            ) from error
        return found


def few_rows(x: Tensor) -> Tensor:
    """A copy of a few of the vectors of a tensor (..., width), evenly spaced, from the first on."""
    flat = x.detach().flatten(0, -2)
    return flat[:: max(1, (len(flat) - 1) // (ROWS - 1))].clone()


def check_whole(module: nn.Module, name: str) -> None:
    """Raise for a layer that one rank cannot call alone."""
    if any(is_dtensor(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise UnsupportedError(
            f"{name} has only this rank's part of its weights, which are sharded (DTensor), so they are not read.\n"
            f"With fully_shard keep them whole after a run: {KEPT_WHOLE}."
        )
    alone = not torch.distributed.is_available() or not torch.distributed.is_initialized()
    if not alone and torch.distributed.get_world_size() > 1 and any(map(has_hooks, module.modules())):
        raise UnsupportedError(
            f"{name} has hooks, which may wait for the other ranks when it is called, as those of tensor parallelism "
            "do. So its weights are not read."
        )


def _agree(layer: Linear, rows: Tensor, results: Tensor) -> bool:
    """Whether these results are the layer's on these rows, up to roundings in the coarser dtype of the two."""
    exact = rows.to(accumulated(rows.dtype))
    layer = layer.to(exact)
    found = torch.nn.functional.linear(exact, layer.weight, layer.bias)
    terms = torch.nn.functional.linear(exact.square(), layer.weight.square()).sqrt()
    bound = max(1e-4, *(8 * torch.finfo(t.dtype).eps for t in (rows, results)))
    size = torch.maximum(found.abs(), terms).amax(-1, keepdim=True)
    return found.shape == results.shape and bool(((found - results.to(found)).abs() <= bound * size).all())


def _described(module: nn.Module) -> str:
    """The module's class, and the file of it where it is not PyTorch's: other libraries have a `Linear` too. With the
    class of a weight that is one of its own."""
    kind = type(module)
    name = kind.__name__ if kind.__module__.startswith("torch.nn.") else f"{kind.__module__}.{kind.__name__}"
    weight = next((t for t in module.parameters() if type(t) not in (Tensor, nn.Parameter)), None)
    return name + ("" if weight is None else f" with a weight of class {type(weight).__name__}")


@contextmanager
def _called(module: nn.Module, like: Tensor) -> Iterator[None]:
    """A context in which the module is called for its numbers alone: without gradients, dropout and autocast, seen by
    no watch; random numbers are drawn as before afterwards."""
    devices = [like.device] if like.device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(probing())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(without_autocast(like.device))
        for part in [part for part in module.modules() if part.training]:
            part.training = False
            stack.callback(setattr, part, "training", True)
        yield
