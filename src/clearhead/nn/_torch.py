"""torch.nn.MultiheadAttention: the conversion from and to it, its masks, and its keywords."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clearhead._attention import Arguments
from clearhead.base.arrays import is_dense, refuse_additive, shown
from clearhead.base.errors import ClearheadError, ShapeError, UnsupportedError
from clearhead.base.shapes import Sizes, unflatten
from clearhead.base.torch_state.contexts import without_autocast
from clearhead.base.torch_state.tensor_kind import is_readable
from clearhead.engines import reference
from clearhead.masks.base import Mask
from clearhead.masks.causal import Causal
from clearhead.masks.dense import DenseMask
from clearhead.nn._options import split_factors
from clearhead.problem.guard import guard
from clearhead.problem.problem import make_problem
from clearhead.scores.dot import Dot

if TYPE_CHECKING:
    from clearhead.nn.multi_head_attention import MultiHeadAttention

_CAUSAL = Causal()


def from_torch(cls: type[MultiHeadAttention], module: nn.MultiheadAttention) -> MultiHeadAttention:
    check_torch(module, "MultiHeadAttention")
    has_bias = module.in_proj_bias is not None
    packed = module.in_proj_weight  # None where the widths differ
    apart = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    weights = _split(packed, 3) if packed is not None else [_split(weight, 1)[0] for weight in apart]
    weights += _split(module.out_proj.weight, 1)
    biases = _split(module.in_proj_bias, 3) + _split(module.out_proj.bias, 1) if has_bias else [None] * 4
    with torch.device("meta"):  # the weights are replaced: none are made, and no random numbers are drawn
        widths = {"kdim": module.kdim, "vdim": module.vdim}
        ours = cls(module.embed_dim, module.num_heads, module.dropout, has_bias, **widths)
    for layer, weight, bias in zip((ours.W_q, ours.W_k, ours.W_v, ours.W_o), weights, biases, strict=True):
        layer.weight, layer.bias = weight, bias
    return ours.train(module.training)


def check_torch(module: Any, ours: str) -> None:
    """Refuse all but an nn.MultiheadAttention without keys of its own (add_bias_kv, add_zero_attn)."""
    if not isinstance(module, nn.MultiheadAttention):
        raise ClearheadError(f"from_torch takes a torch.nn.MultiheadAttention; got a {type(module).__name__}.")
    refuse_keys(module.bias_k is not None or module.bias_v is not None or module.add_zero_attn, ours)


def refuse_keys(has_own_keys: bool, ours: str) -> None:
    if has_own_keys:
        raise UnsupportedError(
            "this nn.MultiheadAttention has add_bias_kv=True (bias_k, bias_v) or add_zero_attn=True, a key that is not "
            f"in the input; {ours} has no such key. Append it to key and value yourself."
        )


def take_names(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Before a state dict is loaded: turn the names of an nn.MultiheadAttention into those of MultiHeadAttention.

    Names that are already ours stay, and so does what has no counterpart or is no three weights side by side, which
    torch's loading then reports.
    """
    if f"{prefix}bias_k" in state:
        refuse_keys(True, type(module).__name__)
    for leaf, apart in (("weight", "qkv"), ("bias", "")):
        packed = state.get(f"{prefix}in_proj_{leaf}")
        parts = []
        if isinstance(packed, Tensor) and packed.ndim and not packed.shape[0] % 3:
            parts = [part.clone() for part in state.pop(f"{prefix}in_proj_{leaf}").chunk(3)]
        parts = parts or [state.pop(f"{prefix}{side}_proj_{leaf}", None) for side in apart]
        parts.append(state.pop(f"{prefix}out_proj.{leaf}", None))
        names = ("W_q", "W_k", "W_v", "W_o")[-len(parts) :]
        state |= {f"{prefix}{name}.{leaf}": part for name, part in zip(names, parts, strict=True) if part is not None}


def _split(parameter: Any, parts: int) -> list[Any]:
    """Copies of the parts as parameters, with the original's requires_grad."""
    return [nn.Parameter(part.clone(), parameter.requires_grad) for part in parameter.detach().chunk(parts)]


def to_torch(module: MultiHeadAttention) -> nn.MultiheadAttention:
    objections = _objections(module)
    if objections:
        raise UnsupportedError(
            "torch.nn.MultiheadAttention can't do the same:\n" + "\n".join(f"  - {said}" for said in objections)
        )
    layers = [module.W_q, module.W_k, module.W_v]
    has_bias = module.W_q.bias is not None
    with torch.device("meta"):
        theirs = nn.MultiheadAttention(
            module.embed_dim,
            module.num_heads,
            module.dropout,
            bias=has_bias,
            kdim=module.W_k.weight.shape[1],
            vdim=module.W_v.weight.shape[1],
            batch_first=True,
        )
    if theirs.in_proj_weight is not None:
        theirs.in_proj_weight = _packed([layer.weight for layer in layers])
    else:
        for name, layer in zip(("q", "k", "v"), layers, strict=True):
            setattr(theirs, f"{name}_proj_weight", _packed([layer.weight]))
    theirs.out_proj.weight = _packed([module.W_o.weight])
    if has_bias:
        theirs.in_proj_bias = _packed([layer.bias for layer in layers])
        theirs.out_proj.bias = _packed([module.W_o.bias])
    return theirs.train(module.training)


def _packed(tensors: list[Any]) -> nn.Parameter:
    return nn.Parameter(torch.cat([t.detach() for t in tensors]), any(t.requires_grad for t in tensors))


def _objections(module: MultiHeadAttention) -> list[str]:
    """The reasons why torch's module can't compute the same, in words."""
    found = []
    score, width, embed_dim = module.score, module.head_dim, module.embed_dim
    number, factor = split_factors(score, module.scale, module.temperature, width)
    number = score._default_scale(width) if number is None else number
    same = type(score) is Dot and math.isclose(number, Dot()._default_scale(width), rel_tol=1e-12) and factor is None
    if not same or score.softcap is not None or next(score.parameters(), None) is not None:
        scaled = module.scale is not None or module.temperature is not None
        found.append(f"the score is {score}{', with a scale of its own' * scaled}, and torch's is Dot()")
    if module.num_kv_heads != module.num_heads:
        found.append(f"{module.num_heads} query heads share {module.num_kv_heads} key heads")
    if width * module.num_heads != embed_dim:
        found.append(f"head_dim is {width}, not embed_dim / num_heads = {embed_dim} / {module.num_heads}")
    extra = {
        "a rotary embedding": module.rotary, "a norm of its queries": module.query_norm,
        "a norm of its keys": module.key_norm, "sinks": module.sinks, "a bias of its scores": module.score_bias,
        "a gate": module.gate,
    }  # fmt: skip
    found += [f"it has {said}" for said, part in extra.items() if part is not None]
    layers = [module.W_q, module.W_k, module.W_v, module.W_o]
    if any(type(layer) is not nn.Linear for layer in layers):
        return [*found, "a projection is no plain nn.Linear"]
    shapes = [tuple(layer.weight.shape) for layer in layers]
    groups = [*zip(*(layer.parameters() for layer in layers[:3]), strict=False)]  # the weights, and the biases
    packed = groups if len({shape[1] for shape in shapes[:3]}) == 1 else groups[1:]
    if any(shape[0] != embed_dim for shape in shapes) or {shapes[0][1], shapes[3][1]} != {embed_dim}:
        found.append(f"the weights of W_q, W_k, W_v and W_o have shapes {shapes}, (out, in), not embed_dim's")
    elif len({layer.bias is None for layer in layers}) > 1:
        found.append("some projections have a bias, and some have none")
    elif any(len({p.requires_grad for p in group}) > 1 for group in packed):
        found.append("of W_q, W_k and W_v some are frozen (requires_grad), and torch packs them into one parameter")
    return found


def from_torch_masks(
    attn_mask: Any, key_padding_mask: Any, sizes: Sizes, is_causal: bool, batched: bool
) -> tuple[Mask | None, Tensor | None]:
    """The mask, and the bias added to the scores, for these sizes."""
    batch, heads, queries, keys = sizes.shape
    masks: list[Mask] = [_CAUSAL] if is_causal else []
    added: list[Tensor] = []
    if attn_mask is not None:
        shapes = ((queries, keys), (batch * heads, queries, keys))
        _check_mask(attn_mask, "attn_mask", "(Lq, Lk) or (B·H, Lq, Lk)", shapes)
        if not is_causal:  # torch's module follows the hint without checking it
            whole = attn_mask if attn_mask.ndim == 2 else unflatten(attn_mask, 0, batch, heads)
            _sort(whole[(None,) * (4 - whole.ndim)], masks, added)
    if key_padding_mask is not None:
        shape, words = ((batch, keys), "(B, Lk)") if batched else ((keys,), "(Lk,)")
        _check_mask(key_padding_mask, "key_padding_mask", words, (shape,))
        _sort(key_padding_mask.reshape(batch, 1, 1, keys), masks, added)
    mask = masks[0] & masks[1] if len(masks) == 2 else masks[0] if masks else None
    return mask, added[0] + added[1] if len(added) == 2 else added[0] if added else None


def _check_mask(mask: Any, name: str, words: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    if not is_dense(mask):
        raise ClearheadError(
            f"{name} is {shown(mask)}; expected a plain tensor, as torch.nn.MultiheadAttention has it, for the padded "
            "batch where the inputs are nested. MultiHeadAttention takes Masks, such as Causal()."
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        refuse_additive(mask, name, f"{name}={{}}")
        raise ClearheadError(
            f"{name} has dtype {mask.dtype}, shape {tuple(mask.shape)}; expected bool, True where a query may not "
            "attend, or float, added to the scores. Of a tokenizer's mask pass key_padding_mask=attention_mask == 0."
        )
    if tuple(mask.shape) not in shapes:
        raise ShapeError(
            f"{name} has shape {tuple(mask.shape)}; expected {words} = {' or '.join(map(str, shapes))}. Inputs are "
            "(L, B, E), or (B, L, E) in a module with batch_first=True."
        )


def _sort(tensor: Tensor, masks: list[Mask], added: list[Tensor]) -> None:
    """Bool tensors, and float ones of 0 and −∞ alone, become masks, which skip work; others are added."""
    if tensor.dtype == torch.bool:
        masks.append(DenseMask(~tensor))
    elif _only_blocks(tensor):
        masks.append(DenseMask(tensor == 0))
    else:
        added.append(tensor)


def _only_blocks(tensor: Tensor) -> bool:
    """Whether a float mask is zeros and minus infinities: torch's layers convert every bool mask to that."""
    if tensor.requires_grad or not is_readable(tensor):
        return False
    return bool(((tensor == 0) | (tensor == -torch.inf)).all())


def in_full(call: Arguments, average: bool) -> Tensor:
    """The whole matrix of the weights, before dropout, with gradients: (B, Lq, Lk), or (B, H, Lq, Lk)."""
    problem = make_problem(call.query, call.key, mask=call.mask, bias=call.bias, as_written=True)
    with without_autocast(problem.sizes.device):
        weights = reference.weights(problem if problem.mode.compiled else guard(problem)).to(problem.query.dtype)
    return weights.mean(1) if average else weights
