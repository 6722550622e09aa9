"""What an engine computes: the output, and the statistics of each query's softmax."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Partial(NamedTuple):
    """Attention over some of the keys, or all: output_i = Σ_j w_ij value_j, w_ij = exp(s_ij − maximum_i − log_sum_i).

    The softmax's denominator is kept as two numbers: in their sum, a maximum of 1e5 would leave the other no digits.
    A query that sees nothing has an output of 0, a maximum of 0, and a log_sum of +∞: weights of 0.
    """

    output: Tensor  # (B, H, Lq, Ev)
    maximum: Tensor | None = None  # (B, H, Lq), the largest score or sink; None where not asked for
    log_sum: Tensor | None = None  # (B, H, Lq), log Σ_j exp(s_ij − maximum_i), the sink's term with it
    finite: bool = False  # True: all that was read is finite, so that a backward pass needs no guard


class Rows(NamedTuple):
    """What the backward pass reads of each query, (B, H, Lq): Ṡ_ij = P_ij (Ṗ_ij − δ_i), δ_i = Σ_j P_ij Ṗ_ij.

    They are of the whole softmax. So a problem over some of its keys has, with them, the right gradients too.
    """

    maximum: Tensor
    log_sum: Tensor
    delta: Tensor
