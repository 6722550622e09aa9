"""One attention over many processes, on torch.distributed."""

from typing import TYPE_CHECKING

from clearhead.base.renamed import missing as _missing
from clearhead.distributed._attention import attention
from clearhead.distributed._merge import merge
from clearhead.distributed._plan import RankPlan, Share, plan
from clearhead.distributed._weights import ShardedWeights, weights
from clearhead.distributed.batch import ShardedBatch, shard_batch
from clearhead.distributed.layout import Balanced, Contiguous, Layout, ZigZag

__all__ = [
    "Balanced",
    "Contiguous",
    "Layout",
    "RankPlan",
    "ShardedBatch",
    "ShardedWeights",
    "Share",
    "ZigZag",
    "attention",
    "merge",
    "plan",
    "shard_batch",
    "weights",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        raise _missing(__name__, name)
