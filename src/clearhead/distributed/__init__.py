"""One attention over many processes, on torch.distributed."""

from clearhead.distributed.attention import attention as attention
from clearhead.distributed.layout import Balanced as Balanced
from clearhead.distributed.layout import Contiguous as Contiguous
from clearhead.distributed.layout import Layout as Layout
from clearhead.distributed.layout import ZigZag as ZigZag
from clearhead.distributed.plan import Plan as Plan
from clearhead.distributed.plan import plan as plan
