"""How a problem is run in each of the surroundings of `table`: a function of (built, engine, loss) that gives what
was found, by the names that `attend` compares."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from fuzzing.build import Built

Results = dict[str, Any]
Run = Callable[[Built, "str | None", Tensor], Results]
NAMES = ("query", "key", "value")


def ordinary(built: Built, engine: str | None, loss: Tensor) -> Results:
    return with_gradients(built, built.attend(*built.inputs, engine), loss)


def with_gradients(built: Built, output: Tensor, loss: Tensor) -> Results:
    loss = loss if loss.dtype == output.dtype else loss.to(output.dtype)
    found = torch.autograd.grad(output, list(built.leaves.values()), loss, allow_unused=True)
    zeros = (torch.zeros_like(x, device="cpu") for x in built.leaves.values())
    named = zip(built.leaves, found, zeros, strict=True)
    return {"output": output} | {name: zero if g is None else g for name, g, zero in named}


def under(context: Callable[[Built], Any], run: Run = ordinary) -> Run:
    def inside(built: Built, engine: str | None, loss: Tensor) -> Results:
        with context(built):
            return run(built, engine, loss)

    return inside


def output_alone(built: Built, engine: str | None, loss: Tensor) -> Results:
    return {"output": built.attend(*built.inputs, engine)}


@contextmanager
def setting(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def default(dtype: torch.dtype) -> Any:
    return setting(torch.get_default_dtype, torch.set_default_dtype, dtype)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def threads(built: Built) -> Any:
    count = random.Random(built.spec.number).choice([1, 2, 3, 7])
    return setting(torch.get_num_threads, torch.set_num_threads, count)


def poisoned(built: Built) -> Any:
    return setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)


def from_threads(built: Built, engine: str | None, loss: Tensor) -> Results:
    """Eight calls at once; that of each thread is compared."""
    found: list[Any] = [None] * 8

    def one(i: int) -> None:
        try:
            found[i] = ordinary(built, engine, loss)
        except Exception as error:
            found[i] = error

    workers = [threading.Thread(target=one, args=(i,)) for i in range(len(found))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for one_found in found:
        if isinstance(one_found, Exception):
            raise one_found
    same = lambda a, b: torch.equal(a.nan_to_num(), b.nan_to_num())
    for other in found[1:]:  # with one number of threads, results are the same to the last digit
        assert all(same(a, b) for a, b in zip(found[0].values(), other.values(), strict=True)), "threads differ"
    return found[0]


def checkpointed(built: Built, engine: str | None, loss: Tensor) -> Results:
    output = checkpoint(lambda *x: built.attend(*x, engine), *built.inputs, use_reentrant=False)
    return with_gradients(built, output, loss)


def numpy(built: Built, engine: str | None, loss: Tensor) -> Results:
    """Arrays, one of them with negative strides."""
    arrays = [x.detach().numpy().copy() for x in built.inputs]
    arrays[0] = arrays[0][..., ::-1].copy()[..., ::-1]
    output = built.attend(*arrays, engine)
    assert isinstance(output, np.ndarray), f"arrays gave a {type(output).__name__}"
    return {"output": torch.from_numpy(output)}


def replaced(built: Built, inputs: list[Tensor]) -> None:
    built.inputs = [x.requires_grad_() for x in inputs]
    built.leaves |= dict(zip(NAMES, built.inputs, strict=True))


class Wrapped(Tensor):
    """A tensor that holds another one, as distributed and quantised tensors do; it has no memory of its own."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made = Tensor._make_wrapper_subclass(cls, inner.size(), strides=inner.stride(), dtype=inner.dtype)
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrap = lambda x: x.inner if isinstance(x, Wrapped) else x
        found = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        return tree_map(lambda x: Wrapped(x) if isinstance(x, Tensor) and not isinstance(x, Wrapped) else x, found)


class Plain(Tensor):
    """A subclass that changes nothing."""


def wrapped(built: Built, engine: str | None, loss: Tensor) -> Results:
    replaced(built, [Wrapped(x.detach()) for x in built.inputs])
    found = ordinary(built, engine, Wrapped(loss))
    return {name: x.detach().inner if isinstance(x, Wrapped) else x for name, x in found.items()}


def subclassed(built: Built, engine: str | None, loss: Tensor) -> Results:
    replaced(built, [x.detach().as_subclass(Plain) for x in built.inputs])
    return {name: x.as_subclass(Tensor) for name, x in ordinary(built, engine, loss).items()}


def zero_input(built: Built, engine: str | None, loss: Tensor) -> Results:
    """Those inputs that are zero, as PyTorch's own tensors without memory."""
    zero = lambda x: torch._efficientzerotensor(tuple(x.shape), dtype=x.dtype)
    replaced(built, [x.detach() if x.any() else zero(x) for x in built.inputs])
    return ordinary(built, engine, loss)


def zero_gradient(built: Built, engine: str | None, loss: Tensor) -> Results:
    output = built.attend(*built.inputs, engine)
    return with_gradients(built, output, torch._efficientzerotensor(tuple(output.shape), dtype=output.dtype))


def fake(built: Built, engine: str | None, loss: Tensor) -> Results:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = [mode.from_tensor(x.detach()) for x in built.inputs]
        output = built.attend(*inputs, engine)
    assert output.shape == loss.shape and output.dtype == built.inputs[0].dtype, "fake tensors: another shape or dtype"
    return {}


# Transforms ----------------------------------------------------------------------------------------------------------


def calls(built: Built, engine: str | None) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    return lambda *x: built.attend(*x, engine), tuple(x.detach() for x in built.inputs)


def func_grad(built: Built, engine: str | None, loss: Tensor) -> Results:
    f, x = calls(built, engine)
    found = torch.func.grad(lambda *x: (f(*x) * loss).sum(), argnums=(0, 1, 2))(*x)
    return dict(zip(NAMES, found, strict=True))


def func_vjp(built: Built, engine: str | None, loss: Tensor) -> Results:
    f, x = calls(built, engine)
    output, pull = torch.func.vjp(f, *x)
    return {"output": output} | dict(zip(NAMES, pull(loss.to(output.dtype)), strict=True))


def contracted(jacobians: Any, loss: Tensor) -> Results:
    """The gradients of a loss, from whole Jacobians."""
    flat = loss.double().flatten()
    sums = (torch.tensordot(flat, j.double().reshape(flat.numel(), *j.shape[loss.ndim :]), 1) for j in jacobians)
    return dict(zip(NAMES, sums, strict=True))


def func_jacrev(built: Built, engine: str | None, loss: Tensor) -> Results:
    f, x = calls(built, engine)
    return contracted(torch.func.jacrev(f, argnums=(0, 1, 2))(*x), loss)


def jacobian(built: Built, engine: str | None, loss: Tensor) -> Results:
    f, x = calls(built, engine)
    return contracted(torch.autograd.functional.jacobian(f, x, vectorize=True), loss)


def halves(x: tuple[Tensor, ...]) -> list[Tensor]:
    """Two problems, the second with half of each number."""
    return [torch.stack([t, t / 2]) for t in x]


def func_vmap(built: Built, engine: str | None, loss: Tensor) -> Results:
    f, x = calls(built, engine)
    found = torch.func.vmap(f, randomness="same")(*halves(x))
    return {"output": found[0], "half: output": found[1]}


def func_vmap_grad(built: Built, engine: str | None, loss: Tensor) -> Results:
    f, x = calls(built, engine)
    one = torch.func.grad(lambda *x: (f(*x) * loss).sum(), argnums=(0, 1, 2))
    found = torch.func.vmap(one, randomness="same")(*halves(x))
    both = {name: g[0] for name, g in zip(NAMES, found, strict=True)}
    return both | {f"half: {name}": g[1] for name, g in zip(NAMES, found, strict=True)}


def tangents(built: Built) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(built.spec.number)
    return tuple(torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype) for x in built.inputs)


def along(loss: Tensor, tangent: Tensor) -> Tensor:
    return (loss.double() * tangent.double()).sum()


def func_jvp(built: Built, engine: str | None, loss: Tensor) -> Results:
    f, x = calls(built, engine)
    output, tangent = torch.func.jvp(f, x, tangents(built))
    return {"output": output, "tangent": along(loss, tangent)}


def forward_ad(built: Built, engine: str | None, loss: Tensor) -> Results:
    f, x = calls(built, engine)
    with fwAD.dual_level():
        output, tangent = fwAD.unpack_dual(f(*map(fwAD.make_dual, x, tangents(built))))
    # none is a tangent of zeros
    return {"output": output, "tangent": along(loss, torch.zeros_like(output) if tangent is None else tangent)}


def func_hessian(built: Built, engine: str | None, loss: Tensor) -> Results:
    f, x = calls(built, engine)
    rows = torch.func.hessian(lambda *x: (f(*x) * loss).sum(), argnums=(0, 1, 2))(*x)
    found = {}
    for name, row, at in zip(NAMES, rows, x, strict=True):
        parts = zip(row, tangents(built), strict=True)
        found[f"second: {name}"] = sum((h * t).sum(tuple(range(at.ndim, h.ndim))) for h, t in parts)
    return found


def twice(built: Built, engine: str | None, loss: Tensor) -> Results:
    output = built.attend(*built.inputs, engine)
    found = torch.autograd.grad(output, built.inputs, loss, create_graph=True)
    total = sum((g * t).sum() for g, t in zip(found, tangents(built), strict=True))
    with lacking_in_pytorch():
        return _again(built, total)


@contextmanager
def lacking_in_pytorch() -> Iterator[None]:
    """Where PyTorch says that its fused kernel has no second derivative, that is a refusal: see `TWICE`."""
    try:
        yield
    except RuntimeError as missing:
        if "derivative for aten::_scaled_dot_product" not in str(missing):
            raise
        raise ch.UnsupportedError(str(missing)) from missing


def _again(built: Built, total: Tensor) -> Results:
    # gradients that are constant, such as those of one key alone, have no graph
    again = torch.autograd.grad(total, built.inputs, allow_unused=True) if total.requires_grad else [None] * 3
    zeros = (torch.zeros_like(x) for x in built.inputs)
    return {f"second: {n}": z if g is None else g for n, g, z in zip(NAMES, again, zeros, strict=True)}


def batched(built: Built, engine: str | None, loss: Tensor) -> Results:
    output = built.attend(*built.inputs, engine)
    losses = torch.stack([loss, -2 * loss]).to(output.dtype)
    found = torch.autograd.grad(output, list(built.leaves.values()), losses, is_grads_batched=True, allow_unused=True)
    results: Results = {"output": output}
    for (name, leaf), g in zip(built.leaves.items(), found, strict=True):
        results[name] = torch.zeros_like(leaf) if g is None else g[0]
        results[f"second row: {name}"] = torch.zeros_like(leaf) if g is None else g[1] / -2
    return results


RUNS: dict[str, Run] = {
    "nothing": ordinary,
    "unseen garbage": ordinary,
    "default float64": under(lambda built: default(torch.float64)),
    "default bfloat16": under(lambda built: default(torch.bfloat16)),
    "default meta": under(lambda built: torch.device("meta")),
    "set default meta": under(lambda built: default_device()),
    "inference mode": under(lambda built: torch.inference_mode(), output_alone),
    "no_grad": under(lambda built: torch.no_grad(), output_alone),
    "autocast": under(lambda built: torch.autocast("cpu", torch.bfloat16)),
    "poisoned memory": under(poisoned),
    "threads": under(threads),
    "calls from 8 threads": from_threads,
    "checkpoint": checkpointed,
    "numpy": numpy,
    "wrapper subclass": wrapped,
    "plain subclass": subclassed,
    "zero input": zero_input,
    "zero gradient": zero_gradient,
    "fake tensors": fake,
    "func.grad": func_grad,
    "func.vjp": func_vjp,
    "func.jacrev": func_jacrev,
    "func.vmap": func_vmap,
    "func.vmap of grad": func_vmap_grad,
    "func.jvp": func_jvp,
    "func.hessian": func_hessian,
    "forward_ad": forward_ad,
    "twice": twice,
    "batched gradients": batched,
    "vectorized jacobian": jacobian,
}
