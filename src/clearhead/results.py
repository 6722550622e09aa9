"""The classes of the results of `plan`, `partial` and `weights`, for annotations and `isinstance`.

>>> import torch, clearhead as ch
>>> isinstance(ch.weights(torch.eye(2), torch.eye(2)), ch.results.Weights)
True

The classes of other results stand beside the functions that make them: `clearhead.models.Recording`,
`clearhead.explanation.Explanation`.
"""

from clearhead._attention import Plan as Plan
from clearhead._partial import PartialAttention as PartialAttention
from clearhead.base.public_names import publish as _publish
from clearhead.inspection.difference import WeightDifference as WeightDifference
from clearhead.inspection.gradients import WeightGradients as WeightGradients
from clearhead.inspection.weights import Weights as Weights

__all__ = _publish(globals())
