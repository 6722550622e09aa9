"""The checks of one call, in the order of their findings."""

from clearhead.explanation.diagnosis.case import Check
from clearhead.explanation.diagnosis.checks import axes, heads, masks, not_finite
from clearhead.explanation.diagnosis.checks.formula import OtherFormula
from clearhead.explanation.diagnosis.checks.opposite_mask import OppositeMask
from clearhead.explanation.diagnosis.checks.precision import Precision
from clearhead.explanation.diagnosis.checks.scale import Scale

CHECKS: tuple[Check, ...] = (
    not_finite.BrokenParameters(),
    not_finite.NotFinite(),
    masks.ZerosAndOnes(),
    masks.UnequalLengths(),
    axes.NotTransposed(),
    axes.LengthSecond(),
    axes.BatchFirst(),
    OppositeMask(),
    masks.PaddingAttended(),
    masks.SeesNothing(),
    masks.FiniteFill(),
    not_finite.SdpaLeak(),
    not_finite.HiddenPairs(),
    masks.AllTrue(),
    Scale(),
    heads.Saturation(),
    heads.FewKeys(),
    heads.Uniform(),
    heads.OneKey(),
    heads.ZeroValues(),
    OtherFormula(),
    Precision(),
)
