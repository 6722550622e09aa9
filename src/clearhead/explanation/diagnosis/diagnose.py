"""diagnose(): what is wrong or risky in a call of attention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol, Unpack, overload, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from clearhead._attention import Arguments
from clearhead.base.arrays import ArrayT
from clearhead.base.errors import ClearheadError
from clearhead.base.torch_state.tensor_kind import is_readable
from clearhead.explanation.call_arguments import ProblemOptions
from clearhead.explanation.diagnosis.case import Case
from clearhead.explanation.diagnosis.checks import CHECKS
from clearhead.explanation.diagnosis.diagnosis import Diagnosis
from clearhead.explanation.diagnosis.reading import case_of
from clearhead.explanation.modules.captured import reach_call
from clearhead.problem.lengths import apply_valid_lens
from clearhead.problem.padded import pad_arguments

EXPECTED, OUTPUT = "the mask you expect", "the backend's output"  # what is not examined

# The parameters of modules that project: those that begin with one of these.
PROJECTIONS = ("W_q.", "W_k.", "W_v.", "W_o.", "w_v", "in_proj", "out_proj.")


@runtime_checkable
class Diagnosable(Protocol):
    """An object that can diagnose its own calls: a recorded call, a recording, a monitor."""

    def diagnose(self) -> Diagnosis: ...


@overload
def diagnose(query: ArrayT, key: ArrayT, value: ArrayT, **options: Unpack[ProblemOptions]) -> Diagnosis: ...


@overload
def diagnose(query: nn.Module, *inputs: object, **keywords: object) -> Diagnosis: ...


@overload
def diagnose(query: Diagnosable) -> Diagnosis: ...


def diagnose(
    query: Any,
    key: Any = None,
    value: Any = None,
    *inputs: Any,
    score: Any = None,
    mask: Any = None,
    valid_lens: Any = None,
    bias: Any = None,
    scale: Any = None,
    sinks: Any = None,
    align: Any = None,
    **keywords: Any,
) -> Diagnosis:
    """Find what is wrong or risky in a call of attention. Each finding has its evidence, and says what to do instead.

    >>> import torch, clearhead as ch
    >>> x = torch.randn(1, 2, 6, 64, generator=torch.Generator().manual_seed(0))
    >>> print(ch.diagnose(x, x, x, mask=torch.ones(6, 6).triu(1).bool()))     # torch.nn's: True is "may not"
    1 error, 1 warning.
    error: a mask of the opposite polarity
      In (1, 2, 6, 6), each query sees later ones alone, and not its own: a causal
      mask upside down.
      → True means 'may attend' here, in SDPA and in transformers; in torch.nn's
        modules it means 'may not'. Pass Causal(), or ~mask.
    warning: queries that see nothing (head 0, query 5)
      2 of 12 queries of (1, 2, 6, 6) may see no key: their output is 0.
      → Let each query see one key at least, such as its own, or leave these queries
        out. Where this is padding: other backends give NaN, or the mean of all
        values, there.
    Not examined: the mask you expect, the backend's output. Use ch.audit.
    >>> len(ch.diagnose(x, x, x, mask=ch.Causal()))
    0
    >>> attend = ch.nn.MultiHeadAttention(embed_dim=64, num_heads=2)
    >>> [finding.name for finding in ch.diagnose(attend, x[0], x[0], x[0], valid_lens=[0, 6])]
    ['queries that see nothing']

    For a call, pass the arguments of `attention`. A shape or a dtype that does not fit raises the error that
    `attention` raises; a mask of 0 and 1, and positions without `align`, which `attention` refuses too, are findings.
    For a module of `clearhead.nn`, or a `torch.nn.MultiheadAttention`, pass the module and the arguments of its call.
    The module runs no further than to its attention, and its `attention_weights` and caches stay.
    For a model, record it, `with ch.watch(model, values=True) as seen: model(...)`, and call `seen.diagnose()` or
    `diagnose(seen)`, or diagnose one of its calls. Without `values=True`, values, parameters, precision and
    the model's own output are not checked, and the diagnosis says so.
    For training, pass the `Monitor` that `ch.models.monitor` gives: `diagnose(monitor)`.

    The checks look at the mask (queries that see nothing, the opposite polarity, padding attended, 0 and 1, all true,
    positions of unequal lengths, finite fills), at axes (heads without the transposition, and length and batch
    exchanged, where memory or numbers show it), at numbers (NaN and infinity in parameters and inputs, and their
    places, NaN that SDPA would leak, the error against float64, an output of another formula), and at the softmax (a
    scale missing or applied twice, saturation, few effective keys, uniform heads, heads that rest on one key, values of
    0). Entropies are compared to a uniform softmax under the same mask; a scale is judged by the spread of the scores,
    not by its constant.
    Each threshold, and the reason for it, stands in the docstring of its check.
    No check needs to know which mask you expect: `clearhead.audit` tests that, and whether inputs reach outputs that
    they must not reach.
    Returns a `Diagnosis`, empty where nothing is found. Nothing that was passed is changed.
    Raises a `ClearheadError` for any other argument.
    Cost: one pass over the allowed pairs; beyond 2²⁷ pairs, over those of evenly spaced queries. Every pair of a mask
    without intervals is looked at. Memory O(Lq + Lk).
    Sources: Zhai et al. 2023, "Stabilizing Transformer Training by Preventing Attention Entropy Collapse"; Xiao et al.
    2024, "Efficient Streaming Language Models with Attention Sinks".
    """
    options = {"score": score, "mask": mask, "bias": bias, "scale": scale, "sinks": sinks, "align": align}
    every = options | {"valid_lens": valid_lens}
    given = {name: option for name, option in every.items() if option is not None} | keywords
    positional = (key, value, *inputs)
    while positional and positional[-1] is None:
        positional = positional[:-1]
    if isinstance(query, nn.Module):
        return diagnosis_of([_of_module(query, positional, given)])
    if isinstance(query, Diagnosable) and not isinstance(query, type) and not positional and not given:
        return query.diagnose()
    if keywords or inputs or key is None or value is None:
        got = ", ".join([*(type(one).__name__ for one in (query, *positional)), *(f"{name}=" for name in given)])
        raise ClearheadError(
            f"diagnose takes query, key and value, and by name {', '.join(every)}; a module and its inputs; or an "
            f"AttentionCall, a Recording or a Monitor alone. Got {got}."
        )
    options["mask"], options["bias"] = apply_valid_lens(mask, valid_lens, bias)
    return diagnosis_of([case_of(Arguments(query, key, value, **options))])


@torch.no_grad()
def diagnosis_of(cases: Iterable[Case]) -> Diagnosis:
    """The findings of every check in every case."""
    findings, unexamined = [], {EXPECTED: None}
    for case in cases:
        unexamined |= {} if "value" in case.inputs else {"values": None}
        unexamined |= {} if case.output is not None else {OUTPUT: None}
        if 0 not in case.shape:
            found = (finding for check in CHECKS for finding in check.find(case))
            findings += [replace(finding, where={**case.where, **finding.where}) for finding in found]
    return Diagnosis(findings, unexamined)


def _of_module(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Case:
    """The call of attention that a module would make."""
    found, ours, given = reach_call("diagnose", module, inputs, keywords)
    length_first = isinstance(ours, nn.MultiheadAttention) and not ours.batch_first
    sides = {side: t for side in ("query", "key", "value") if isinstance(t := given.get(side), Tensor)}
    case = case_of(pad_arguments(found), "attn_mask" if isinstance(module, nn.MultiheadAttention) else "bias")
    parameters = {name: p.detach() for name, p in ours.named_parameters() if not is_lazy(p) and is_readable(p)}
    return replace(
        case,
        length_first={side: t for side, t in sides.items() if length_first and t.ndim == 3},
        parameters=parameters,
        factors=case.factors | {name for name in parameters if name.startswith(PROJECTIONS)},
        given_finite=all(bool((t.values() if t.is_nested else t).isfinite().all()) for t in sides.values()),
    )
