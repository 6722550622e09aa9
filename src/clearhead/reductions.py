"""Statistics of the weights, which `weights(…).reduce` and `clearhead.models.statistics` take.

>>> import torch, clearhead as ch
>>> w = ch.weights(torch.eye(3), torch.eye(3), scale=2.0)
>>> entropy, (largest, keys) = w.reduce(ch.reductions.Entropy(), ch.reductions.TopK(1))
>>> keys.flatten()
tensor([0, 1, 2])

One pass over the weights finds any number of them. A reduction of your own is a subclass of
`clearhead.extend.Reduction`.
"""

from clearhead.base.public_names import publish as _publish
from clearhead.inspection.reductions.by_query import Entropy as Entropy
from clearhead.inspection.reductions.by_query import LogSumExp as LogSumExp
from clearhead.inspection.reductions.by_query import Mass as Mass
from clearhead.inspection.reductions.by_query import MaxScore as MaxScore
from clearhead.inspection.reductions.by_query import MeanDistance as MeanDistance
from clearhead.inspection.reductions.by_query import Output as Output
from clearhead.inspection.reductions.by_query import SinkShare as SinkShare
from clearhead.inspection.reductions.by_query import TopK as TopK
from clearhead.inspection.reductions.over_queries import Pool as Pool
from clearhead.inspection.reductions.over_queries import Received as Received

__all__ = _publish(globals())
