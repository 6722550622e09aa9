"""The explanation of a recorded call, step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from clearhead.base.errors import ShapeError
from clearhead.base.output.text import said
from clearhead.base.output.words import TokensLike, word_list
from clearhead.base.symbolic.steps import Step, number
from clearhead.base.torch_state.contexts import without_autocast
from clearhead.explanation.explanation import Explanation, Part
from clearhead.explanation.inputs import drawn
from clearhead.explanation.of_problem import attention_parts, input_steps
from clearhead.explanation.shown import Shown, choose, settle
from clearhead.models.origins.part import FromInput, from_input, last_projection
from clearhead.problem._recorded import RecordedMask
from clearhead.problem.problem import Problem
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
        parts.append(_computed(call, shown, output))
        given = None if call.outcome is None else call.outcome.output
        if call.origin is not None and output is not None and given is not None:
            parts.append(last_projection(call.origin, output, given, shown))
        shapes = {"query": tuple(call.query.shape), "key": tuple(call.key.shape)}
        value = call.value
        shapes["value"] = tuple(call.key.shape if value is None else value.shape)
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


def _computed(call: AttentionCall, shown: Shown, output: Step | None) -> Part:
    """The backend's output for the same queries, and its difference from the last step; or why it is not known."""
    given = None if call.outcome is None else call.outcome.output
    title = "What the model computed"
    if output is None:
        said = "The values were not kept, so the output can't be shown: watch with values=True."
        return Part(title, (), said)
    if given is None:
        return Part(title, (), "The backend's output was not kept head by head, so it can't be compared.")
    mine = output.value
    theirs = given[(*shown.region.sides[:3],)].to(mine.dtype)
    far = float((theirs - mine).abs().nan_to_num().max())
    why = f"What {call.backend} gave for these queries. The largest difference to the output above is {number(far)}."
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
