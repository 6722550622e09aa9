"""Real models: loading them, and what watches them."""

from clearhead.models.attention_call import AttentionCall as AttentionCall
from clearhead.models.lazy_attention import LazyAttention as LazyAttention
from clearhead.models.lazy_attentions import lazy_attentions as lazy_attentions
from clearhead.models.loading import bundled as bundled
from clearhead.models.loading import load as load
from clearhead.models.means import Means as Means
from clearhead.models.recording import Recording as Recording
from clearhead.models.recording import load_seen as load_seen
from clearhead.models.reduced import ReducedCall as ReducedCall
from clearhead.models.statistics import Statistics as Statistics
from clearhead.models.use import use_in_transformers as use_in_transformers
from clearhead.models.watch import watch as watch
