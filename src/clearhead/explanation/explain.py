"""explain()."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any, TypedDict, Unpack, overload

import numpy as np
import torch
from torch import Tensor, nn

from clearhead._attention import Arguments, LengthsLike, Rows, listed_scores, masked_softmax, softmax_mask
from clearhead.base.arrays import Array, ArrayT, check_float, to_tensor_float
from clearhead.base.errors import ClearheadError, UnsupportedError
from clearhead.base.keyword_hints import raise_unknown_keywords
from clearhead.base.output.words import TokensLike
from clearhead.base.positions import check_align
from clearhead.base.shapes import AlignLike
from clearhead.base.torch_state.contexts import without_autocast
from clearhead.base.torch_state.tensor_kind import is_readable
from clearhead.explanation.call_arguments import AttentionOptions, bind_attention
from clearhead.explanation.explanation import Explanation, Part, shown_as
from clearhead.explanation.gradients import leaves, with_gradients
from clearhead.explanation.inputs import drawn
from clearhead.explanation.modules.captured import as_ours, bind_module, capture_call
from clearhead.explanation.modules.multi_head import explain_multi_head
from clearhead.explanation.modules.positions import Positional, explain_positions
from clearhead.explanation.of_problem import attention_parts, explain_softmax, input_steps, lead_axes
from clearhead.explanation.shown import Asked, choose, settle
from clearhead.inspection.matrix import Index
from clearhead.masks.base import Mask, MaskLike
from clearhead.nn._record import RecordingModule
from clearhead.nn.multi_head_attention import MultiHeadAttention
from clearhead.nn.torch_multihead_attention import TorchMultiheadAttention
from clearhead.problem.nested import is_nested
from clearhead.scores.dot import Dot

Gradients = bool | Array | None
Words = TokensLike | None


class Display(TypedDict, total=False):
    """What is explained, and how it is shown."""

    at: Index
    tokens: Words
    source_tokens: Words
    gradients: Gradients
    title: str | None
    digits: int | None


class ExplainedCall(AttentionOptions, Display, total=False):
    """The options beside query, key and value."""


class ExplainedSoftmax(Display, total=False):
    """The options beside scores."""

    mask: MaskLike
    valid_lens: LengthsLike
    align: AlignLike


@overload
def explain(query: ArrayT, key: ArrayT, value: ArrayT, **options: Unpack[ExplainedCall]) -> Explanation: ...


@overload
def explain(query: Array | Rows, **options: Unpack[ExplainedSoftmax]) -> Explanation: ...


@overload
def explain(
    query: nn.Module | Callable[..., object],
    *inputs: object,
    at: Index = None,
    tokens: Words = None,
    source_tokens: Words = None,
    gradients: Gradients = False,
    title: str | None = None,
    digits: int | None = None,
    **keywords: object,
) -> Explanation: ...


def explain(
    *inputs: Any,
    at: Any = None,
    tokens: Words = None,
    source_tokens: Words = None,
    gradients: Any = False,
    title: Any = None,
    digits: Any = None,
    **options: Any,
) -> Explanation:
    """Explain how attention computes its output, step by step: formulas, shapes, numbers, and reasons.

    >>> import torch, clearhead as ch
    >>> query, key, value = torch.rand(2, 4), torch.rand(3, 4), torch.rand(3, 2)
    >>> explanation = ch.explain(query, key, value)
    >>> [step.name for step in explanation.steps if not step.given]
    ['products', 'scores', 'maximum', 'numerator', 'total', 'weights', 'wrong_axis', 'output']
    >>> torch.allclose(explanation["output"], ch.attention(query, key, value), atol=1e-6)
    True
    >>> scores = torch.tensor([[0.0, 1.0, 5.0], [2.0, 2.0, 5.0]])
    >>> ch.explain(scores, valid_lens=[2])["weights"]                      # of scores of your own
    tensor([[0.2689, 0.7311, 0.0000],
            [0.5000, 0.5000, 0.0000]])
    >>> said = ch.explain(query, key, value, tokens=["Das", "Tier"], source_tokens=["the", "animal", "."])
    >>> "0 Das" in str(said) and "1 animal" in str(said)
    True
    >>> attend, x = ch.nn.MultiHeadAttention(embed_dim=8, num_heads=2), torch.rand(1, 5, 8)
    >>> explanation = ch.explain(attend, x, x, x, mask=ch.Causal(), at=(0, 1, 3))        # head 1, query 3
    >>> torch.allclose(explanation["result"], attend(x, x, x, mask=ch.Causal())[:, 3:4], atol=1e-6)
    True

    `explain(query, key, value, score=, mask=, valid_lens=, bias=, scale=, sinks=, align=, dropout_p=, layout=)`: the
    arguments of `attention`. In any layout the steps have the heads before the length.
    `explain(scores, mask=, valid_lens=, align=)`: scores (..., Lq, Lk) or (Lk,) of your own, and the softmax over the
    keys that a mask and lengths allow. `explain(masked_softmax, scores, valid_lens)`: that function, and its arguments.
    `explain(module, *inputs, **keywords)`: a module of `clearhead.nn`, or an `nn.MultiheadAttention`, and the arguments
    of its call. The module is not changed: neither its record nor a cache is written.
    `at`: the part to explain, an index of the weights (..., Lq, Lk) such as `(0, 3, 17)` for sequence 0, head 3, query
    17. None means the whole call where it is small, else the first part of it; the explanation says what it left out.
    `tokens`: a word for each query, `source_tokens`: a word for each key, which name rows and columns; or a list of
    such lists or token ids (B, L), a row for each sequence, where `at` names one. Without `source_tokens`, and where
    there are as many keys as queries, the keys have the words of the queries.
    `gradients`: True for a gradient of ones, or the gradient of the last step, of its shape. Then one more part shows
    the gradient of each step, back to the inputs; the gradient of padding is 0.
    `title`: of the explanation in every form; None names the computation. `digits`: with how many digits numbers are
    written, 1 to 15: after the point, and in all below 0.1 and in powers of ten; None is 4. No number changes.
    Formula: output_i = Σ_j softmax_j(score(query_i, key_j)) value_j, one step at a time, by the functions that the
    engine `tiled` is made of.
    Returns an `Explanation`; print it. Its numbers are detached, and float32, or float64 for inputs of float64; NumPy
    arrays in give NumPy arrays out.
    Raises `ClearheadError` or `ShapeError`, as `attention` and the module do, for an index that names no pair, and for
    more words, or fewer, than there are queries or keys.
    Cost: the scores of the chosen queries with every key; for a module, its forward pass too.
    """
    asked = Asked(at, tokens, source_tokens)
    first = next((one for one in inputs if not callable(one)), options.get("query"))
    numpy = isinstance(first, np.ndarray | list | tuple)
    if gradients is None or gradients is False:
        with torch.no_grad():
            found = shown_as(lambda: _explained(inputs, options, asked), title, digits)
    else:
        with torch.inference_mode(False), torch.enable_grad():
            given = leaves([*inputs, *options.values()])
            inputs, options = tuple(given[: len(inputs)]), dict(zip(options, given[len(inputs) :], strict=True))
            found = shown_as(lambda: with_gradients(_explained(inputs, options, asked), gradients), title, digits)
    return replace(found, numpy=numpy)


def _explained(inputs: tuple[Any, ...], options: dict[str, Any], at: Asked) -> Explanation:
    if any(map(is_nested, (*inputs, *options.values()))):
        raise UnsupportedError(
            "explain shows the steps of a batch, and its inputs are nested: pass one sequence of each, query[0][None]."
        )
    if inputs and isinstance(inputs[0], nn.Module):
        return _of_module(inputs[0], inputs[1:], options, at)
    if inputs and inputs[0] is masked_softmax:
        return _of_softmax(inputs[1:], options, at)
    if len(inputs) == 1 and not options.keys() & {"query", "key", "value"}:
        return _of_own_scores(inputs[0], at, **options)
    call, _ = bind_attention("explain", inputs, options)
    return _of_arguments(call, at)


def _of_softmax(inputs: tuple[Any, ...], options: dict[str, Any], at: Asked) -> Explanation:
    """The steps of a call of `masked_softmax`."""
    given = signature(masked_softmax).bind(*inputs, **options).arguments
    raise_unknown_keywords("masked_softmax", masked_softmax, given.pop("others", {}))
    scores, dim = listed_scores(given["scores"]), given.get("dim", -1)
    if dim not in (-1, np.ndim(scores) - 1):
        raise ClearheadError(f"dim is {dim!r:.40}: explain() shows keys as columns. Pass scores.movedim(dim, -1).")
    return _of_scores(scores, given.get("valid_lens"), None, given.get("align"), at)


def _of_own_scores(
    scores: Any, at: Asked, *, mask: Any = None, valid_lens: Any = None, align: Any = None, **other: Any
) -> Explanation:
    """The steps of the softmax of scores of the caller's own."""
    if other:
        raise ClearheadError(
            f"explain() of scores alone takes mask=, valid_lens= and align=, and not {', '.join(other)}=. A scale and "
            "a bias are a part of the scores: pass scores * scale + bias. Or pass query, key and value."
        )
    if mask is not None and not (isinstance(mask, Mask) or str(getattr(mask, "dtype", "")).endswith("bool")):
        raise ClearheadError(
            f"mask is a {type(mask).__name__}; expected a Mask or a bool tensor, True where a query may attend. For "
            "lengths pass valid_lens=mask; a float mask is a part of the scores: pass scores + mask."
        )
    return _of_scores(scores, mask, valid_lens, align, at)


def _of_scores(scores: Any, first: Any, second: Any, align: Any, at: Asked) -> Explanation:
    """The steps of the softmax of scores. `first`, `second`: each a mask or lengths, as `masked_softmax` takes them."""
    tensor = to_tensor_float(listed_scores(scores), "scores")
    check_float(tensor, "scores")
    _check_numbers(tensor)
    rows = tensor if tensor.ndim > 1 else tensor[None]
    masks = [softmax_mask(given, tensor, rows, -1) for given in (first, second) if given is not None]
    mask = masks[0] & masks[1] if len(masks) == 2 else masks[0] if masks else None
    with without_autocast(rows.device):
        return explain_softmax(rows, mask, at, check_align(align))


def _of_arguments(call: Arguments, at: Asked) -> Explanation:
    """The steps of a call of `attention`."""
    problem = call.problem(by_tile=True)
    _check_numbers(problem.query)
    shapes = {name: tuple(getattr(call, name).shape) for name in ("query", "key", "value")}
    score = problem.scores.score  # type: ignore[union-attr]
    plain = type(score) is Dot and str(score) == "Dot()"
    title = f"{'Scaled dot-product attention' if plain else f'Attention by {score}'}, step by step"
    with without_autocast(problem.sizes.device):
        shown = choose(at, problem.sizes)
        inputs = input_steps(problem, shown)
        parts, weights, keep = attention_parts(problem, call.mask, shown, inputs)
        first = Part("Inputs", tuple(inputs), drawn(shapes, problem.sizes), lead_axes(shown))
        return Explanation(title, (first, *parts), settle(shown, weights, keep))


def _check_numbers(tensor: Tensor) -> None:
    if not is_readable(tensor):
        raise UnsupportedError(
            "explain() shows numbers, and the inputs have none here: they are meta or fake tensors, or the code is "
            "being compiled or vectorized. Call it outside of torch.compile and torch.func.vmap."
        )


def _of_module(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], at: Asked) -> Explanation:
    if not isinstance(module, Positional | RecordingModule | nn.MultiheadAttention):
        raise ClearheadError(
            f"explain() takes query, key and value, or a module of clearhead.nn or an nn.MultiheadAttention, and not a "
            f"{type(module).__name__}. For a model, explain one recorded call: ch.watch(model)."
        )
    given = bind_module("explain", module, inputs, keywords)
    if isinstance(module, Positional):
        return explain_positions(module, given.arguments, at)
    module = as_ours(module)
    if isinstance(module, MultiHeadAttention | TorchMultiheadAttention):
        return explain_multi_head(module, given, at)
    return _of_arguments(capture_call(module, given).call, at)
