"""Norms of vectors, such as those of queries and keys."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from clearhead.base.steps import INDEX, Cell, Step, number, signed


class Norm(NamedTuple):
    """A norm of each vector about its mean, or (`centred` False) of its squares alone. weight, bias: (width,)."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool

    def to(self, like: Tensor) -> Norm:
        """The same in another dtype."""
        weight, bias = (None if t is None else t.to(like) for t in (self.weight, self.bias))
        return self._replace(weight=weight, bias=bias)


def norm_steps(norm: Norm, before: Step, name: str, result: str) -> list[Step]:
    """`result`: each vector of `before`, its mean taken away where the norm is centred, over its size; then learnt."""
    x, u, axes = before.value, before.name, before.axes
    at, one = f"[{INDEX[axes[-2]]}, d]", (*axes[:-1], "1")
    steps = []
    if norm.centred:
        x = x - x.mean(-1, keepdim=True)
        width = x.shape[-1]
        code = f"centred_{name} = {u} - {u}.sum(-1, keepdim=True) / {width}"
        why = "Each vector without its mean."
        formula = f"centred_{name}{at} = {u}{at} - Σ_n {u}[{at[1]}, n] / {width}"
        u = f"centred_{name}"
        steps.append(Step(u, formula, why, x, axes, code))
    width = x.shape[-1]
    size = (x.square().sum(-1, keepdim=True) / width + norm.eps).sqrt()
    formula = f"size_{name}[{at[1]}] = √(Σ_d {u}{at}² / {width} + {norm.eps:g})"
    code = f"size_{name} = ({u}.square().sum(-1, keepdim=True) / {width} + {norm.eps!r}).sqrt()"
    steps.append(
        Step(f"size_{name}", formula, "The size of each vector's numbers: √ of their mean square.", size, one, code)
    )
    value, formula, code = x / size, f"{result}{at} = {u}{at} / size_{name}[{at[1]}]", f"{result} = {u} / size_{name}"
    cell: Cell = lambda i: f"{signed(x[i])} / {number(size[(*i[:-1], 0)])}"  # noqa: E731
    if norm.weight is not None:
        weight, plain = norm.weight, cell
        steps.append(Step(f"norm_{name}", "", "The factor of each number, learnt.", weight, ("E",)))
        value, formula, code = value * weight, f"{formula} · norm_{name}[d]", f"{code} * norm_{name}"
        cell = lambda i: f"{plain(i)} · {signed(weight[i[-1]])}"  # noqa: E731
    if norm.bias is not None:
        bias, of_weight = norm.bias, cell
        steps.append(Step(f"shift_{name}", "", "Learnt: added to each number.", bias, ("E",)))
        value, formula, code = value + bias, f"{formula} + shift_{name}[d]", f"{code} + shift_{name}"
        cell = lambda i: f"{of_weight(i)} + {signed(bias[i[-1]])}"  # noqa: E731
    why = f"The norm of the module, of each {name} alone: so no vector is large because its input is."
    return [*steps, Step(result, formula, why, value, axes, code, cell)]
