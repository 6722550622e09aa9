"""Masks, one idea in each file."""

from clearhead.masks.base import Mask as Mask
from clearhead.masks.base import Spans as Spans
from clearhead.masks.causal import Causal as Causal
from clearhead.masks.dense import DenseMask as DenseMask
from clearhead.masks.documents import Documents as Documents
from clearhead.masks.first_keys import FirstKeys as FirstKeys
from clearhead.masks.intervals import Intervals as Intervals
from clearhead.masks.lengths import Lengths as Lengths
from clearhead.masks.mask_function import MaskFunction as MaskFunction
from clearhead.masks.padding import Padding as Padding
from clearhead.masks.prefix_lm import PrefixLM as PrefixLM
from clearhead.masks.sliding_window import SlidingWindow as SlidingWindow
