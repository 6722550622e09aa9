"""The classes to derive parts of your own from, and the forms that these parts are lowered to.

>>> import torch, clearhead as ch
>>> class Manhattan(ch.extend.Score):
...     def tile(self, query, key):
...         return -(query.unsqueeze(-2) - key.unsqueeze(-3)).abs().sum(-1)
>>> ch.attention(torch.eye(2), torch.eye(2), torch.eye(2), score=Manhattan()).shape
torch.Size([2, 2])

    Score      `tile(query, key)`; `lower(query, key)` gives a `Pairwise`
    Mask       `lower(sizes)` gives `Spans`
    Bias       `lower(sizes)` gives an `Added`
    Reduction  `summary(problem)` gives a `Summary`, and `found` reads its `Found`
    Engine     `forward(problem)` gives a `Partial`; `cost(problem)` gives a `Cost`

`Sizes` are the sizes of a call, (B, H, Lq, Lk); `Problem` is a call that is checked and lowered. `clearhead.testing`
checks a part against its definition. An edit of your own is a subclass of `clearhead.edits.Edit`.
"""

from clearhead.base.positions import query_offset as query_offset
from clearhead.base.public_names import publish as _publish
from clearhead.base.shapes import Sizes as Sizes
from clearhead.biases import Added as Added
from clearhead.biases import Bias as Bias
from clearhead.engines.base import Cost as Cost
from clearhead.engines.base import Engine as Engine
from clearhead.inspection.reductions.base import Reduction as Reduction
from clearhead.masks import Mask as Mask
from clearhead.masks import Spans as Spans
from clearhead.problem.partial import Partial as Partial
from clearhead.problem.problem import Problem as Problem
from clearhead.problem.summary import Found as Found
from clearhead.problem.summary import Summary as Summary
from clearhead.scores import Pairwise as Pairwise
from clearhead.scores import Score as Score

__all__ = _publish(globals())
