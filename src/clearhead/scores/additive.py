"""The additive score."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from clearhead.base.arrays import Array
from clearhead.base.errors import ClearheadError, ShapeError, columns
from clearhead.base.numbers import check_count
from clearhead.base.products import multiply
from clearhead.base.symbolic.steps import Step, made
from clearhead.scores.base import SCORES, Pairwise, Score, check_width, draw_linear, given_parameter, linear_weight


class Additive(Score):
    """Bahdanau's additive score: a small tanh network over each pair.

    >>> import torch, clearhead as ch
    >>> ch.Additive(query_dim=4, key_dim=6, hidden_dim=8)(torch.ones(2, 4), torch.ones(3, 6)).shape
    torch.Size([2, 3])

    Formula: s_ij = Σ_h w_v[h] · tanh((W_q q_i)[h] + (W_k k_j)[h]).

    W_q (hidden_dim, Eq), W_k (hidden_dim, Ek) as nn.Linear has them, w_v (hidden_dim,); a matrix that is None leaves
    its side as it is (already projected). `softcap`: as for every `Score`. `device`, `dtype`: those of the weights;
    None is the default of PyTorch.
    Takes query (..., Lq, Eq), key (..., Lk, Ek); gives (..., Lq, Lk).
    Raises `ShapeError` for other widths. Cost: Lq·Lk·hidden_dim tanh.
    Source: Bahdanau et al. 2015, "Neural Machine Translation by Jointly Learning to Align and Translate".
    """

    W_q: nn.Parameter | None
    W_k: nn.Parameter | None

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        hidden_dim: int,
        *,
        softcap: float | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(softcap=softcap)
        self.W_q = linear_weight(hidden_dim, query_dim, device, dtype)
        self.W_k = linear_weight(hidden_dim, key_dim, device, dtype)
        self.w_v = nn.Parameter(linear_weight(1, hidden_dim, device, dtype).detach()[0])

    def reset_parameters(self) -> None:
        """Draw all weights anew, as `torch.nn.Linear` draws its own."""
        for weight in (self.W_q, self.W_k, self.w_v):
            draw_linear(weight)

    @classmethod
    def from_weights(
        cls, W_q: Array | None, W_k: Array | None, w_v: Array, *, softcap: float | None = None
    ) -> Additive:
        """The score over given weights (H, Eq), (H, Ek), (H,): an nn.Parameter is shared, other arrays are copied.

        `w_v`: (H,), or (1, H) as an nn.Linear of H inputs and one output has it. None for W_q or W_k means that this
        side is already projected, to the width H.
        """
        score = cls.__new__(cls)
        Score.__init__(score, softcap=softcap)  # skips the random initialisation
        score.w_v = given_parameter(w_v, "w_v", 1)
        vector = score._vector
        score.W_q = None if W_q is None else given_parameter(W_q, "W_q", 2)
        score.W_k = None if W_k is None else given_parameter(W_k, "W_k", 2)
        for name, parameter in (("W_q", score.W_q), ("W_k", score.W_k)):
            if parameter is not None and parameter.shape[0] != vector.shape[0]:
                raise ShapeError(
                    f"{name} and w_v disagree in hidden_dim, the first size of each (nn.Linear's order).\n"
                    + columns({name: tuple(parameter.shape), "w_v": (vector.shape[0], "")})
                    + f"\nIf {name} is (in, hidden_dim), pass {name}.T."
                )
        return score

    @classmethod
    def from_concatenated(
        cls,
        weight: Array,
        w_v: Array,
        order: Literal["key_query", "query_key"] = "key_query",
        key_dim: int | None = None,
        softcap: float | None = None,
    ) -> Additive:
        """The score of the published form w_v · tanh(W [k; q]), with W of shape (H, Ek + Eq) as in nn.Linear.

        `order` says which comes first in the concatenation; `key_dim` is Ek, by default half of the width.
        """
        if not isinstance(order, str) or order not in ("key_query", "query_key"):
            raise ClearheadError(f"order is {order!r}; expected 'key_query' or 'query_key'.")
        joint = given_parameter(weight, "weight", 2)
        width = joint.shape[1]
        keys = width // 2 if key_dim is None else check_count(key_dim, 1, "key_dim")
        if not 0 < keys < width or (key_dim is None and width % 2):
            raise ShapeError(f"weight has shape {tuple(joint.shape)}; pass key_dim, from 1 to {width - 1}.")
        first = keys if order == "key_query" else width - keys
        parts = joint.detach()[:, :first], joint.detach()[:, first:]
        W_k, W_q = parts if order == "key_query" else parts[::-1]
        return cls.from_weights(W_q, W_k, w_v, softcap=softcap)

    @classmethod
    def example(cls) -> tuple[Score, int, int]:
        return cls(4, 6, 8), 4, 6

    @property
    def _vector(self) -> Tensor:
        """w_v as (H,)."""
        return self.w_v.flatten()

    def project(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """W_q q and W_k k, both of width hidden_dim."""
        sides = (query, self.W_q), (key, self.W_k)
        query, key = (side if matrix is None else multiply(side, matrix.T) for side, matrix in sides)
        return query, key

    def tile(self, query: Tensor, key: Tensor) -> Tensor:
        query, key = self.project(query, key)
        return torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) @ self._vector

    def steps(self, query: Step, key: Step) -> list[Step]:
        q_steps, k_steps = _projection_steps(query, self.W_q), _projection_steps(key, self.W_k)
        why_pairs = (
            "Every query is added to every key: queries get an axis of size 1 where the keys stand, (Lq, 1, hidden), "
            "keys one where the queries stand, (1, Lk, hidden), and broadcasting repeats each along that axis."
        )
        why_tanh = (
            "tanh(x) = (exp(x) - exp(-x)) / (exp(x) + exp(-x)) is between -1 and 1. Without it the score would be a "
            "number of the query plus one of the key, and all queries would give the keys the same weights."
        )
        why_sum = (
            "The sum runs over the hidden axis, which is gone after it: one number for each query and key is left. (A "
            "matrix w_v of shape (hidden, 1) would leave an axis of size 1, which squeeze(-1) removes.)"
        )
        of_query, of_key = [query, *q_steps][-1], [key, *k_steps][-1]
        pairs = made("pairs", why_pairs, of_query.unsqueeze(-2) + of_key.unsqueeze(-3), (*SCORES, "hidden"))
        hidden = made("hidden", why_tanh, pairs.tanh())
        w_v = Step("w_v", "Learnt: the factor of each of the hidden numbers in the score.", self._vector, ("hidden",))
        return [*q_steps, *k_steps, pairs, hidden, w_v, made("scores", why_sum, hidden @ w_v)]

    def lower(self, query: Tensor, key: Tensor) -> Pairwise:
        return Pairwise("tanh_add", *self.project(query, key), weight=self._vector)

    def check(self, query: Tensor, key: Tensor) -> None:
        super().check(query, key)
        for name, tensor, matrix in (("query", query, self.W_q), ("key", key, self.W_k)):
            check_width(self, tensor, self._vector.shape[0] if matrix is None else matrix.shape[1], name)

    def extra_repr(self) -> str:
        sides = (("query_dim", self.W_q), ("key_dim", self.W_k))
        dims = (f"{n}={'projected' if m is None else m.shape[1]}" for n, m in sides)
        return self._format_options(*dims, f"hidden_dim={self._vector.shape[0]}")


def _projection_steps(side: Step, matrix: Tensor | None) -> list[Step]:
    """The steps that project a side to the hidden width; no steps where it is projected already."""
    if matrix is None:
        return []
    name = side.name
    learnt = f"Learnt: row n makes hidden number n of a {name}."
    W = Step(f"W_{name[0]}", learnt, matrix, ("hidden", side.axes[-1]))
    why = f"Each {name} becomes a vector of the hidden width, so that queries and keys of any widths can be added."
    return [W, made(f"projected_{name}", why, side @ W.T)]
