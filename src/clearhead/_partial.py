"""partial(): attention over some of the keys, as a value that merges with others."""

from __future__ import annotations

from typing import Any, Generic, Never, cast

import torch
from torch import Tensor

from clearhead._attention import Arguments, ScoreLike
from clearhead.base.arrays import Array, ArrayT, Integers, is_numpy
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.keyword_hints import raise_unknown_keywords
from clearhead.base.numbers import check_count
from clearhead.base.shapes import AlignLike, Sizes
from clearhead.base.torch_state.contexts import without_autocast
from clearhead.biases.base import BiasLike
from clearhead.engines import operation
from clearhead.engines.base import Engine
from clearhead.engines.choose import choose
from clearhead.masks.base import MaskLike
from clearhead.problem.arguments import as_sinks
from clearhead.problem.lengths import apply_valid_lens
from clearhead.problem.partial import Partial, log_sum_exp, rows_of


class PartialAttention(Generic[ArrayT]):
    """Attention over some of the keys; two of them merge into one over the keys of both. `clearhead.partial` makes it.

    >>> import torch, clearhead as ch
    >>> query, key, value = torch.rand(5, 8), torch.rand(9, 8), torch.rand(9, 4)
    >>> first = ch.partial(query, key[:6], value[:6])
    >>> whole = first.merge(ch.partial(query, key[6:], value[6:]))
    >>> torch.allclose(whole.finish(), ch.attention(query, key, value), atol=1e-6)
    True

    `output` (..., Lq, Ev) and `logsumexp` (..., Lq), in float32 at least; where a query sees none of the keys they are
    0 and −∞. Both are differentiable, and so are `merge` and `finish`. They are NumPy arrays where the inputs were.
    """

    def __init__(self, found: Partial, dtype: torch.dtype, numpy: bool) -> None:
        self._found, self._dtype, self._numpy = found, dtype, numpy

    @property
    def output(self) -> ArrayT:
        """(..., Lq, Ev)."""
        return self._out(self._found.output)

    @property
    def logsumexp(self) -> ArrayT:
        """log Σ_j exp(s_ij) over these keys, (..., Lq)."""
        maximum, log_sum = rows_of(self._found)
        return self._out(log_sum_exp(maximum.detach(), log_sum))

    def merge(self, other: PartialAttention[ArrayT]) -> PartialAttention[ArrayT]:
        """Attention over the keys of both, which must have no key in common. The order does not matter.

        Formula: L = log(exp L₁ + exp L₂), output = exp(L₁ − L) output₁ + exp(L₂ − L) output₂. Raises a `ShapeError`
        where the queries differ. Cost: a few operations for each number of the output.
        Source: Rabe and Staats 2021, "Self-attention Does Not Need O(n²) Memory".
        """
        if not isinstance(other, PartialAttention):
            raise ClearheadError(f"merge takes the result of another partial(), not a {type(other).__name__}.")
        mine, theirs = self._found.output, other._found.output
        if mine.shape != theirs.shape or mine.device != theirs.device:
            raise ShapeError(
                f"partials of {tuple(mine.shape)} on {mine.device} and of {tuple(theirs.shape)} on {theirs.device} do "
                "not merge: both must be of the same queries, (..., Lq, Ev)."
            )
        dtype = torch.promote_types(self._dtype, other._dtype)
        return PartialAttention(self._found.merge(other._found), dtype, self._numpy)

    def transpose(self, dim0: int, dim1: int) -> PartialAttention[ArrayT]:
        """The same partial with two dimensions of `logsumexp` exchanged, as `torch.transpose` does.

        The queries of many continuations are rows of one call over the prefix that they share, (1, H, N), and
        sequences of their own, (N, H, 1), over the rest: `shared.transpose(0, 2).merge(own)`.
        """
        for dim in (dim0, dim1):
            check_count(dim, 0, "a dimension of transpose", most=self._found.output.ndim - 2)
        each = self._found.output, *rows_of(self._found)
        output, maximum, log_sum = (t.transpose(dim0, dim1) for t in each)
        return PartialAttention(Partial(output, maximum, log_sum), self._dtype, self._numpy)

    def finish(self, sinks: Array | None = None) -> ArrayT:
        """The attention output, (..., Lq, Ev), of the value's dtype.

        `sinks`: (H,), one logit a head, as for `attention`; they enter the softmax here, once. A query that has seen no
        key gives 0.
        """
        found, output = self._found, self._found.output
        if sinks is not None:
            *leading, queries, _ = output.shape
            heads = leading[-1] if len(leading) > 1 else 1
            sizes = Sizes(1, heads, queries, 0, output.device, tuple(leading))  # as errors show them
            given = as_sinks(sinks, sizes).to(output)
            output = found.with_sinks(given[:, None] if output.ndim > 3 else given).output
        return self._out(output.to(self._dtype))

    def __repr__(self) -> str:
        return f"PartialAttention(output {tuple(self._found.output.shape)}, {self._dtype})"

    def _out(self, tensor: Any) -> ArrayT:
        # a copy: the partial keeps its own memory
        return cast(ArrayT, tensor.detach().numpy().copy() if self._numpy else tensor)


def partial(
    query: ArrayT,
    key: ArrayT,
    value: ArrayT,
    *,
    score: ScoreLike = None,
    mask: MaskLike = None,
    valid_lens: Integers | None = None,
    bias: BiasLike = None,
    scale: float | None = None,
    align: AlignLike = None,
    engine: str | Engine | None = None,
    keys: tuple[int, int] | None = None,
    **others: Never,
) -> PartialAttention[ArrayT]:
    """Attention over some of the keys, as a value that merges with others into attention over all keys.

    >>> import torch, clearhead as ch
    >>> query, key, value = torch.rand(1, 2, 4, 8), torch.rand(1, 2, 10, 8), torch.rand(1, 2, 10, 8)
    >>> given = {"mask": ch.Causal(), "bias": ch.ALiBi(2), "align": "lower_right"}
    >>> parts = [ch.partial(query, key[:, :, i : i + 5], value[:, :, i : i + 5], keys=(i, 10), **given) for i in (5, 0)]
    >>> whole = ch.attention(query, key, value, **given)
    >>> torch.allclose(parts[0].merge(parts[1]).finish(), whole, atol=1e-6)
    True

    It serves keys that arrive in chunks or lie on other machines, and a prefix that many continuations share: the
    prefix's part is computed once. `examples/` has both.

    `keys`: (first, total), where the given keys are the keys first … first + Lk − 1 of `total` keys, and mask, lengths,
    bias and `align` are those of all `total`; None: the given keys are all keys. The other arguments are those of
    `attention`, without dropout; sinks go to `finish`.
    Returns a `PartialAttention`. Raises `ClearheadError`, `ShapeError` or `UnsupportedError` (PyTorch's kernel, the
    engine "sdpa", gives no log-sum-exp). Cost: that of `attention` over these keys.
    Sources: Rabe and Staats 2021, "Self-attention Does Not Need O(n²) Memory"; Liu et al. 2023, "Ring Attention".
    """
    if others:
        raise_unknown_keywords("partial", partial, others)
    tensors = all(isinstance(t, Tensor) for t in (query, key, value))
    numpy = not tensors and is_numpy(query=query, key=key, value=value)
    mask, bias = apply_valid_lens(mask, valid_lens, bias)
    call = Arguments(query, key, value, score, mask, bias, scale, None, align, 0.0, engine)
    problem = call.problem(None if keys is None else _check_keys(keys))._refresh_mode()
    with without_autocast(problem.sizes.device):
        found: Partial = operation.partial(problem, choose(problem, engine, rows=True), engine)
    assert problem.value is not None
    output, maximum, log_sum = map(problem.sizes.restore, (found.output, *rows_of(found)))
    restored = Partial(output, maximum, log_sum)
    return PartialAttention(restored, problem.value.dtype, numpy)


def _check_keys(keys: Any) -> tuple[int, int]:
    if not isinstance(keys, tuple | list) or len(keys) != 2:
        raise ClearheadError(f"keys is {keys!r:.60}; expected (first, total), two whole numbers.")
    return check_count(keys[0], 0, "keys[0]"), check_count(keys[1], 0, "keys[1]")
