"""Tools for real models: to load them, to record and change their attention, and to read the records."""

from typing import TYPE_CHECKING

from clearhead.base.renamed import missing as _missing
from clearhead.base.renamed import public as _public
from clearhead.inspection.low_rank import SVD as SVD
from clearhead.inspection.low_rank import LowRank as LowRank
from clearhead.models.attention_call import AttentionCall as AttentionCall
from clearhead.models.causes.attribution import AttributedCall as AttributedCall
from clearhead.models.causes.attribution import LogitAttribution as LogitAttribution
from clearhead.models.causes.attribution import logit_attribution as logit_attribution
from clearhead.models.causes.circuits import Circuits as Circuits
from clearhead.models.causes.circuits import circuits as circuits
from clearhead.models.causes.estimated import attribution_patching as attribution_patching
from clearhead.models.causes.metrics import kl as kl
from clearhead.models.causes.metrics import logit_difference as logit_difference
from clearhead.models.causes.metrics import next_token_loss as next_token_loss
from clearhead.models.causes.projections import Projections as Projections
from clearhead.models.causes.sweep import Sweep as Sweep
from clearhead.models.causes.sweep import sweep as sweep
from clearhead.models.chain.generation import Generation as Generation
from clearhead.models.checks import ComparedCall as ComparedCall
from clearhead.models.checks import Comparison as Comparison
from clearhead.models.checks import assert_attends as assert_attends
from clearhead.models.checks import compare_backends as compare_backends
from clearhead.models.loading import bundled as bundled
from clearhead.models.loading import load as load
from clearhead.models.read.audit import Audit as Audit
from clearhead.models.read.audit import AuditedCall as AuditedCall
from clearhead.models.read.differences import CallDifference as CallDifference
from clearhead.models.read.differences import Differences as Differences
from clearhead.models.read.distinctive import Distinctive as Distinctive
from clearhead.models.read.tokens import match_tokens as match_tokens
from clearhead.models.recording import Recording as Recording
from clearhead.models.recording import load_recording as load_recording
from clearhead.models.show.framed import Framed as Framed
from clearhead.models.survey import Survey as Survey
from clearhead.models.survey import survey as survey
from clearhead.models.table import Table as Table
from clearhead.models.use.edits.edit import edit as edit
from clearhead.models.use.lazy.lazy_attention import LazyAttention as LazyAttention
from clearhead.models.use.lazy.lazy_attentions import lazy_attentions as lazy_attentions
from clearhead.models.use.means import Means as Means
from clearhead.models.use.monitor import Monitor as Monitor
from clearhead.models.use.monitor import monitor as monitor
from clearhead.models.use.reduced import ReducedCall as ReducedCall
from clearhead.models.use.reduced import Statistics as Statistics
from clearhead.models.use.run_on_clearhead import run_on_clearhead as run_on_clearhead
from clearhead.models.watch import statistics as statistics
from clearhead.models.watch import watch as watch

__all__ = _public(globals())

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        raise _missing(__name__, name)
