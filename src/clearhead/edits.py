"""Changes to some heads and queries of a model while it runs, which `clearhead.edit` takes.

>>> import torch, clearhead as ch
>>> block, x = ch.nn.DotProductAttention(), torch.rand(1, 4, 10, 8)
>>> with ch.edit(block, ch.edits.Knockout(heads=1, keys=0), ch.edits.ScaleHeads(heads=[2, 3], factor=0.5)):
...     output = block(x, x, x)

An edit of your own is a subclass of `Edit`.
"""

from clearhead.base.public_names import publish as _publish
from clearhead.models.edits.base import Edit as Edit
from clearhead.models.edits.outputs import Ablate as Ablate
from clearhead.models.edits.outputs import MapWeights as MapWeights
from clearhead.models.edits.outputs import ScaleHeads as ScaleHeads
from clearhead.models.edits.patch import Freeze as Freeze
from clearhead.models.edits.patch import Patch as Patch
from clearhead.models.edits.scores import AddBias as AddBias
from clearhead.models.edits.scores import ForceMask as ForceMask
from clearhead.models.edits.scores import Knockout as Knockout

__all__ = _publish(globals())
