"""Keywords with which other libraries and code for teaching build attention, and what to write here instead."""

from __future__ import annotations

_CALLS = "mask=Causal() in each call"
_FIRST = "nothing: the batch comes first"
_NO_PROJECTION = "nothing: it has no projections, and takes any widths; MultiHeadAttention(embed_dim, num_heads) has"

# Dive into Deep Learning; torch; transformers; Keras; timm and others
OF_MULTI_HEAD = {
    "num_hiddens": "embed_dim=num_hiddens",
    "query_size": "nothing where it is num_hiddens; where it is not, embed_dim=query_size, head_dim=num_hiddens // "
    "num_heads: the output is as wide as the query",
    "key_size": "kdim=key_size",
    "value_size": "vdim=value_size",
    "use_bias": "bias=use_bias",
    "qkv_bias": "bias=qkv_bias, which holds for all four projections",
    "d_model": "embed_dim=d_model",
    "hidden_size": "embed_dim=hidden_size",
    "dim": "embed_dim=dim",
    "num_attention_heads": "num_heads=num_attention_heads",
    "num_key_value_heads": "num_kv_heads=num_key_value_heads",
    "nhead": "num_heads=nhead",
    "n_heads": "num_heads=n_heads",
    "key_dim": "head_dim=key_dim; values have heads of the same width",
    "value_dim": "head_dim=value_dim; queries and keys have heads of the same width",
    "attention_dropout": "dropout=attention_dropout",
    "attn_drop": "dropout=attn_drop",
    "dropout_p": "dropout=dropout_p",
    "batch_first": _FIRST,
    "add_bias_kv": "nothing: there are no keys that are not in the input; append one to key and value yourself",
    "add_zero_attn": "sinks=True, a learnt logit of each head in place of the key of zeros",
    "causal": _CALLS,
    "is_causal": _CALLS,
    "heads": "num_heads=heads",
    "dim_head": "head_dim=dim_head",
    "kv_heads": "num_kv_heads=kv_heads",
    "softcap": "score=Dot(softcap=softcap)",
    "attn_logit_softcapping": "score=Dot(softcap=attn_logit_softcapping)",
    "sliding_window": "mask=Causal() & SlidingWindow(before=sliding_window - 1) in each call",
    "qk_norm": "query_norm=torch.nn.RMSNorm(head_dim), key_norm=torch.nn.RMSNorm(head_dim)",
    "rope_theta": "rotary=RotaryEmbedding(head_dim, base=rope_theta)",
    **dict.fromkeys(("rope", "use_rope", "rotary_emb"), "rotary=RotaryEmbedding(head_dim)"),
}
OF_ADDITIVE = {
    "num_hiddens": "hidden_dim=num_hiddens",
    "query_size": "query_dim=query_size",
    "key_size": "key_dim=key_size",
    "value_size": "nothing: values of any width are averaged as they are",
    "embed_dim": "query_dim=embed_dim, and hidden_dim=…, the width of the tanh network",
    "kdim": "key_dim=kdim",
    "vdim": "nothing: values of any width are averaged as they are",
    "units": "hidden_dim=units",
    "num_heads": "nothing: it has one head; MultiHeadAttention(embed_dim, num_heads, score=Additive(head_dim, "
    "head_dim, hidden_dim=…)) has several",
    "bias": "nothing: its layers have no bias",
    "dropout_p": "dropout=dropout_p",
    "batch_first": _FIRST,
}
OF_DOT_PRODUCT = {
    **dict.fromkeys(("embed_dim", "num_heads", "num_hiddens", "query_size", "key_size", "value_size"), _NO_PROJECTION),
    **dict.fromkeys(("kdim", "vdim", "bias"), _NO_PROJECTION),
    "scale": "nothing: it divides by √E; attention(query, key, value, scale=scale) takes another scale",
    "dropout_p": "dropout=dropout_p",
    "attention_dropout": "dropout=attention_dropout",
    "batch_first": _FIRST,
}
OF_POSITIONS = {
    **{name: f"embed_dim={name}" for name in ("num_hiddens", "d_model", "dim", "hidden_size")},
    "max_len": "nothing: the waves are computed for every position that is asked for",
}
OF_ROTARY = {
    **{name: f"dim={name}" for name in ("head_dim", "rotary_dim")},
    **{name: f"base={name}" for name in ("theta", "rope_theta")},
    **dict.fromkeys(
        ("max_len", "max_seq_len", "max_position_embeddings"),
        "nothing: the angles are computed for every position that is asked for",
    ),
}
OF_CACHE = {
    **{name: f"capacity={name}" for name in ("max_len", "max_length", "max_seq_len", "max_cache_len")},
    **{name: f"window={name}" for name in ("window_size", "sliding_window")},
    **{name: f"first={name}" for name in ("sinks", "num_sink_tokens")},
}
OLDER_MULTI_HEAD = (
    "key_size, query_size, value_size, num_hiddens, num_heads, dropout",
    "MultiHeadAttention(num_hiddens, num_heads, dropout, kdim=key_size, vdim=value_size)",
)
OLDER_ADDITIVE = (
    "key_size, query_size, num_hiddens, dropout",
    "AdditiveAttention(num_hiddens, dropout, query_dim=query_size, key_dim=key_size)",
)
