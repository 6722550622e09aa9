"""Attention you can see into, at the speed and memory of the kernels that hide it.

    attention, plan, weights           compute it; say what would run; look into it at any length
    partial                            attention over some of the keys, which merges with that over others
    Dot Bilinear Additive Cosine Gaussian Score                           how a query meets a key
    Lengths Padding Causal SlidingWindow Documents PrefixLM DenseMask MaskFunction Mask  who may see whom: & | ~
    ALiBi RelativeBias DenseBias BiasFunction Bias                        what is added to the scores: +
    Entropy TopK Received Pool MeanDistance LogSumExp MaxScore Mass SinkShare Output     what weights(...).reduce takes
    Pairwise Spans Added               what a score, a mask, a bias of your own is lowered to
    explain                            the computation, step by step: formulas, shapes, numbers, and why
    nn                                 modules: MultiHeadAttention, AdditiveAttention, positions, …
    watch, use_in_transformers         record the attention of a real model; run one on clearhead
    edit, Knockout Scale Force AddBias      change some heads and queries of a model while it runs
    assert_attends, compare            test what a real model's calls allow, and what its backends compute
    lazy_attentions                    a model's own output.attentions, computed where they are looked at
    survey                             statistics of every head over thousands of texts, on one process or many
    monitor                            entropy, largest logit and sink share of every head while a model trains
    diagnose, Diagnosis, Finding       what is wrong or risky in a call, a module, a recording, a training run
    scaled_dot_product_attention       torch's own signature
    masked_softmax, check_shape        the small parts
    ClearheadError ShapeError UnsupportedError

`help(clearhead.attention)` is where to begin.
"""

from typing import TYPE_CHECKING

from clearhead.base.ended import handle_signals as _handle_signals
from clearhead.base.ended import is_command as _is_command

if _is_command():  # before what follows, which takes seconds
    _handle_signals()

from clearhead import nn as nn
from clearhead._attention import Plan as Plan
from clearhead._attention import attention as attention
from clearhead._attention import masked_softmax as masked_softmax
from clearhead._attention import plan as plan
from clearhead._drop_in import scaled_dot_product_attention as scaled_dot_product_attention
from clearhead._partial import PartialAttention as PartialAttention
from clearhead._partial import partial as partial
from clearhead.base.arrays import check_shape as check_shape
from clearhead.base.errors import ClearheadError as ClearheadError
from clearhead.base.errors import ShapeError as ShapeError
from clearhead.base.errors import UnsupportedError as UnsupportedError
from clearhead.biases import Added as Added
from clearhead.biases import ALiBi as ALiBi
from clearhead.biases import Bias as Bias
from clearhead.biases import BiasFunction as BiasFunction
from clearhead.biases import DenseBias as DenseBias
from clearhead.biases import RelativeBias as RelativeBias
from clearhead.inspection.difference import WeightDifference as WeightDifference
from clearhead.inspection.gradients import WeightGradients as WeightGradients
from clearhead.inspection.reductions.entropy import Entropy as Entropy
from clearhead.inspection.reductions.log_sum_exp import LogSumExp as LogSumExp
from clearhead.inspection.reductions.mass import Mass as Mass
from clearhead.inspection.reductions.max_score import MaxScore as MaxScore
from clearhead.inspection.reductions.mean_distance import MeanDistance as MeanDistance
from clearhead.inspection.reductions.output import Output as Output
from clearhead.inspection.reductions.pool import Pool as Pool
from clearhead.inspection.reductions.received import Received as Received
from clearhead.inspection.reductions.sink_share import SinkShare as SinkShare
from clearhead.inspection.reductions.topk import TopK as TopK
from clearhead.inspection.weights import Weights as Weights
from clearhead.inspection.weights import weights as weights
from clearhead.masks import Causal as Causal
from clearhead.masks import DenseMask as DenseMask
from clearhead.masks import Documents as Documents
from clearhead.masks import Lengths as Lengths
from clearhead.masks import Mask as Mask
from clearhead.masks import MaskFunction as MaskFunction
from clearhead.masks import Padding as Padding
from clearhead.masks import PrefixLM as PrefixLM
from clearhead.masks import SlidingWindow as SlidingWindow
from clearhead.masks import Spans as Spans
from clearhead.scores import Additive as Additive
from clearhead.scores import Bilinear as Bilinear
from clearhead.scores import Cosine as Cosine
from clearhead.scores import Dot as Dot
from clearhead.scores import Gaussian as Gaussian
from clearhead.scores import Pairwise as Pairwise
from clearhead.scores import Score as Score

if TYPE_CHECKING:
    from clearhead import explanation as explanation
    from clearhead import models as models
    from clearhead import report as report
    from clearhead.explanation.diagnosis.diagnose import diagnose as diagnose
    from clearhead.explanation.diagnosis.diagnosis import Diagnosis as Diagnosis
    from clearhead.explanation.diagnosis.finding import Finding as Finding
    from clearhead.explanation.explain import explain as explain
    from clearhead.explanation.explanation import Explanation as Explanation
    from clearhead.models.attention_call import AttentionCall as AttentionCall
    from clearhead.models.chain.steps import Steps as Steps
    from clearhead.models.checks import assert_attends as assert_attends
    from clearhead.models.checks import compare as compare
    from clearhead.models.read.align import align as align
    from clearhead.models.read.audit import Audit as Audit
    from clearhead.models.read.audit import AuditedCall as AuditedCall
    from clearhead.models.read.comparison import ComparedCall as ComparedCall
    from clearhead.models.read.comparison import Comparison as Comparison
    from clearhead.models.read.differences import CallDifference as CallDifference
    from clearhead.models.read.differences import Differences as Differences
    from clearhead.models.read.distinctive import Distinctive as Distinctive
    from clearhead.models.recording import Recording as Recording
    from clearhead.models.recording import load_seen as load_seen
    from clearhead.models.survey import Survey as Survey
    from clearhead.models.survey import survey as survey
    from clearhead.models.table import Table as Table
    from clearhead.models.use.edits.add_bias import AddBias as AddBias
    from clearhead.models.use.edits.base import Edit as Edit
    from clearhead.models.use.edits.edit import edit as edit
    from clearhead.models.use.edits.force import Force as Force
    from clearhead.models.use.edits.knockout import Knockout as Knockout
    from clearhead.models.use.edits.scale import Scale as Scale
    from clearhead.models.use.lazy.lazy_attention import LazyAttention as LazyAttention
    from clearhead.models.use.lazy.lazy_attentions import lazy_attentions as lazy_attentions
    from clearhead.models.use.means import Means as Means
    from clearhead.models.use.monitor import Monitor as Monitor
    from clearhead.models.use.monitor import monitor as monitor
    from clearhead.models.use.on_clearhead import use_in_transformers as use_in_transformers
    from clearhead.models.use.reduced import ReducedCall as ReducedCall
    from clearhead.models.use.reduced import Statistics as Statistics
    from clearhead.models.watch import watch as watch

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "AddBias",
    "Added",
    "Additive",
    "AttentionCall",
    "Audit",
    "AuditedCall",
    "Bias",
    "BiasFunction",
    "Bilinear",
    "CallDifference",
    "Causal",
    "ClearheadError",
    "ComparedCall",
    "Comparison",
    "Cosine",
    "DenseBias",
    "DenseMask",
    "Diagnosis",
    "Differences",
    "Distinctive",
    "Documents",
    "Dot",
    "Edit",
    "Entropy",
    "Explanation",
    "Finding",
    "Force",
    "Gaussian",
    "Knockout",
    "LazyAttention",
    "Lengths",
    "LogSumExp",
    "Mask",
    "MaskFunction",
    "Mass",
    "MaxScore",
    "MeanDistance",
    "Means",
    "Monitor",
    "Output",
    "Padding",
    "Pairwise",
    "PartialAttention",
    "Plan",
    "Pool",
    "PrefixLM",
    "Received",
    "Recording",
    "ReducedCall",
    "RelativeBias",
    "Scale",
    "Score",
    "ShapeError",
    "SinkShare",
    "SlidingWindow",
    "Spans",
    "Statistics",
    "Steps",
    "Survey",
    "Table",
    "TopK",
    "UnsupportedError",
    "WeightDifference",
    "WeightGradients",
    "Weights",
    "align",
    "assert_attends",
    "attention",
    "check_shape",
    "compare",
    "diagnose",
    "edit",
    "explain",
    "explanation",
    "lazy_attentions",
    "load_seen",
    "masked_softmax",
    "models",
    "monitor",
    "nn",
    "partial",
    "plan",
    "report",
    "scaled_dot_product_attention",
    "survey",
    "use_in_transformers",
    "watch",
    "weights",
]


if not TYPE_CHECKING:  # which would take any name to be there

    def __getattr__(name: str) -> object:
        """What explains and what watches models is imported where it is first asked for: more than half of it all."""
        from importlib import import_module

        if name in ("distributed", "explanation", "models", "report"):
            return import_module(f"{__name__}.{name}")
        if name in __all__:
            for folder in ("explanation", "models"):
                found = getattr(import_module(f"{__name__}.{folder}"), name, None)
                if found is not None:
                    globals()[name] = found
                    return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
