"""One attention over many processes, on torch.distributed."""

from clearhead.distributed._attention import attention
from clearhead.distributed._merge import merge
from clearhead.distributed._plan import Plan, Share, plan
from clearhead.distributed._weights import ShardedWeights, weights
from clearhead.distributed.batch import ShardedBatch, shard_batch
from clearhead.distributed.layout import Balanced, Contiguous, Layout, ZigZag

__all__ = [
    "Balanced",
    "Contiguous",
    "Layout",
    "Plan",
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
