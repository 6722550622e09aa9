"""Measures of a head, each beside its value for uniform attention under the same mask."""

from clearhead.inspection.measures.base import Found as Found
from clearhead.inspection.measures.base import Measure as Measure
from clearhead.inspection.measures.of_all_keys import OF_ALL_KEYS
from clearhead.inspection.measures.on_some_keys import ON_SOME_KEYS
from clearhead.inspection.measures.subject import Subject as Subject

# Where two measures mean the same, as for a sink that is the first token, the earlier one names the head.
MEASURES: tuple[Measure, ...] = (*ON_SOME_KEYS, *OF_ALL_KEYS)
