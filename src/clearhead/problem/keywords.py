"""Keywords of other libraries' attention, and what to write here instead."""

from __future__ import annotations

from collections.abc import Mapping

from clearhead.base.built import refuse

_WINDOW = (
    "mask=SlidingWindow(before=window_size[0], after=window_size[1]); −1, no limit, is a large number here, and where "
    "Lq ≠ Lk flash-attn's window is that of align='lower_right'"
)
_LENGTHS = "mask=Documents.from_cu_seqlens(cu_seqlens_q, cu_seqlens_k)"
_LONGEST = "nothing: the lengths follow from the mask"
_PADDING = "mask=Padding(~key_padding_mask), since True means here that a key may be seen"
_WEIGHTS = "nothing: the output is never a tuple, and weights(query, key, …) has the weights of the call"
_LAST = "nothing: the output is never a tuple, and module.attention_weights has the weights of the call"
_CAUSAL = "mask=Causal(); where Lq ≠ Lk also align='{}', as {} has it"
_BUILT = "MultiHeadAttention(…, score=Dot({0}={1})), where the module is built"
_DROPOUT = "dropout= where the module is built; it holds while training alone"
_GROUPS = "nothing: key heads that divide the query heads are shared by groups of them"
_MASK_MOD = "mask=MaskFunction(mask_mod), a function of the same four numbers"

# each with what to pass to a function, and what to pass to a module
_INSTEAD = {
    # torch.nn.functional.scaled_dot_product_attention, torch.nn.MultiheadAttention
    "attn_mask": (
        "mask=attn_mask, where True means 'may attend'; of nn.MultiheadAttention, where it means the opposite, "
        "mask=~attn_mask",
        "a bool attn_mask, True where a query may not attend, is mask=~attn_mask here; a float one mask=attn_mask; of "
        "shape (B·H, Lq, Lk), .unflatten(0, (B, H)) first",
    ),
    "is_causal": (_CAUSAL.format("upper_left", "torch"), "mask=Causal()"),
    "enable_gqa": (_GROUPS, "MultiHeadAttention(…, num_kv_heads=…), where the module is built"),
    "key_padding_mask": (_PADDING,) * 2,
    "need_weights": (_WEIGHTS, _LAST),
    "average_attn_weights": (
        "nothing: weights(query, key, …)[...].mean(1) is the mean over the heads",
        "nothing: module.attention_weights[...].mean(1) is the mean over the heads",
    ),
    "dropout": ("dropout_p=dropout", _DROPOUT),
    "dropout_p": ("nothing: weights are those before dropout, and parts of the keys are merged without it", _DROPOUT),
    "scale": ("", _BUILT.format("scale", "scale")),
    # flash-attn
    "causal": (_CAUSAL.format("lower_right", "flash-attn"), "mask=Causal()"),
    "softmax_scale": ("scale=softmax_scale", _BUILT.format("scale", "softmax_scale")),
    "softcap": ("score=Dot(softcap=softcap)", _BUILT.format("softcap", "softcap")),
    "window_size": (_WINDOW,) * 2,
    "alibi_slopes": (
        "bias=ALiBi(num_heads), whose slopes may be set",
        "bias=ALiBi(num_heads), whose slopes may be set",
    ),
    "cu_seqlens_q": (_LENGTHS,) * 2,
    "cu_seqlens_k": (_LENGTHS,) * 2,
    "max_seqlen_q": (_LONGEST,) * 2,
    "max_seqlen_k": (_LONGEST,) * 2,
    "return_attn_probs": (_WEIGHTS, _LAST),
    # FlexAttention
    "block_mask": ("mask=MaskFunction(mask_mod), with the function that the block mask was made from",) * 2,
    "mask_mod": (_MASK_MOD,) * 2,
    "score_mod": (
        "score=Dot().then(score_mod), with the same function of five arguments",
        "MultiHeadAttention(…, score=Dot().then(score_mod)), where the module is built",
    ),
    "return_lse": (
        "nothing: partial(query, key, value).logsumexp has it",
        "nothing: module.attention_weights.logsumexp() has it",
    ),
    # transformers, xformers, x-transformers, Keras
    "attention_mask": ("mask=Padding(attention_mask), of a tokenizer's (B, Lk)",) * 2,
    "output_attentions": (_WEIGHTS, _LAST),
    "return_attention_scores": (_WEIGHTS, _LAST),
    "attn_bias": ("bias=attn_bias",) * 2,
    "use_causal_mask": ("mask=Causal()",) * 2,
    "position_ids": ("", "positions=position_ids, in a module that was built with rotary="),
    "past_key_values": ("", "cache=KeyValueCache(), one for each module, which the calls fill"),
    # code for teaching
    "valid_len": ("valid_lens=valid_len",) * 2,
    "lengths": ("valid_lens=lengths",) * 2,
    "explain": (
        "nothing: ch.explain(query, key, value, …), with the same arguments, shows the call step by step",
        "nothing: ch.explain(module, query, key, value, …), with the same arguments, shows the call step by step",
    ),
    "return_weights": (_WEIGHTS, _LAST),
}
# arguments of other functions of clearhead, or of what builds a module
OWN = {
    "score": ("", "MultiHeadAttention(…, score=score), where the module is built; AdditiveAttention has its own"),
    "bias": ("", "attention(query, key, value, bias=bias) with its other arguments, or a MultiHeadAttention"),
    "sinks": ("", "MultiHeadAttention(…, sinks=True), where the module is built: it learns them"),
    "layout": ("", "nothing: the length stands before the width, (…, L, E), and a module cuts the heads itself"),
    "engine": (
        "",
        "nothing: clearhead chooses for a module; attention(query, key, value, engine=engine) takes an engine, for "
        "heads that are projected already",
    ),
    **{
        name: (
            f"ch.explain(query, key, value, {name}={name}), with the other arguments, shows the call step by step",
            f"ch.explain(module, query, key, value, {name}={name}), with the other arguments, shows it step by step",
        )
        for name in ("at", "tokens", "source_tokens", "gradients", "title", "digits")
    },
}
_KEEP = "valid_lens={0}, a Mask or a bool tensor, True where an entry counts; a float tensor is added: scores + {0}"
_OF_SOFTMAX = {
    "mask": _KEEP.format("mask"),
    "attn_mask": _KEEP.format("attn_mask"),
    "valid_len": "valid_lens=valid_len",
    "lengths": "valid_lens=lengths",
    "axis": "dim=axis",
}


def refuse_keywords(who: str, given: Mapping[str, object], module: bool = False) -> None:
    """Raise an error that says what to pass for the keywords of other libraries; for others, Python's TypeError.

    `who`: the name of the function, or of the module's class.
    """
    if not given:
        return
    said = {name: (OWN | _INSTEAD).get(name, ("", ""))[module] for name in given}
    own = given.keys() <= OWN.keys()
    drop_in = "TorchMultiheadAttention" if module else "scaled_dot_product_attention"
    theirs = "torch.nn.MultiheadAttention" if module else "torch.nn.functional"
    refuse(
        who,
        f"{who}.forward" if module else who,
        said,
        f"other {'functions of clearhead have' if own else 'libraries have attention with'} such arguments",
        "" if own else f"\n{drop_in} is called as in {theirs}.",
    )


def refuse_of_softmax(given: Mapping[str, object]) -> None:
    """Raise an error for what `masked_softmax` has under another name, or Python's TypeError."""
    said = {name: _OF_SOFTMAX.get(name, "") for name in given}
    refuse("masked_softmax", "masked_softmax", said, "lengths and masks are one argument, valid_lens")
