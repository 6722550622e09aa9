"""Modules: attention and positions, for building models."""

from clearhead.base.public_names import publish as _publish
from clearhead.nn._record import set_recording as set_recording
from clearhead.nn.additive_attention import AdditiveAttention as AdditiveAttention
from clearhead.nn.dot_product_attention import DotProductAttention as DotProductAttention
from clearhead.nn.key_value_cache import KeyValueCache as KeyValueCache
from clearhead.nn.learned_positional_encoding import LearnedPositionalEncoding as LearnedPositionalEncoding
from clearhead.nn.multi_head_attention import MultiHeadAttention as MultiHeadAttention
from clearhead.nn.prepared_keys import PreparedKeys as PreparedKeys
from clearhead.nn.rotary_embedding import RotaryEmbedding as RotaryEmbedding
from clearhead.nn.rotary_scaling import RotaryScaling as RotaryScaling
from clearhead.nn.sinusoidal_positional_encoding import SinusoidalPositionalEncoding as SinusoidalPositionalEncoding
from clearhead.nn.torch_multihead_attention import TorchMultiheadAttention as TorchMultiheadAttention

__all__ = _publish(globals())
