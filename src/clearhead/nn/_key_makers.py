"""What makes a module's keys and values, by which a cache knows its module again."""

from __future__ import annotations

import zlib

import torch
from torch import nn

from clearhead.base.tracing import dispatches, freed, readable
from clearhead.base.versions import digest
from clearhead.nn._options import NORMS
from clearhead.nn.rotary_embedding import RotaryEmbedding


def digest_of(module: nn.Module) -> int | None:
    """A number made of what makes a module's keys and values: weights, and settings of norm and rotary. None where the
    weights can't be read. Buffers of a rotary of one's own are left out: they may be tables that grow."""
    w_k, w_v, norm, rotary = (getattr(module, name, None) for name in ("W_k", "W_v", "key_norm", "rotary"))
    tensors = [t for layer in (w_k, w_v, norm) if layer is not None for t in (*layer.parameters(), *layer.buffers())]
    tensors += rotary.parameters() if isinstance(rotary, nn.Module) else ()
    known = all(t.layout is torch.strided and not dispatches(t) and readable(t) and not freed(t) for t in tensors)
    if not tensors or not known:
        return None
    said = [getattr(part, "__qualname__", type(part).__qualname__) for part in (norm, rotary)]
    said += [repr(norm)] if type(norm) in NORMS else []
    if isinstance(rotary, RotaryEmbedding):
        said.append(repr((rotary.dim, rotary.base, rotary.interleaved, rotary.scaling)))
    return hash((*map(digest, tensors), zlib.crc32(repr(said).encode())))  # a text has another hash in each process
