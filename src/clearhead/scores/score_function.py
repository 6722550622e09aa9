"""A plain function as a score."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.user_functions.rules import check_tensors
from clearhead.scores.base import Score, fits_signature, name_of


class ScoreFunction(Score):
    """A score from a plain function; `score=f` makes it for you.

    >>> import torch, clearhead as ch
    >>> def overlap(query, key):
    ...     return torch.minimum(query.unsqueeze(-2), key.unsqueeze(-3)).sum(-1)
    >>> ch.attention(torch.rand(3, 2), torch.rand(5, 2), torch.rand(5, 4), score=overlap).shape
    torch.Size([3, 4])

    `function(query_tile, key_tile)` takes (..., Lq, Eq) and (..., Lk, Ek), any part of the inputs, and gives
    (..., Lq, Lk). It is called again in the backward pass, and must give the same numbers then:
    `clearhead.testing.check_score(function)` finds a function that does not.
    Parameters that it closes over are trained through autograd, but `parameters()` does not list them; a `Score` with
    `tile()` lists its own. `reads`: the tensors that it reads; most are found without it, as for `MaskFunction`. A
    tensor that requires grad and is not found is an error.
    """

    def __init__(
        self,
        function: Callable[[Tensor, Tensor], Tensor],
        *,
        softcap: float | None = None,
        reads: Sequence[Tensor] = (),
    ) -> None:
        super().__init__(softcap=softcap)
        self.function, self._reads = function, check_tensors(reads, "ScoreFunction")
        if not fits_signature(function, 2):
            raise ClearheadError(
                f"score is a function {name_of(function)}{inspect.signature(function)}; it is called with a tile of "
                "queries (..., Lq, Eq) and one of keys (..., Lk, Ek), and gives their scores (..., Lq, Lk).\n"
                "A function of a score and its positions, f(score, batch, head, query_index, key_index), comes after a "
                "score: score=Dot().then(f). A function of positions is a bias, bias=BiasFunction(fn), or a mask, "
                "mask=MaskFunction(fn)."
            )

    def tile(self, query: Tensor, key: Tensor) -> Tensor:
        return self.function(query, key)

    @classmethod
    def example(cls) -> tuple[Score, int, int]:
        def manhattan(query: Tensor, key: Tensor) -> Tensor:
            return -torch.sqrt(1 + (query.unsqueeze(-2) - key.unsqueeze(-3)).square()).sum(-1)

        return cls(manhattan), 4, 4

    def extra_repr(self) -> str:
        return self._format_options(getattr(self.function, "__name__", "function"))
