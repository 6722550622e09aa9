"""A user's rule of indices as a function inside FlexAttention's kernel.

The rule is traced once, on one pair. If it consists of PyTorch's operations on single numbers and entries of tensors,
it goes into the kernel, and the tensors become its inputs. Any other rule is computed for all pairs before the call.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.base.kept import Memo
from clearhead.base.torch_state.torch_private import to_another_dtype
from clearhead.base.user_functions.rules import ByPair
from clearhead.scores.base import ByTile

MOST = 64  # the most compiled rules: each costs seconds, and a rule that reads another number is compiled again
_known: dict[str, Callable[..., Tensor]] = {}  # one function for each code: a kernel is compiled for a function
_BESIDE = (torch.ops.aten.index.Tensor, to_another_dtype, torch.ops.aten.scalar_tensor.default)


class Traced(NamedTuple):
    """A rule of one pair with the tensors that it reads: `function(None, batch, head, query, key, *tensors)`."""

    code: str
    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]

    @property
    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors)

    @property
    def kind(self) -> tuple[Any, ...]:
        """The part of the rule for which a kernel is compiled."""
        return (self.code, *((t.dtype, t.ndim, t.requires_grad) for t in self.tensors))

    def at(self, *indices: Tensor) -> Tensor:
        """Compute the rule for one pair, with int64 indices, as rules are documented to get."""
        return self.function(None, *(index.to(torch.int64) for index in indices), *self.tensors)

    def changed(self, score: Tensor, *indices: Tensor) -> Tensor:
        """Compute the changed score of one pair, by a rule that takes the score first."""
        return self.function(None, score.float(), *(i.to(torch.int64) for i in indices), *self.tensors).to(score.dtype)


def traced(found: ByPair, device: torch.device, floating: bool) -> Traced | str:
    """Return the rule for the kernel, or why it has no such form; `floating`: it is a bias, and returns numbers."""
    return found.memo.derive("flex", lambda: _traced(found.at, device, floating))


def traced_change(scores: ByTile, device: torch.device) -> Traced | str:
    """Return the change of scores for the kernel, or why it has no such form."""
    memo, change = Memo() if scores.memo is None else scores.memo, scores.score.changed_by
    assert change is not None
    return memo.derive("flex", lambda: _traced(change, device, floating=True, of_score=True))


def _traced(rule: Callable[..., Tensor], device: torch.device, floating: bool, of_score: bool = False) -> Traced | str:
    from torch.fx.experimental.proxy_tensor import make_fx

    # (1,) rather than (): PyTorch reads the value of an index without dimensions
    first = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(4)]
    if of_score:
        first.insert(0, torch.zeros(1, dtype=torch.float32, device=device))
    try:
        module = make_fx(rule)(*first)
    except Exception as error:  # the rule may raise any error: it may read values, or need several pairs
        said = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:90]}"
        return f"PyTorch cannot trace it on a single pair ({said})"
    graph, tensors = module.graph, []
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in list(graph.nodes):
        if node.op == "get_attr":
            tensors.append(getattr(module, node.target))
            with graph.inserting_after(last):
                last = graph.placeholder(f"tensor_{len(tensors)}")
            node.replace_all_uses_with(last)
            graph.erase_node(node)
        elif node.op == "call_function" and not _of_one_pair(node):
            return f"it computes {node.target} with tensors, and the kernel computes one pair at a time"
    result = next(node for node in graph.nodes if node.op == "output").args[0]
    kind = result.meta["val"].dtype if hasattr(result, "meta") and "val" in result.meta else None
    if kind is None or not (kind.is_floating_point if floating else kind is torch.bool):
        return "it returns something else than one number for a pair"
    if any(t.device != device for t in tensors):
        return "it reads a tensor on another device"
    module.recompile()
    code = module.code
    if code not in _known and len(_known) >= MOST:
        return f"{MOST} other rules were compiled already, and each takes seconds"
    forward = type(module).forward
    assert isinstance(forward, types.FunctionType)
    return Traced(code, _known.setdefault(code, forward), tuple(tensors))


def _of_one_pair(node: Any) -> bool:
    """Return whether an operation takes numbers, or one entry of a tensor, and returns one number."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.numel() != 1 or value.ndim > 1:
        return False
    return node.target in _BESIDE or torch.Tag.pointwise in node.target.tags
