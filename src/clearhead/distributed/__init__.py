"""One attention over many processes, on torch.distributed."""

from clearhead.base.public_names import publish as _publish
from clearhead.distributed._attention import attention as attention
from clearhead.distributed._merge import merge as merge
from clearhead.distributed._plan import RankPlan as RankPlan
from clearhead.distributed._plan import Share as Share
from clearhead.distributed._plan import plan as plan
from clearhead.distributed._weights import ShardedWeights as ShardedWeights
from clearhead.distributed._weights import weights as weights
from clearhead.distributed.batch import ShardedBatch as ShardedBatch
from clearhead.distributed.batch import shard_batch as shard_batch
from clearhead.distributed.layout import Balanced as Balanced
from clearhead.distributed.layout import Contiguous as Contiguous
from clearhead.distributed.layout import Layout as Layout
from clearhead.distributed.layout import ZigZag as ZigZag

__all__ = _publish(globals())
