"""Real models: loading them, and what watches them."""

from clearhead.models.attending import assert_attends as assert_attends
from clearhead.models.attention_call import AttentionCall as AttentionCall
from clearhead.models.audit import Audit as Audit
from clearhead.models.audited_call import AuditedCall as AuditedCall
from clearhead.models.backends import compare as compare
from clearhead.models.comparison import ComparedCall as ComparedCall
from clearhead.models.comparison import Comparison as Comparison
from clearhead.models.edit import edit as edit
from clearhead.models.edits.add_bias import AddBias as AddBias
from clearhead.models.edits.base import Edit as Edit
from clearhead.models.edits.force import Force as Force
from clearhead.models.edits.knockout import Knockout as Knockout
from clearhead.models.edits.scale import Scale as Scale
from clearhead.models.loading import bundled as bundled
from clearhead.models.loading import load as load
from clearhead.models.means import Means as Means
from clearhead.models.monitor import Monitor as Monitor
from clearhead.models.monitor import monitor as monitor
from clearhead.models.recording import Recording as Recording
from clearhead.models.recording import load_seen as load_seen
from clearhead.models.reduced import ReducedCall as ReducedCall
from clearhead.models.statistics import Statistics as Statistics
from clearhead.models.steps import Steps as Steps
from clearhead.models.use import use_in_transformers as use_in_transformers
from clearhead.models.watch import watch as watch
