"""Measures of a head, each beside its value for uniform attention under the same mask."""

from clearhead.inspection.measures.base import Found as Found
from clearhead.inspection.measures.base import Measure as Measure
from clearhead.inspection.measures.distance import Distance
from clearhead.inspection.measures.first import First
from clearhead.inspection.measures.induction import Induction
from clearhead.inspection.measures.itself import Itself
from clearhead.inspection.measures.next import Next
from clearhead.inspection.measures.normalised_entropy import NormalisedEntropy
from clearhead.inspection.measures.previous import Previous
from clearhead.inspection.measures.same_word import SameWord
from clearhead.inspection.measures.sink import Sink
from clearhead.inspection.measures.subject import Subject as Subject
from clearhead.inspection.measures.weighted_transformed_norm import WeightedTransformedNorm
from clearhead.inspection.measures.weighted_value_norm import WeightedValueNorm

# Where two measures mean the same, as for a sink that is the first token, the earlier one names the head.
MEASURES: tuple[Measure, ...] = (
    Previous(),
    Next(),
    Itself(),
    First(),
    SameWord(),
    Induction(),
    NormalisedEntropy(),
    Sink(),
    Distance(),
    WeightedValueNorm(),
    WeightedTransformedNorm(),
)
