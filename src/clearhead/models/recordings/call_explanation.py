"""A recorded call explained, step by step, and as `diagnose` takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.base.errors import ShapeError
from clearhead.base.output.text import said
from clearhead.base.output.words import TokensLike, word_list
from clearhead.base.symbolic.steps import Step, number
from clearhead.base.torch_state.contexts import without_autocast
from clearhead.explanation.diagnosis.case import Case
from clearhead.explanation.diagnosis.reading import parameters_of
from clearhead.explanation.explanation import Explanation, Part
from clearhead.explanation.inputs import drawn
from clearhead.explanation.of_problem import attention_parts, input_steps
from clearhead.explanation.shown import Shown, choose, settle
from clearhead.models.origins.part import FromInput, from_input, last_projection
from clearhead.models.origins.ran import Ran
from clearhead.problem._recorded import RecordedMask
from clearhead.problem.fills import taken_apart
from clearhead.problem.problem import Problem
from clearhead.problem.words import ALL_WORDS
from clearhead.scores.base import ByTile
from clearhead.scores.dot import Dot

if TYPE_CHECKING:
    from clearhead.models.recordings.attention_call import AttentionCall


def explain_call(call: AttentionCall, at: Any, tokens: Any, source_tokens: Any) -> Explanation:
    """The steps of a recorded call, from the query and the key that the model computed."""
    with torch.no_grad(), without_autocast(call.query.device):
        problem = _by_tile(call)
        shown = choose(at, problem.sizes)
        queries, keys = _words(call, tokens, source_tokens, shown.batches)
        shown = replace(shown, query_words=queries, key_words=keys)
        inputs = input_steps(problem, shown)
        made = _made(call, inputs, shown)
        parts, weights, keep = attention_parts(problem, _mask(call, problem, shown), shown, made.steps)
        output = next((step for step in parts[-1].steps if step.name == "output"), None)
        given = None if call.outcome is None else call.outcome.output
        parts.append(_computed(call.backend, given, shown, output))
        if call.origin is not None and output is not None and given is not None:
            parts.append(last_projection(call.origin, output, given, shown))
        key, value = call.cached_key, call.cached_value or call.cached_key
        shapes = {"query": tuple(call.query.shape), "key": tuple(key.shape), "value": tuple(value.shape)}
        said = f"The {call.kind}-attention of {call.name}, computed by {call.backend}.\n\n"
        if call.factor is not None and bool((factor := call.factor[shown.region.sides[:3]]).ne(1).any()):
            low, high = number(float(factor.min())), number(float(factor.max()))
            times = low if low == high else f"{low} … {high}"
            said += (
                f"An edit multiplied the weights of these queries after the softmax, by {times}. The steps do not show "
                "this: the weights and the output below are those before the edit.\n\n"
            )
        title = "Inputs, as the model gave them to attention"
        if len(made.steps) > len(inputs):
            title = "From the layers' input to query, key and value"
        said = "\n".join([said + drawn(shapes, problem.sizes), *made.missing])
        first = Part(title, tuple(made.steps), said)
        return Explanation(f"{call.name}, step by step", (first, *parts), settle(shown, weights, keep))


def _by_tile(call: AttentionCall) -> Problem:
    """The call's problem with the score as it was given, over query and key before any lowering."""
    problem, score = call.problem, call.score
    if problem.lowered is not None:
        lowered = problem.lowered
        if isinstance(score, Dot):
            lowered = lowered.folded()
            scores = ByTile(Dot(), lowered.query, lowered.key, lowered.scale, lowered.softcap)
        else:
            own = score.lower(call.query, call.key)
            assert own is not None
            scores = ByTile(score, call.query, call.key, lowered.scale / own.scale, lowered.softcap)
        problem = problem._replace(scores=scores)
    return problem._replace(value=call.value)


def _mask(call: AttentionCall, problem: Problem, shown: Shown) -> Any:
    """The mask of the call; where a query got a uniform row, the mask that was computed in its place."""
    spans, mask = problem.spans, call.mask
    if spans is None:
        return None
    sides = (*shown.region.sides[:3], slice(None))
    if mask is not None and call.uniform is None:
        return mask
    of_call = spans.keep(*sides, problem.sizes.keys)
    if mask is not None and not bool((mask._compute_part(problem.sizes, sides) ^ of_call).any()):
        return mask
    return RecordedMask(spans, problem.sizes, None if mask is None else said(mask, mask.title))


def _made(call: AttentionCall, inputs: list[Step], shown: Shown) -> FromInput:
    """The steps that lead to query, key and value, if the layers that made them were kept."""
    if call.origin is None:
        why = "What they were made of was not kept" + (": watch with values=True." if call.value is None else ".")
        return FromInput(inputs, [why])
    tensors = {"query": call.query, "key": call.key} | ({} if call.value is None else {"value": call.value})
    return from_input(call.origin, tensors, inputs, shown)


def _computed(backend: str, given: Tensor | None, shown: Shown, output: Step | None) -> Part:
    """The backend's output for the same queries, and its difference from the last step; or why it is not known."""
    title = "What the model computed"
    if output is None:
        return Part(title, (), "The values were not kept, so the output can't be shown: watch with values=True.")
    if given is None:
        return Part(title, (), "The backend's output was not kept head by head, so it can't be compared.")
    mine = output.value
    theirs = given[(*shown.region.sides[:3],)].to(mine.dtype)
    far = float((theirs - mine).abs().nan_to_num().max())
    why = f"What {backend} gave for these queries. The largest difference to the output above is {number(far)}."
    # the largest difference between two orders of the same sums, for numbers as large as these
    if far > 64 * torch.finfo(given.dtype).eps * max(1.0, float(theirs.abs().nan_to_num().max())):
        why += " That is more than rounding: the model drops weights while training, or computes something else."
    return Part(title, (Step("model_output", why, theirs, ("B", "H", "Lq", "Ev")),))


def _words(
    call: AttentionCall, tokens: TokensLike | None, source_tokens: TokensLike | None, batches: tuple[int, ...]
) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """The word of each query and of each key; None where no words were given."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    own, source = word_list("tokens", tokens, *batches), word_list("source_tokens", source_tokens, *batches)
    if source is None and call.kind == "self":
        source = own
    if own is not None and len(own) < queries:
        raise ShapeError(f"tokens has {len(own)} words, and {call.name} has {queries} queries; pass one a position.")
    if source is not None and len(source) != keys:
        name = "tokens" if source is own else "source_tokens"
        raise ShapeError(f"{name} has {len(source)} words, and {call.name} has {keys} keys; pass one a position.")
    return None if own is None else tuple(own[-queries:]), None if source is None else tuple(source)


@torch.no_grad()
def case_of(call: AttentionCall, label: str = "") -> Case:
    """The call as `diagnose` takes it. `label`: the call's name in its recording."""
    problem, value = call.problem, call.value
    inputs = {"query": call.query, "key": problem.key} | ({} if value is None else {"value": value})
    added = {}
    # entries that hide a pair were taken out of the model's mask: the rest is called a bias
    bias = call.backend.startswith("clearhead") or problem.visible is not None or call.uniform is not None
    name = "bias" if bias else "attn_mask"
    if problem.bias is not None:
        both = {name: problem.bias.dense, "bias of distances": problem.bias.relative}
        added = {name: tensor.detach() for name, tensor in both.items() if tensor is not None}
    apart, blind = taken_apart(problem)
    if call.uniform is not None:
        blind = call.uniform[..., 0] if blind is None else blind | call.uniform[..., 0]
    return Case(
        problem=apart,
        inputs=inputs,
        added=added,
        mask=call.mask,
        blind=blind,
        words=call.padding or ALL_WORDS,
        output=None if call.outcome is None or call.outcome.dropped else call.outcome.output,
        factor=call.factor,
        where={"layer": label or str(call.layer), "module": call.name},
        **_learnt(call, inputs),
    )


def _learnt(call: AttentionCall, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """The parameters of the score, of the layers around the call that were given finite numbers, and of the layer that
    writes its heads, as fields of a `Case`. `inputs`: query, key, and the value where it is known."""
    layers = [] if call.origin is None else [one for one in call.origin.ran if one.stands]
    given = [bool(one.x.isfinite().all()) for one in layers]
    finite = all(bool(tensor.isfinite().all()) for tensor in inputs.values())
    writers = [] if call.origin is None else [one for one in call.origin.writers if one.versions.written() is None]
    learnt, factors = parameters_of(call.score, call.problem)
    for one in (*(one for one, fine in zip(layers, given, strict=True) if fine), *(writers if finite else ())):
        for side in ("weight", "bias"):  # of a layer that is called, the layers inside are among these
            if (tensor := getattr(one.source, side, None)) is not None:
                learnt[name := f"{one.name}.{side}".replace(",.", ": ")] = tensor
                factors |= set() if isinstance(one, Ran) else {name}
    before = 0 if call.origin is None else call.origin.before
    return {
        "parameters": learnt,
        "factors": factors,
        "given_finite": all(given[:before]) if layers else finite,
    }
