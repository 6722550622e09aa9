"""Attention you can see into, at the speed and memory of the kernels that hide it.

    attention, plan, weights           compute it; say what would run; look into it at any length
    partial                            attention over some of the keys; two such results merge
    Dot Bilinear Additive Cosine Gaussian                                           how a query meets a key
    Lengths Padding Causal SlidingWindow FirstKeys Documents PrefixLM DenseMask MaskFunction
                                       who may see whom: & | ~
    ALiBi RelativeBias DenseBias BiasFunction                                       what is added to the scores: +
    explain                            the computation, step by step: formulas, shapes, numbers, and why
    diagnose                           what is wrong or risky in a call, a module, a recording, a training run
    watch, edit                        record the attention of a real model; change some of its heads while it runs
    audit, assert_attends              does a model attend as expected, whatever computes it?
    scaled_dot_product_attention       torch's own signature
    masked_softmax, check_shape        the small parts
    show_versions                      what runs here, for a report of an error
    ClearheadError ShapeError UnsupportedError

    nn                                 modules: MultiHeadAttention, AdditiveAttention, positions, …
    reductions                         statistics for weights(…).reduce: Entropy, TopK, Received, …
    edits                              changes for edit: Knockout, ScaleHeads, ForceMask, AddBias
    models                             more about real models: survey, monitor, statistics, sweep, …
    distributed                        a sequence that is shared out over processes
    exercises                          checks for the exercises of a course
    extend, testing                    base classes for parts of your own, and their checks
    explanation, results               the classes of the results of explain, diagnose, plan, partial and weights

`help(clearhead.attention)` is where to begin.
"""

from typing import TYPE_CHECKING

from clearhead.base.output.ended import handle_signals as _handle_signals
from clearhead.base.output.ended import is_command as _is_command

if _is_command():  # before the imports below, which take seconds
    _handle_signals()

from clearhead import extend as extend
from clearhead import nn as nn
from clearhead import reductions as reductions
from clearhead import results as results
from clearhead._attention import attention as attention
from clearhead._attention import masked_softmax as masked_softmax
from clearhead._drop_in import scaled_dot_product_attention as scaled_dot_product_attention
from clearhead._partial import partial as partial
from clearhead._versions import show_versions as show_versions
from clearhead.base.arrays import check_shape as check_shape
from clearhead.base.errors import ClearheadError as ClearheadError
from clearhead.base.errors import ShapeError as ShapeError
from clearhead.base.errors import UnsupportedError as UnsupportedError
from clearhead.base.public_names import publish as _publish
from clearhead.base.public_names import unknown_name as _unknown_name
from clearhead.biases import ALiBi as ALiBi
from clearhead.biases import BiasFunction as BiasFunction
from clearhead.biases import DenseBias as DenseBias
from clearhead.biases import RelativeBias as RelativeBias
from clearhead.engines.native.bindings import warn_without_kernels as _warn_without_kernels
from clearhead.inspection.weights import weights as weights
from clearhead.masks import Causal as Causal
from clearhead.masks import DenseMask as DenseMask
from clearhead.masks import Documents as Documents
from clearhead.masks import FirstKeys as FirstKeys
from clearhead.masks import Lengths as Lengths
from clearhead.masks import MaskFunction as MaskFunction
from clearhead.masks import Padding as Padding
from clearhead.masks import PrefixLM as PrefixLM
from clearhead.masks import SlidingWindow as SlidingWindow
from clearhead.scores import Additive as Additive
from clearhead.scores import Bilinear as Bilinear
from clearhead.scores import Cosine as Cosine
from clearhead.scores import Dot as Dot
from clearhead.scores import Gaussian as Gaussian

if TYPE_CHECKING:
    from clearhead import distributed as distributed
    from clearhead import edits as edits
    from clearhead import exercises as exercises
    from clearhead import explanation as explanation
    from clearhead import models as models
    from clearhead import testing as testing
    from clearhead.explanation.diagnosis.diagnose import diagnose as diagnose
    from clearhead.explanation.explain import explain as explain
    from clearhead.explanation.plan import plan as plan
    from clearhead.models.audits.audit import assert_attends as assert_attends
    from clearhead.models.audits.audit import audit as audit
    from clearhead.models.edits.edit import edit as edit
    from clearhead.models.watch import watch as watch

__version__ = "0.1.0"

# The modules that explain and watch are imported at the first use: they take more than half of the import's time.
_LATER = ("distributed", "edits", "exercises", "explanation", "models", "testing")
_ABOVE = dict.fromkeys(("diagnose", "explain", "plan"), "explanation") | dict.fromkeys(
    ("assert_attends", "audit", "edit", "watch"), "models"
)
__all__ = sorted({*_publish(globals()), "extend", "nn", "reductions", "results", *_LATER, *_ABOVE})

_warn_without_kernels()

if not TYPE_CHECKING:  # with it, a type checker would accept any name

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name in _LATER:
            return import_module(f"{__name__}.{name}")
        if name not in _ABOVE:
            raise _unknown_name(__name__, name)
        globals()[name] = found = getattr(import_module(f"{__name__}.{_ABOVE[name]}"), name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
