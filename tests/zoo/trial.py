"""One architecture tried: a small random model run plainly and watched, and each record compared with its backend."""

from __future__ import annotations

import re
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
PARAMETERS = (range(12_000_000), range(12_000_000, 50_000_000))  # how many: the second where none of the first runs
QUERY_OR_KEY = re.compile(
    r"(to_|fc_|lin_|linear_)?(w?q|w?k|qk|kv|w?qkv|query|key|queries|keys)(_\w+)?|\w+_(q|k|qkv|query|key)|in_proj\w*|c_attn"
    r"|query_key_value"
)
SPREAD = 3.0  # of the logarithms of a row's weights: rows that are nearly uniform would hide a wrong score
UNIFORM = 0.3  # below this spread a wrong score could hide
NEAR = 1e-6  # how far a recorded weight may be from the backend's, beside the rounding of scores
COARSE = 1e-4  # where rounding alone may change a weight by more, nothing is said
EPSILON = torch.finfo(torch.float32).eps


class Outcome(NamedTuple):
    """What is said of an architecture. `kind`: one of KINDS; `calls`: how many were compared; `text`: in words."""

    name: str
    kind: str
    backends: list[str]
    calls: int
    text: str


# Of several runs of a model the first of these counts.
KINDS = {
    "different": "NOT EQUAL",
    "refused": "refused",
    "partly": "recorded and equal, beside attention in code of its own",
    "equal": "recorded and equal",
    "not compared": "recorded and not compared",
    "own code": "no attention call recognised: code of its own",
    "none": "no attention call, and no softmax in a module of attention",
    "not built": "not built",
}


class Run(NamedTuple):
    """What came out of one run: an `Outcome` without its name. `worst`: the largest difference of a weight."""

    kind: str
    backends: list[str]
    calls: int = 0
    text: str = ""
    worst: float = 0.0


class NotBuiltError(Exception):
    """No small model of an architecture could be built and run."""


def attempt(name: str) -> Outcome:
    """Try one architecture."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, runs = small_model(name)
        except NotBuiltError as error:
            return Outcome(name, "not built", [], 0, str(error))
        found = [compared(model, given) for given in runs]
    first = min(found, key=lambda run: list(KINDS).index(run.kind))
    text = first.text
    if first.kind in ("equal", "partly"):
        text += f"worst difference {max(run.worst for run in found):.0e}"
    backends = sorted({backend for run in found for backend in run.backends})
    return Outcome(name, first.kind, backends, sum(run.calls for run in found), text)


def small_model(name: str) -> tuple[Any, list[dict[str, Any]]]:
    """A random model that runs, its weights scaled so that attention is not uniform, and the inputs it runs on."""
    try:
        cls = model_class(name)
    except Exception as error:
        raise NotBuiltError(shortened(error)) from None
    errors: list[Exception] = []
    quiet = None  # one that runs and calls no attention, so far
    for sizes, layers in product(PARAMETERS, (2, None)):
        tries, ran = 0, False
        for divisor in DIVISORS:
            try:
                model = built(name, cls, Size(layers, divisor), sizes)
            except Exception as error:
                errors.append(error)
                continue
            if model is None:  # too large, or tried already
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
                    return model, [given, *with_padding(model, given)]
                quiet, ran = quiet or (model, [given]), True
            tries += 1
            if ran or tries == TRIES:
                break
        if ran and layers is None:  # all its layers
            break
    if quiet is not None:
        return quiet
    raise NotBuiltError(shortened(errors[0]) if errors else "too large however it was shrunk")


def built(name: str, cls: Any, size: Size, sizes: range) -> Any:
    """The model, or None where it has not as many parameters as `sizes` says."""
    config = config_class(name)()
    shrink(config, size)
    with torch.device("meta"):
        empty = cls._from_config(config)
    if sum(p.numel() for p in empty.parameters()) not in sizes:
        return None
    torch.manual_seed(0)
    return cls._from_config(config).eval()


def run(model: Any, given: dict[str, Any]) -> tuple[Any, list[Call], set[str]]:
    """The output, and what the backends computed."""
    with captured() as found:
        output = forward(model, given)
    if next(tensors(output), None) is None:
        raise LookupError("its output holds no tensor")  # some backbones give the layers that they are asked for alone
    return output, found.calls, found.own


@torch.no_grad()
def forward(model: Any, given: dict[str, Any]) -> Any:
    torch.manual_seed(0)  # some models draw noise
    return model(**{name: v.clone() if isinstance(v, Tensor) else v for name, v in given.items()})


def with_padding(model: Any, given: dict[str, Any]) -> list[dict[str, Any]]:
    """The same inputs with padding, if the model runs on them."""
    more = padded(model, given)
    try:
        if more is not None:
            forward(model, more)
    except Exception:
        return []
    return [] if more is None else [more]


def sharpen(model: Any, given: dict[str, Any], calls: list[Call]) -> None:
    """Scale the weights that make queries and keys, each module's until the scores of its rows have a spread."""
    for _ in range(8):  # by small steps: a score has two of these weights in it, or more
        found = [(call.module, spread) for call, spread in zip(calls, spreads(calls), strict=True)]
        before = [(weight, weight.clone()) for weight in model.parameters()]
        widest = {module: max(s for other, s in found if other is module) for module, _ in found if module is not None}
        flat = {module: spread for module, spread in widest.items() if 0 < spread < SPREAD / 2}
        if not flat:
            return
        for module, spread in flat.items():
            with torch.no_grad():
                for weight in query_and_key(module):
                    weight *= min((SPREAD / spread) ** 0.25, 10)
        calls = run(model, given)[1]
        if not all(call.weights.isfinite().all() for call in calls):
            with torch.no_grad():
                for weight, old in before:
                    weight.copy_(old)
            return


def query_and_key(module: torch.nn.Module) -> list[Tensor]:
    """The weights that make queries and keys, their norms too, as far as their names tell; else all matrices."""
    named = [(name, weight) for name, weight in module.named_parameters() if not name.endswith("bias")]
    chosen = [weight for name, weight in named if any(map(QUERY_OR_KEY.fullmatch, name.split(".")))]
    return chosen or [weight for _, weight in named if weight.ndim > 1]


def spreads(calls: list[Call]) -> list[float]:
    """For each call the standard deviation of the logarithms of a row's weights, in the row where it is largest."""
    found = []
    for call in calls:
        weights = call.weights[..., :-1].double()
        logs, seen = weights.clamp(min=1e-30).log(), weights > 0
        counts = seen.sum(-1).clamp(min=1)
        mean = (logs * seen).sum(-1) / counts
        deviation = (((logs - mean[..., None]) ** 2 * seen).sum(-1) / counts).sqrt()
        found.append(float(deviation[counts > 1].max()) if bool((counts > 1).any()) else 0.0)
    return found


def compared(model: Any, given: dict[str, Any]) -> Run:
    """Run a model plainly, captured and watched, and compare."""
    plain = forward(model, given)
    _, calls, own = run(model, given)
    backends = sorted({call.backend for call in calls})
    try:
        with ch.watch(model) as seen:
            watched = forward(model, given)
    except ch.ClearheadError as error:
        if "made no attention call" not in str(error):
            return Run("refused", backends, text=shortened(error))
        if calls:
            return Run("different", backends, text=f"{len(calls)} calls were made and none recorded")
        return Run("own code", [], text=", ".join(sorted(own))) if own else Run("none", [])
    for reason in seen.missing.values():
        return Run("refused", backends, text=shortened(ch.UnsupportedError(reason)))
    if not same(plain, watched):
        again = "" if same(plain, forward(model, given)) else ", and so do those of two plain runs"
        return Run("different", backends, text=f"the outputs differ while watched{again}")
    shapes = [call.shape for call in calls], [tuple(call.weights.shape) for call in seen.calls]
    if shapes[0] != shapes[1]:
        return Run("different", backends, text=f"calls {shapes[0]}, recorded {shapes[1]}"[:300])
    flat = [spread < UNIFORM for spread in spreads(calls)]
    coarse = [near(call) > COARSE for call in seen.calls]
    if all(map(max, flat, coarse)):
        return Run("not compared", backends, text=_left_out(sum(flat), sum(coarse), len(calls)))
    worst = 0.0
    for made, call in zip(calls, seen.calls, strict=True):
        recorded = call.weights.dense(max_bytes=None)
        if not recorded.isfinite().all():
            return Run("different", backends, text=f"{call.name}: a recorded row is not finite")
        off = made.off(recorded)
        if not off <= near(call):
            return Run("different", backends, text=f"{call.name}: {off:.1e} off, by rounding at most {near(call):.1e}")
        worst = max(worst, 0.0 if near(call) > COARSE else off)
    text = "".join(
        part + "; " for part in (", ".join(sorted(own)), _left_out(sum(flat), sum(coarse), len(calls))) if part
    )
    return Run("partly" if own else "equal", backends, len(calls) - sum(coarse), text, worst)


def _left_out(flat: int, coarse: int, calls: int) -> str:
    """How many calls tell little."""
    parts = [f"{flat} of {calls} calls nearly uniform"] if flat else []
    return ", ".join(parts + ([f"{coarse} of {calls} calls with scores too large to compare"] if coarse else []))


def near(call: ch.models.AttentionCall) -> float:
    """How far two weights may be apart by the rounding of scores, in whatever order their terms are added."""
    heads = call.query.shape[1] // call.key.shape[1]
    query, key = call.query.abs(), call.key.abs().repeat_interleave(heads, 1)
    scale = call.score.scale or query.shape[-1] ** -0.5
    return NEAR + 4 * EPSILON * scale * float((query @ key.mT).max())


def same(a: Any, b: Any) -> bool:
    """Whether all tensors of two outputs have the same bits."""
    ours, theirs = list(tensors(a)), list(tensors(b))
    return len(ours) == len(theirs) and all(
        x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())
        for x, y in zip(ours, theirs, strict=True)
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
    """The first line of an error, without the place where a package is installed."""
    line = re.sub(r"/\S*/site-packages/", "", next(iter(str(error).strip().splitlines()), ""))
    return f"{type(error).__name__}: {line}"[:200]
