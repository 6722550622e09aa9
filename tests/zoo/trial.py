"""One architecture tried: a small random model run plainly and watched, and each record compared with its backend."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

import clearhead as ch
from zoo.backends import Call, captured
from zoo.inputs import VARIANTS, inputs, padded
from zoo.registry import config_class, model_class
from zoo.small import Size, shrink

DIVISORS = (1, 2, 4, 8, 16, 32)  # tried in this order until a model can be built, runs, and calls attention
TRIES = 2  # of models that are built and do not run
MOST_PARAMETERS = (12_000_000, 50_000_000)  # the second where nothing fits into the first
SPREAD = 2.0  # of the logarithms of a row's weights: rows that are nearly uniform would hide a wrong score
UNIFORM = 0.3  # below this spread a wrong score could hide
EPSILON = torch.finfo(torch.float32).eps


class Outcome(NamedTuple):
    """What is said of an architecture. `kind`: one of KINDS; `calls`: how many were compared; `text`: in words."""

    name: str
    kind: str
    backends: list[str]
    calls: int
    text: str


KINDS = {
    "equal": "recorded and equal",
    "partly": "recorded and equal, and attention in code of its own beside it",
    "own code": "no attention call recognised: code of its own",
    "none": "no attention call, and no softmax in a module of attention",
    "refused": "refused",
    "uniform": "recorded; not compared, since every row of this random model is nearly uniform",
    "different": "NOT EQUAL",
    "not built": "not built",
}


class NotBuiltError(Exception):
    """No small model of an architecture could be built and run."""


def attempt(name: str) -> Outcome:
    """Try one architecture."""
    warnings.simplefilter("ignore")
    try:
        model, runs = small_model(name)
    except NotBuiltError as error:
        return Outcome(name, "not built", [], 0, str(error))
    found = [compared(model, given) for given in runs]
    worst = {kind: i for i, kind in enumerate(["different", "refused", "partly", "equal", "uniform", "own code", "none"])}
    first = min(found, key=lambda one: worst[one[0]])
    return Outcome(
        name, first[0], sorted({b for one in found for b in one[1]}), sum(one[2] for one in found), said(first, found)
    )


def said(first: Any, found: list[Any]) -> str:
    kind, text = first[0], first[3]
    if kind in ("equal", "partly"):
        worst = max(one[4] for one in found)
        return f"{text}worst difference {worst:.0e}"
    return text


def small_model(name: str) -> tuple[Any, list[dict[str, Any]]]:
    """A random model that runs, its weights scaled so that attention is not uniform, and the inputs it runs on."""
    try:
        cls = model_class(name)
    except Exception as error:
        raise NotBuiltError(shortened(error)) from None
    errors: list[Exception] = []
    quiet = None  # one that runs and calls no attention, so far
    for most, layers in product(MOST_PARAMETERS, (2, None)):
        tries = 0
        for divisor in DIVISORS:
            try:
                model = built(name, cls, Size(layers, divisor), most)
            except Exception as error:
                errors.append(error)
                continue
            if model is None:  # too large
                continue
            for variant in VARIANTS:
                try:
                    given = inputs(model, variant)
                    calls = run(model, given)[1]
                except Exception as error:
                    errors.append(error)
                    continue
                if calls:
                    sharpen(model, given, calls)
                    return model, [one for one in (given, padded(model, given)) if one is not None]
                quiet = quiet or (model, [given])
            tries += 1
            if tries == TRIES or quiet is not None:
                break
        if layers is None and (quiet is not None or tries):
            break
    if quiet is not None:
        return quiet
    raise NotBuiltError(shortened(errors[0]) if errors else "too large however it was shrunk")


def built(name: str, cls: Any, size: Size, most: int) -> Any:
    """The model, or None where it has too many parameters."""
    config = config_class(name)()
    shrink(config, size)
    with torch.device("meta"):
        empty = cls._from_config(config)
    if sum(p.numel() for p in empty.parameters()) > most:
        return None
    torch.manual_seed(0)
    return cls._from_config(config).eval()


def run(model: Any, given: dict[str, Any]) -> tuple[Any, list[Call], set[str]]:
    """The output, and what the backends computed."""
    with captured() as found:
        output = forward(model, given)
    return output, found.calls, found.own


@torch.no_grad()
def forward(model: Any, given: dict[str, Any]) -> Any:
    torch.manual_seed(0)  # some models draw noise
    return model(**{name: v.clone() if isinstance(v, Tensor) else v for name, v in given.items()})


def sharpen(model: Any, given: dict[str, Any], calls: list[Call]) -> None:
    """Scale the weights until the scores of a row have a spread, or leave them where the model then overflows."""
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    for _ in range(2):  # deep inside, scores grow by more than the weights, or by less
        spread = sorted(spreads(calls))[len(calls) // 2]
        factor = min(max((SPREAD / max(spread, 1e-9)) ** 0.5, 1.0), 30.0)
        with torch.no_grad():
            for weight in matrices:
                weight *= factor
            calls = run(model, given)[1]
            if not all(call.weights.isfinite().all() for call in calls):
                for weight in matrices:
                    weight /= factor
                return
        if factor < 2:
            return


def spreads(calls: list[Call]) -> list[float]:
    """For each call, how far the logarithms of a row's weights are apart: their standard deviation, at the median."""
    found = []
    for call in calls:
        weights = call.weights[..., :-1].double()
        logs, seen = weights.clamp(min=1e-30).log(), weights > 0
        counts = seen.sum(-1).clamp(min=1)
        mean = (logs * seen).sum(-1) / counts
        deviation = (((logs - mean[..., None]) ** 2 * seen).sum(-1) / counts).sqrt()
        found.append(float(deviation[counts > 1].median()) if bool((counts > 1).any()) else 0.0)
    return found


def compared(model: Any, given: dict[str, Any]) -> tuple[str, list[str], int, str, float]:
    """Kind, backends, calls, text and worst difference of one run."""
    plain = forward(model, given)
    _, calls, own = run(model, given)
    backends = sorted({call.backend for call in calls})
    try:
        with ch.watch(model) as seen:
            watched = forward(model, given)
    except ch.ClearheadError as error:
        if "made no attention call" not in str(error):
            return "refused", backends, 0, shortened(error), 0.0
        if calls:
            return "different", backends, 0, f"{len(calls)} calls were made and none recorded", 0.0
        return ("own code", [], 0, ", ".join(sorted(own)), 0.0) if own else ("none", [], 0, "", 0.0)
    if not same(plain, watched):
        again = "" if same(plain, forward(model, given)) else ", and so do two plain runs"
        return "different", backends, len(calls), f"the outputs differ while watched{again}", 0.0
    if [c.shape for c in calls] != [tuple(c.weights.shape) for c in seen.calls]:
        shapes = [c.shape for c in calls], [tuple(c.weights.shape) for c in seen.calls]
        return "different", backends, len(calls), f"calls {shapes[0]}, recorded {shapes[1]}"[:300], 0.0
    flat = sum(spread < UNIFORM for spread in spreads(calls))
    if flat == len(calls):
        return "uniform", backends, flat, "", 0.0
    worst = 0.0
    for made, call in zip(calls, seen.calls, strict=True):
        recorded = call.weights.dense()
        if not recorded.isfinite().all():
            return "different", backends, len(calls), f"{call.name}: a recorded row is not finite", 0.0
        off = made.off(recorded)
        if not off <= near(call):
            return "different", backends, len(calls), f"{call.name}: {off:.1e} off, {near(call):.1e} expected", off
        worst = max(worst, off)
    text = f"own code: {', '.join(sorted(own))}; " if own else ""
    text += f"{flat} calls nearly uniform; " if flat else ""
    return "partly" if own else "equal", backends, len(calls), text, worst


def near(call: ch.AttentionCall) -> float:
    """How far two weights may be apart by the rounding of scores, in whatever order their terms are added."""
    heads = call.query.shape[1] // call.key.shape[1]
    query, key = call.query.abs(), call.key.abs().repeat_interleave(heads, 1)
    scale = call.score.scale or query.shape[-1] ** -0.5
    return 1e-6 + 4 * EPSILON * scale * float((query @ key.mT).max())


def same(a: Any, b: Any) -> bool:
    """Whether all tensors of two outputs have the same bits."""
    ours, theirs = list(tensors(a)), list(tensors(b))
    return len(ours) == len(theirs) > 0 and all(
        x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all()) for x, y in zip(ours, theirs, strict=True)
    )


def tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in an output, caches apart."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors(value)


def shortened(error: Exception) -> str:
    """The first line of an error."""
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}"[:200]
