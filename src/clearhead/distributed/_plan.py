"""The plan of attention over ranks: how much each rank would compute and send. Nothing is sent."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from clearhead._attention import ScoreLike
from clearhead.base.arrays import accumulated
from clearhead.base.errors import human_bytes
from clearhead.biases.base import BiasLike
from clearhead.distributed.layout import Layout
from clearhead.distributed.needs import Needs
from clearhead.distributed.pieces import sharded
from clearhead.masks.base import MaskLike


@dataclass(frozen=True)
class Share:
    """One rank's share: how much it holds, computes and sends.

    `pairs`: the number of pairs that the mask's intervals allow, in all sequences and heads. `peers`: the ranks whose
    keys it receives. `sent`, `received`: bytes in the forward pass. `sent_backward`: bytes in the backward pass by the
    method "exchange", which sends the keys once more, and gradients in float32 at least.
    """

    rank: int
    positions: int
    pairs: int
    peers: tuple[int, ...]
    sent: int
    received: int
    sent_backward: int


@dataclass(frozen=True)
class RankPlan:
    """What `attention` over ranks would do: print it. `shares`: one for each rank."""

    shares: tuple[Share, ...]
    layout: Layout

    @property
    def pairs(self) -> int:
        """The pairs of all ranks together."""
        return sum(share.pairs for share in self.shares)

    @property
    def imbalance(self) -> float:
        """The largest number of pairs of a rank over the mean: 1 where all ranks have equally many."""
        return max(share.pairs for share in self.shares) * len(self.shares) / self.pairs if self.pairs else 1.0

    def __repr__(self) -> str:
        lines = [f"plan: {self.layout}", "  rank  positions          pairs  peers       sent   received   backward"]
        for share in self.shares:
            amounts = (human_bytes(n).rjust(10) for n in (share.sent, share.received, share.sent_backward))
            lines.append(
                f"  {share.rank:4}  {share.positions:9,}  {share.pairs:13,}  {len(share.peers):5} {' '.join(amounts)}"
            )
        lines.append(f"  imbalance {self.imbalance:.3f}: the most pairs of a rank over their mean")
        return "\n".join(lines)


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: Layout,
    score: ScoreLike = None,
    mask: MaskLike = None,
    bias: BiasLike = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> RankPlan:
    """What `attention` over ranks with these arguments would send and compute, for each rank.

    >>> import torch, clearhead as ch
    >>> layout = ch.distributed.ZigZag(8192, 4)
    >>> x = torch.empty(1, 8, layout.count(), 64, device="meta")  # shapes are enough
    >>> ch.distributed.plan(x, x, x, layout=layout, mask=ch.Causal())
    plan: ZigZag(8192 positions on 4 ranks: [2048, 2048, 2048, 2048])
      rank  positions          pairs  peers       sent   received   backward
         0      2,048     67,117,056      3     12 MiB     24 MiB     36 MiB
         1      2,048     67,117,056      3     16 MiB     20 MiB     36 MiB
         2      2,048     67,117,056      3     20 MiB     16 MiB     36 MiB
         3      2,048     67,117,056      3     24 MiB     12 MiB     36 MiB
      imbalance 1.000: the most pairs of a rank over their mean

    The arguments are those of `attention`, with this rank's part of query, key and value; with a layout that was made
    of a number of ranks, the first rank's part.
    Bytes follow from the runs of keys that some query of a rank may see by the mask's intervals; pairs that a residual
    hides (`MaskFunction`, `DenseMask`) are counted. No other process is needed, and no message is sent.
    Returns a `RankPlan`. Raises as `attention` does. Cost: a pass over the mask's intervals for each pair of chunks.
    """
    local = sharded(query, key, value, layout, score=score, mask=mask, bias=bias, scale=scale, sinks=sinks)
    needs = Needs(layout, local.visible, local.sizes)
    assert local.value is not None
    numbers = needs.sizes.batch * local.key.shape[1] * (local.key.shape[-1] + local.value.shape[-1])
    forward, backward = (numbers * dtype.itemsize for dtype in (local.key.dtype, accumulated(local.key.dtype)))
    return RankPlan(tuple(_share(rank, needs, layout, forward, backward) for rank in range(layout.ranks)), layout)


def _share(rank: int, needs: Needs, layout: Layout, forward: int, backward: int) -> Share:
    """One rank's share. `forward`, `backward`: the bytes of a key with its value, and of their gradients."""
    others = [other for other in range(layout.ranks) if other != rank]
    given = sum(needs.rows[other][rank] for other in others)
    taken = sum(needs.rows[rank][other] for other in others)
    return Share(
        rank,
        layout.count(rank),
        sum(needs.pairs(job) for jobs in needs.jobs[rank] for job in jobs),
        tuple(other for other in others if needs.rows[rank][other]),
        forward * given,
        forward * taken,
        forward * given + backward * taken,
    )
