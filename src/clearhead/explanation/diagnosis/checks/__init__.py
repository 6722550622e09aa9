"""The checks of one call, each in its own file."""

from clearhead.explanation.diagnosis.case import Check
from clearhead.explanation.diagnosis.checks.all_true import AllTrue
from clearhead.explanation.diagnosis.checks.batch_first import BatchFirst
from clearhead.explanation.diagnosis.checks.broken_parameters import BrokenParameters
from clearhead.explanation.diagnosis.checks.few_keys import FewKeys
from clearhead.explanation.diagnosis.checks.finite_fill import FiniteFill
from clearhead.explanation.diagnosis.checks.hidden_pairs import HiddenPairs
from clearhead.explanation.diagnosis.checks.length_second import LengthSecond
from clearhead.explanation.diagnosis.checks.not_finite import NotFinite
from clearhead.explanation.diagnosis.checks.not_transposed import NotTransposed
from clearhead.explanation.diagnosis.checks.one_key import OneKey
from clearhead.explanation.diagnosis.checks.opposite_mask import OppositeMask
from clearhead.explanation.diagnosis.checks.padding_attended import PaddingAttended
from clearhead.explanation.diagnosis.checks.precision import Precision
from clearhead.explanation.diagnosis.checks.saturation import Saturation
from clearhead.explanation.diagnosis.checks.scale import Scale
from clearhead.explanation.diagnosis.checks.sdpa_leak import SdpaLeak
from clearhead.explanation.diagnosis.checks.sees_nothing import SeesNothing
from clearhead.explanation.diagnosis.checks.unequal_lengths import UnequalLengths
from clearhead.explanation.diagnosis.checks.uniform import Uniform
from clearhead.explanation.diagnosis.checks.zero_values import ZeroValues
from clearhead.explanation.diagnosis.checks.zeros_and_ones import ZerosAndOnes

CHECKS: tuple[Check, ...] = (
    BrokenParameters(),
    NotFinite(),
    ZerosAndOnes(),
    UnequalLengths(),
    NotTransposed(),
    LengthSecond(),
    BatchFirst(),
    OppositeMask(),
    PaddingAttended(),
    SeesNothing(),
    FiniteFill(),
    SdpaLeak(),
    HiddenPairs(),
    AllTrue(),
    Scale(),
    Saturation(),
    FewKeys(),
    Uniform(),
    OneKey(),
    ZeroValues(),
    Precision(),
)
