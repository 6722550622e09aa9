"""A random problem as plain data: all of it follows from its number."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import oracle
import torch
from oracle import Array, Problem, mapped

from clearhead.base import dropout
from fuzzing.table import SURROUNDINGS

DTYPES = ("float64", "float32", "float32", "bfloat16", "float16")
LAYOUTS = ("as it is", "as it is", "length first", "every second", "unaligned", "expanded", "overlapping", "negated")


@dataclass(frozen=True)
class Spec:
    """A problem, and how it is asked."""

    number: int
    task: str  # "attend" or "look"
    surroundings: str
    dtype: str
    bias_dtype: str
    problem: Problem
    mask_as: str  # "mask", "bool" or "float": how a dense mask is passed
    bias_as: str  # "bias" or "tensor"
    learn_bias: bool
    layout: str
    blocks: int  # elements to a block of the tiled engine

    def __str__(self) -> str:
        p = self.problem
        shapes = " ".join(str(x.shape) for x in p.inputs)
        kind, settings, learnt = p.score
        score = f"{kind}({', '.join([*(f'{n}={v}' for n, v in settings.items()), *learnt])})"
        score += f" scale {p.scale}" * (p.scale is not None) + f" sinks {p.sinks}" * (p.sinks is not None)
        align = p.align.tolist() if isinstance(p.align, np.ndarray) else p.align
        biases = " + ".join(f"{b[0]}({', '.join(f'{n}{t.shape}' for n, t in b[2].items())})" for b in p.biases)
        parts = [f"{self.task} in {self.surroundings}", shapes, self.dtype, score, f"mask {_words(p.mask)}"]
        parts += [f"as {self.mask_as}, align {align}", f"bias {biases or None} {self.bias_dtype} as {self.bias_as}"]
        parts += [f"dropout {p.dropout_p}", self.layout, f"blocks of {self.blocks}"]
        return f"problem {self.number}: " + ", ".join(parts)


def is_packed(mask: Any) -> bool:
    """Whether its other masks count inside documents."""
    return mask is not None and (mask[0] == "packed" or (mask[0] == "not" and is_packed(mask[1])))


def _words(mask: Any) -> str:
    if mask is None:
        return "None"
    kind, *rest = mask
    if kind in ("and", "or"):
        return f"({_words(rest[0])} {'&' if kind == 'and' else '|'} {_words(rest[1])})"
    if kind == "not":
        return f"~{_words(rest[0])}"
    if kind == "packed":
        return f"({rest[0].tolist()} {rest[1].tolist()} & {_words(rest[2])})"
    return f"{kind}{[x.tolist() if isinstance(x, np.ndarray) and x.size < 9 else np.shape(x) or x for x in rest]}"


def rounded(x: Array, dtype: str) -> Array:
    """The numbers of this dtype that are nearest, in float64."""
    if dtype == "float64":
        return x
    return torch.from_numpy(np.ascontiguousarray(x)).to(getattr(torch, dtype)).double().numpy()


class Draw:
    """One problem's choices."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.r = random.Random(number)
        self.g = np.random.default_rng(number)

    def spec(self) -> Spec:
        r = self.r
        names, chances = zip(*((name, s.chance) for name, s in SURROUNDINGS.items()), strict=True)
        surroundings = r.choices(names, chances)[0]
        about = SURROUNDINGS[surroundings]
        task = "look" if surroundings == "nothing" and r.random() < 0.35 else "attend"
        dtype = r.choice([d for d in DTYPES if d in about.dtypes])
        large = task == "look" and r.random() < 0.15
        shapes, depth = self.shapes(about.tiny, large, task == "attend")
        sizes = oracle.Sizes(*shapes)
        align = self.align(sizes)
        deviation = 1.0 if about.tiny else r.choice([0.3, 1.0, 1.0, 3.0, 3.0, 10.0, 50.0, 200.0])
        layout = r.choice(LAYOUTS) if surroundings in ("nothing", "poisoned memory", "default meta") else "as it is"
        kind = r.choice(["dot", "dot", "dot", "bilinear", "additive", "cosine", "gaussian", "smooth", "sines"])
        kind = "dot" if kind == "bilinear" and not shapes[0][-1] else kind  # there is no such score
        inputs = self.inputs(shapes, kind, deviation, layout)
        if dtype in ("float32", "bfloat16", "float64") and not about.tiny and r.random() < 0.05:
            inputs[2] = inputs[2] * 1e30
        mask, mask_as = self.mask(sizes, align, depth)
        packed = is_packed(mask)
        if packed:
            align = self.align_documents(mask, sizes)
        biases, bias_as = self.biases(sizes, depth, about.tiny) if not packed and r.random() < 0.4 else ((), "bias")
        if any(b[0] == "dense" and (b[2]["tensor"] == np.inf).any() for b in biases):
            task, biases, bias_as = "look", biases[:1], "bias"
            outer = depth - (3 if depth > 3 else 2)  # weights have the batch of query and key alone
            front = np.broadcast_shapes(*(x.shape[:outer] for x in inputs))
            inputs = [np.broadcast_to(x, (*front, *x.shape[outer:])).copy() for x in inputs]
            mask_as = "bool" if mask_as == "float" else mask_as  # a float mask is added: −∞ + ∞ is NaN
        problem = Problem(*inputs, self.score(kind, shapes), mask, align, biases)
        if packed:  # the oracle's changes of scores count in the row
            problem.score[1].pop("then", None)
        problem = replace(problem, scale=self.scale(problem.score), sinks=self.sinks(sizes))
        problem = replace(problem, dropout_p=r.choice([0.0, 0.0, 0.0, 0.3, 0.9]) if task == "attend" else 0.0)
        bias_dtype = (
            "float32" if dtype in ("bfloat16", "float16") and r.random() < 0.2 and mask_as != "float" else dtype
        )
        # threads would draw their seeds in any order; PyTorch's hessian refuses to draw any
        if surroundings in ("calls from 8 threads", "func.hessian"):
            problem = replace(problem, dropout_p=0.0)
        if surroundings == "zero input":
            name = "value" if kind == "cosine" else r.choice(["query", "key", "value"])
            problem = replace(problem, **{name: np.zeros_like(getattr(problem, name))})
        cast = surroundings == "autocast" and dtype != "float64"
        problem = problem_of(problem, "bfloat16" if cast else dtype, bias_dtype)
        if problem.dropout_p:
            torch.manual_seed(self.number)
            problem = replace(problem, seed=int(dropout.draw_seed(torch.device("cpu"))))
        if surroundings == "unseen garbage":
            problem = self.garbage(problem, sizes)
            mask_as = "bool" if mask_as == "float" else mask_as  # a float mask is added: NaN stays NaN
        work = math.prod(sizes.shape) * max(1, shapes[0][-1])
        return Spec(
            number=self.number,
            task=task,
            surroundings=surroundings,
            dtype=dtype,
            bias_dtype=bias_dtype,
            problem=problem,
            mask_as=mask_as,
            bias_as=bias_as,
            learn_bias=r.random() < 0.5,
            layout=layout,
            blocks=max(r.choice([1, 50, 300, 2**21]), work // 16),  # more of them would only cost time
        )

    def shapes(self, tiny: bool, large: bool, may_broadcast: bool) -> tuple[list[tuple[int, ...]], int]:
        r = self.r
        batch, key_heads, groups = r.choice([1, 2, 3]), r.choice([1, 1, 2]), r.choice([1, 1, 2, 3])
        queries = r.choice([1, 2, 3] if tiny else [1, 2, 4, 5, 17, 40, 50])
        keys = queries if r.random() < 0.5 else r.choice([1, 2, 4] if tiny else [1, 3, 8, 33, 64, 65, 130])
        width, value_width = r.choice([1, 2] if tiny else [1, 3, 8, 17]), r.choice([1, 2] if tiny else [1, 4, 8])
        if large:
            batch, groups, queries, keys = 1, 1, r.choice([1, 7, 60]), r.choice([100, 129, 257, 400])
        elif not tiny:
            empty = r.random()
            queries, keys = (0 if empty < 0.02 else queries), (0 if 0.02 < empty < 0.04 else keys)
            width, value_width = (0 if 0.04 < empty < 0.06 else width), (0 if 0.06 < empty < 0.08 else value_width)
            batch, key_heads = (0 if 0.08 < empty < 0.09 else batch), (0 if 0.09 < empty < 0.1 else key_heads)
        depth = r.choice([2, 3, 4] if tiny else [2, 3, 4, 4, 4, 5])
        lead = {2: (), 3: (batch,), 4: (batch,), 5: (2, batch)}[depth]
        found = []
        broadcast = may_broadcast and r.random() < 0.15
        for heads, length, size in (
            (key_heads * groups, queries, width),
            (key_heads, keys, width),
            (key_heads, keys, value_width),
        ):
            front = tuple(1 if broadcast and r.random() < 0.4 and n else n for n in lead)
            found.append((*front, *([heads] if depth > 3 else []), length, size))
        return found, depth

    def align(self, sizes: Any) -> Any:
        if sizes.queries == sizes.keys and self.r.random() < 0.8:
            return None
        align = self.r.choice(["upper_left", "lower_right", "each", "one", "one"])
        if align == "each":
            return self.g.integers(-3, sizes.keys + 3, sizes.batch)
        if align == "one":
            far = self.r.randrange(-sizes.queries - 3, sizes.keys + 4)
            return self.r.choice([far, far, far, -sizes.queries, sizes.keys, -1000, 1000])
        return align

    def inputs(self, shapes: list[tuple[int, ...]], kind: str, deviation: float, layout: str) -> list[Array]:
        # the scores of a dot product have the deviation of its query, those of squared differences its square
        size = math.sqrt(deviation) if kind in ("gaussian", "smooth") else deviation
        made = []
        for i, shape in enumerate(shapes):
            x = self.g.standard_normal(shape)
            if layout == "overlapping" and shape[-2] and shape[-1]:
                base = self.g.standard_normal((*shape[:-2], shape[-2] + shape[-1] - 1))
                x = np.lib.stride_tricks.sliding_window_view(base, shape[-1], -1).copy()
            if layout == "expanded" and len(shape) > 2 and shape[0]:
                x = np.broadcast_to(x[:1], shape).copy()
            made.append(x * (size if i == 0 else math.sqrt(size) if kind in ("gaussian", "smooth") else 1.0))
        if (
            kind == "dot" and self.r.random() < 0.1 and made[1].size and layout != "overlapping"
        ):  # one score far above the others
            made[1][..., self.r.randrange(shapes[1][-2]), :] *= 100
        return made

    def scale(self, score: Any) -> float | None:
        """What the call gives, beside a score that takes it."""
        kind, settings, _ = score
        if kind in ("cosine", "gaussian") or settings.get("scale") is not None:
            return None
        return self.r.choice([None, None, None, 0.5, -1.0, 3.0, 0.0])

    def sinks(self, sizes: Any) -> Array | None:
        offset = self.r.choice([0.0, 0.0, 0.0, 50.0, -50.0, 1e4, -1e4])
        return self.g.standard_normal(sizes.heads) * 2 + offset if self.r.random() < 0.3 else None

    def score(self, kind: str, shapes: list[tuple[int, ...]]) -> Any:
        kind, settings, learnt = self.uncapped(kind, shapes)
        cap = self.r.choice([None, None, None, 2.0, 30.0])
        settings = settings if cap is None else settings | {"softcap": cap}
        # a stream of its own: the problems without a change stay the same
        then = random.Random(f"then {self.number}").choice([None, None, None, None, 0.02, 0.3])
        return kind, settings if then is None else settings | {"then": then}, learnt

    def uncapped(self, kind: str, shapes: list[tuple[int, ...]]) -> Any:
        r, g, width = self.r, self.g, shapes[0][-1]
        if kind == "dot":
            return kind, {"scale": r.choice([None, None, 0.5, -1.0])}, {}
        if kind == "bilinear":
            return kind, {}, {"W": g.standard_normal((width, width)) / max(1, width) ** 0.5}
        if kind == "additive":
            hidden = r.choice([1, 5, 16])
            learnt = {"w_v": g.standard_normal(hidden if r.random() < 0.8 else width)}
            hidden = len(learnt["w_v"])
            for side in ("W_q", "W_k"):
                if hidden != width or r.random() < 0.7:
                    learnt[side] = g.standard_normal((hidden, width)) / max(1, width) ** 0.5
            return kind, {}, learnt
        if kind == "sines":
            return kind, {}, {"w": g.standard_normal(width)}
        settings = {
            "cosine": {"temperature": r.choice([1.0, 0.2, 0.01])},
            "gaussian": {"bandwidth": r.choice([1.0, 3.0])},
        }
        return kind, settings.get(kind, {}), {}

    def mask(self, sizes: Any, align: Any, depth: int) -> tuple[Any, str]:
        r, g = self.r, self.g
        if r.random() < 0.65:
            return self.expression(sizes, depth, r.choice([0, 1, 1, 2, 3]), r.random() < 0.15), "mask"
        if r.random() < 0.4:
            shape = (sizes.queries, sizes.keys)
            if depth in (3, 4):
                shape = (*(r.choice([1, n]) for n in sizes.lead), *(r.choice([1, n]) for n in shape))
            return ("dense", g.random(shape) > r.random()), r.choice(["mask", "bool", "float"])
        return None, "mask"

    def expression(self, sizes: Any, depth: int, levels: int, packed: bool) -> Any:
        """`packed`: the expression is that of each document of the row."""
        if packed:
            found = self.packed(sizes, depth, levels)
            return ("not", found) if self.r.random() < 0.25 else found
        if not levels:
            return self.leaf(sizes, depth)
        if self.r.random() < 0.25:
            return "not", self.expression(sizes, depth, levels - 1, False)
        left = self.expression(sizes, depth, levels - 1, False)
        right = self.expression(sizes, depth, levels - 1, False)
        sides = (left, right) if self.r.random() < 0.5 else (right, left)
        return ("and" if self.r.random() < 0.6 else "or"), *sides

    def packed(self, s: Any, depth: int, levels: int) -> Any:
        count = self.r.randrange(2, 6)
        ends = lambda length: np.concatenate([[0], np.sort(self.g.integers(0, length + 1, count - 1)), [length]])
        cu_q, cu_k = ends(s.queries), ends(s.keys)
        cu_k = cu_q if s.queries == s.keys and self.r.random() < 0.5 else cu_k
        each = oracle.padded(cu_q, cu_k, s)
        return "packed", cu_q, cu_k, self.expression(each, each.depth, levels - 1, False) if levels else None

    def align_documents(self, mask: Any, s: Any) -> Any:
        if mask[0] == "not":
            return self.align_documents(mask[1], s)
        align = self.align(oracle.padded(*mask[1:3], s))
        return "upper_left" if align is None and not np.array_equal(*mask[1:3]) else align

    def leaf(self, s: Any, depth: int) -> Any:
        r = self.r
        numbers = lambda *shape, most=s.keys: self.g.integers(0, most + 1, shape)
        made = {
            "lengths": lambda: (numbers(s.batch, *([s.queries] if r.random() < 0.4 else [])),),
            "padding": lambda: (numbers(s.batch, s.keys, most=1),),
            "right padding": lambda: ((np.arange(s.keys) < numbers(s.batch, 1)),),
            "causal": lambda: (),
            "window": lambda: (r.randrange(9), r.randrange(5)),
            "documents": lambda: (np.arange(s.keys) // r.choice([1, 3, 7]),),
            "recurring documents": lambda: (numbers(s.batch, s.keys, most=3),),
            "prefix": lambda: (numbers(s.batch),),
            "intervals": lambda: self.interval(s),
            "where": lambda: ([r.randrange(4) for _ in range(4)],),
            "dense": lambda: (self.g.random((s.queries, s.keys)) > r.random(),),
        }
        if s.queries == s.keys:
            ends = lambda: np.unique([0, s.keys, *numbers(3)])
            made["packed documents"] = lambda: (np.searchsorted(ends()[1:], np.arange(s.keys), "right"),)
        kind = r.choice(list(made))
        # an alignment is needed where lengths differ; a mask that takes none may stand anywhere
        return kind.split()[-1], *made[kind]()

    def interval(self, s: Any) -> tuple[Array, Array]:
        shape = self.r.choice([(s.queries,), (s.batch, s.queries), (s.batch, s.heads, s.queries)])
        start, stop = (self.g.integers(0, s.keys + 1, shape) for _ in range(2))
        return start, stop

    def biases(self, s: Any, depth: int, tiny: bool) -> tuple[tuple[Any, ...], str]:
        r, g = self.r, self.g

        def dense() -> Any:
            shape = [r.choice([1, n]) for n in (s.queries, s.keys)]
            if depth in (3, 4):
                shape = [*(r.choice([1, n]) for n in s.lead), *shape]
            tensor = g.standard_normal(shape) * (1.0 if tiny else r.choice([1.0, 1.0, 50.0, 1e4]))
            if r.random() < 0.3:
                tensor[g.random(shape) < 0.3] = -np.inf
            elif r.random() < 0.06 and not tiny:
                tensor[g.random(shape) < 0.1] = np.inf
            return "dense", {}, {"tensor": tensor}

        made = {
            "alibi": lambda: ("alibi", {}, {"slopes": slopes(s.heads)}),
            "relative": lambda: (
                "relative",
                {"num_buckets": 8, "max_distance": 20, "bidirectional": r.random() < 0.5},
                {"weight": g.standard_normal((8, s.heads)) * r.choice([1.0, 5.0])},
            ),
            "dense": dense,
            "distance": lambda: (
                "distance",
                {},
                {"table": g.standard_normal((*[(), (1,), (s.heads,)][r.randrange(3)], max(s.queries + s.keys - 1, 0)))},
            ),
        }
        kinds = list(made) if s.heads else ["dense"]
        found = tuple(made[r.choice(kinds)]() for _ in range(1 + (r.random() < 0.3)))
        return found, "tensor" if len(found) == 1 and found[0][0] == "dense" and r.random() < 0.3 else "bias"

    def garbage(self, p: Problem, sizes: Any) -> Problem:
        """What nobody may see, and what sees nothing, is not finite."""
        keep = oracle.allowed(p.mask, sizes, p.align)
        unseen, blind = ~keep.any(2), ~keep.any(3)
        bad = self.r.choice([np.nan, np.inf, -np.inf])
        query, key, value = (x.copy() for x in p.inputs)
        count = lambda flags, x: sizes.unfold(
            np.broadcast_to(flags[..., None], (*flags.shape, x.shape[-1])) * 1.0, x.shape
        )
        for x, flags in ((query, blind), (key, unseen), (value, unseen)):
            x[count(flags, x) == count(np.ones_like(flags), x)] = bad
        return replace(p, query=query, key=key, value=value)


def slopes(heads: int) -> Array:
    """ALiBi's, as its paper has them, in float32."""
    power = 2 ** int(math.log2(heads))
    first = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
    more = [2.0 ** (-4 * h / power) for h in range(1, 2 * (heads - power), 2)]
    return np.array(first + more).astype(np.float32).astype(np.float64)


def problem_of(p: Problem, dtype: str, bias_dtype: str) -> Problem:
    """The same problem of numbers that these dtypes have."""
    return mapped(p, lambda x: rounded(x, dtype), lambda x: rounded(x, bias_dtype))


def draw(number: int) -> Spec:
    return Draw(number).spec()
