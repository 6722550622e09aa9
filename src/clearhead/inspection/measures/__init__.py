"""Measures of a head, each beside its value for uniform attention under the same mask."""

from clearhead.inspection.measures.base import Found as Found
from clearhead.inspection.measures.base import Measure as Measure
from clearhead.inspection.measures.by_position import Distance, First, Itself, Next, Previous
from clearhead.inspection.measures.by_token import Induction, SameWord
from clearhead.inspection.measures.norms import WeightedTransformedNorm, WeightedValueNorm
from clearhead.inspection.measures.spread import NormalisedEntropy, Sink
from clearhead.inspection.measures.subject import Subject as Subject

# Where two measures mean the same, as for a sink that is the first token, the earlier one names the head.
_ON_SOME_KEYS = Previous(), Next(), Itself(), First(), SameWord(), Induction()
_OF_ALL_KEYS = NormalisedEntropy(), Sink(), Distance(), WeightedValueNorm(), WeightedTransformedNorm()
MEASURES: tuple[Measure, ...] = (*_ON_SOME_KEYS, *_OF_ALL_KEYS)
