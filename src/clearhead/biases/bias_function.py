"""A bias given by a rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from clearhead.base.shapes import Sizes
from clearhead.base.user_functions.rules import ByPair, Rule, ask, check_rule, reads_of, title_of
from clearhead.base.user_functions.single_pairs import must_ask_again, reads_rows
from clearhead.biases.base import Added, Bias


class BiasFunction(Bias):
    """Any rule: a function of the indices that gives the number to add to the score of each pair.

    >>> import torch, clearhead as ch
    >>> decay = ch.BiasFunction(lambda batch, head, query_index, key_index: -(query_index - key_index).abs() / 2)
    >>> decay(torch.zeros(3, 4), torch.zeros(3, 4))
    tensor([[ 0.0000, -0.5000, -1.0000],
            [-0.5000,  0.0000, -0.5000],
            [-1.0000, -0.5000,  0.0000]])

    Formula: b_ij = fn(b, h, i, j) for query i of head h of sequence b and key j.
    `fn(batch, head, query_index, key_index)` is called on int64 tensors of shapes (B, 1, 1, 1), (1, H, 1, 1),
    (1, 1, Lq, 1) and (1, 1, 1, Lk), for any part of the matrix, and gives a floating-point tensor that broadcasts with
    them. It is called again in the backward pass, and must give the same numbers then:
    `clearhead.testing.check_bias(bias)` finds a function that does not. It may be a module, or read a parameter, which
    then gets gradients; a tensor that requires grad and is not found, see `reads`, is an error.
    A function that reads a row of a table, `(labels[i] & labels[j]).any()`, is mapped over the pairs by `torch.vmap`;
    to find out, the function is tried on a few pairs when it is given.
    Indices are counted from 0 for queries and keys alike: where Lq ≠ Lk, the rule places the queries itself. Beside a
    `KeyValueCache` of a module, query_index counts the keys that the cache held before the call too.
    `reads`: the tensors that fn reads; most are found without it, as for `MaskFunction`.
    Raises a `ClearheadError` where fn gives anything else. Cost: the rule, for every pair that the mask allows; memory
    O(Lq + Lk). It runs on "tiled" and "reference", and without gradients on "sdpa". "flex" takes it into its kernel
    where fn computes with single numbers and with entries of tensors that need no gradient. In compiled code the whole
    matrix may be made. A bias that depends on the distance alone is faster as a
    `Bias` of your own whose `lower` gives one number for each distance, `clearhead.extend.Added(relative=…)`.
    Source: the form is that of Dong et al. 2024, "Flex Attention".
    """

    fn: Rule

    def __init__(self, fn: Rule, reads: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.fn, self.reads = check_rule(fn, reads, "BiasFunction", "For a tensor use DenseBias(tensor).")
        self._by_rows = reads_rows(fn)

    @classmethod
    def example(cls, sizes: Sizes) -> Bias:
        return cls(_Waves())

    def extra_repr(self) -> str:
        return "" if isinstance(self.fn, nn.Module) else getattr(self.fn, "__name__", type(self.fn).__name__)

    def lower(self, sizes: Sizes) -> Added:
        if must_ask_again(self._by_rows):
            self._by_rows = reads_rows(self.fn, device=sizes.device)
        title = title_of("BiasFunction", self.fn)

        def part(*sides: slice) -> Tensor:
            return ask(self.fn, self._by_rows, sides, sizes, title)

        function = ByPair(part, self.fn) if self._by_rows is False else part
        return Added(function=function, reads=reads_of(self.fn, self.reads))


class _Waves(nn.Module):
    """A rule of all four indices with a learnable height, for the example."""

    def __init__(self) -> None:
        super().__init__()
        self.height = nn.Parameter(torch.tensor(0.7))

    def forward(self, batch: Tensor, head: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
        angle = batch + 2 * head + query_index * 3 + key_index
        return self.height * torch.sin(angle.to(self.height.dtype))
