"""The error for a keyword argument that a function or a constructor lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import Any

from clearhead.base.errors import ClearheadError

_ATTENTION_WEIGHTS = "weights(query, key, …) or module.attention_weights, since the output is no tuple"

# What to write for each keyword: the first of these whose own keyword the called function has, or that names none.
_HINTS: dict[str, tuple[str, ...]] = {
    # Dive into Deep Learning
    "num_hiddens": ("embed_dim=num_hiddens", "hidden_dim=num_hiddens"),
    "query_size": ("embed_dim=query_size, head_dim=num_hiddens // num_heads", "query_dim=query_size"),
    "key_size": ("kdim=key_size", "key_dim=key_size"),
    "value_size": ("vdim=value_size",),
    "use_bias": ("bias=use_bias",),
    "valid_len": ("valid_lens=valid_len",),
    # torch
    "attn_mask": (
        "mask=attn_mask, or mask=~attn_mask where True hides a pair, as in nn.MultiheadAttention",
        "valid_lens=attn_mask",
    ),
    "key_padding_mask": ("mask=Padding(~key_padding_mask)",),
    "is_causal": ("mask=Causal(), where Lq ≠ Lk with align='upper_left'",),
    "need_weights": (_ATTENTION_WEIGHTS,),
    "dropout_p": ("dropout=dropout_p", "attention(…, dropout_p=dropout_p), or dropout= where a module is built"),
    "dropout": ("dropout_p=dropout", "MultiHeadAttention(…, dropout=dropout)"),
    "scale": ("score=Dot(scale=scale)", "MultiHeadAttention(…, score=Dot(scale=scale))"),
    "enable_gqa": ("nothing, since fewer key heads than query heads are always shared by groups of them",),
    "batch_first": ("nothing, since the batch comes first",),
    "d_model": ("embed_dim=d_model",),
    "nhead": ("num_heads=nhead",),
    # transformers
    "attention_mask": ("mask=Padding(attention_mask)", "valid_lens=attention_mask"),
    "output_attentions": (_ATTENTION_WEIGHTS,),
    "hidden_size": ("embed_dim=hidden_size",),
    "num_attention_heads": ("num_heads=num_attention_heads",),
    "num_key_value_heads": ("num_kv_heads=num_key_value_heads",),
    **{
        name: (
            f"before={name} - 1",
            f"window={name}",
            f"mask=Causal() & SlidingWindow(before={name} - 1)",
            f"nothing, and mask=Causal() & SlidingWindow(before={name} - 1) in each call",
        )
        for name in ("sliding_window", "window")
    },
    "rope_theta": ("base=rope_theta", "rotary=RotaryEmbedding(head_dim, base=rope_theta)"),
    "position_ids": ("positions=position_ids",),
    "past_key_values": ("cache=KeyValueCache()",),
    # flash-attn and FlexAttention
    "causal": (
        "mask=Causal(), where Lq ≠ Lk with align='lower_right'",
        "bidirectional=not causal",
        "nothing, and mask=Causal() in each call",
    ),
    "softmax_scale": ("scale=softmax_scale", "MultiHeadAttention(…, score=Dot(scale=softmax_scale))"),
    "softcap": ("score=Dot(softcap=softcap)", "MultiHeadAttention(…, score=Dot(softcap=softcap))"),
    "window_size": (
        "before=window_size - 1",
        "window=window_size",
        "mask=SlidingWindow(before=window_size[0], after=window_size[1])",
    ),
    "score_mod": ("score=Dot().then(score_mod)", "MultiHeadAttention(…, score=Dot().then(score_mod))"),
    "axis": ("dim=axis",),
    "max_len": ("capacity=max_len", "nothing, since any number of positions is computed"),
    # clearhead's other functions and modules
    "mask": ("valid_lens=mask", "nothing, and mask=mask in each call"),
    "bias": ("attention(query, key, value, bias=bias)",),
    "score": ("MultiHeadAttention(…, score=score)",),
    "sinks": ("first=sinks", "MultiHeadAttention(…, sinks=True)"),
    "layout": ("nothing, since the length comes before the width",),
    "engine": ("attention(query, key, value, engine=engine)",),
    **{
        name: (f"explain(…, {name}={name})",)
        for name in ("at", "tokens", "source_tokens", "gradients", "title", "digits")
    },
}


def raise_unknown_keywords(who: str, function: Callable[..., Any], given: Mapping[str, object]) -> None:
    """Raise an error for the keywords that `function` lacks: what to write instead, or its nearest keyword.

    Args:
        who: The name of the function in the message.
        function: What is called; its signature has the keywords that there are.
        given: The keyword arguments of the call.

    Raises:
        ClearheadError: If each unknown keyword has a hint.
        TypeError: If one has none, as Python's own.
    """
    variadic = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
    own = [name for name, one in signature(function).parameters.items() if one.kind not in variadic]
    lines = []
    for name in (name for name in given if name not in own):
        hints = (hint for hint in _HINTS.get(name, ()) if _fits(hint, own))
        if (hint := next(hints, None)) is None:
            nearest = get_close_matches(name, own, 1, 0.0)
            suggestion = f"; the nearest is {nearest[0]!r}" if nearest else ""
            raise TypeError(f"{who}() got an unexpected keyword argument {name!r}{suggestion}")
        lines.append(f"{who}() takes no {name}. Write {hint}.")
    if lines:
        raise ClearheadError("\n".join(lines))


def _fits(hint: str, own: list[str]) -> bool:
    keyword = hint.partition("=")[0]
    return keyword in own or not keyword.isidentifier()


def add_keyword_hints(namespace: Mapping[str, Any]) -> None:
    """Let the constructors of the classes in a namespace raise these errors; their signatures stay."""
    for cls in namespace.values():
        if isinstance(cls, type) and cls.__module__.startswith("clearhead.") and "__init__" in vars(cls):
            _wrap_constructor(cls)


def _wrap_constructor(cls: Any) -> None:
    init = cls.__init__
    if hasattr(init, "__wrapped__"):
        return

    @wraps(init)
    def init_with_hints(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except TypeError:
            raise_unknown_keywords(cls.__name__, cls, kwargs)
            raise

    cls.__init__ = init_with_hints
