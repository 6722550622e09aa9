"""The problem that an engine computes: validated once, lowered once, immutable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import check_float, mask_forms, to_tensor, to_tensor_float
from clearhead.base.document_edges import DocumentEdges
from clearhead.base.dropout import check_dropout, draw_seed
from clearhead.base.errors import ClearheadError, ShapeError, UnsupportedError, columns
from clearhead.base.kept import Memo
from clearhead.base.output.text import outlined
from clearhead.base.positions import check_align, query_offset
from clearhead.base.shapes import Sizes, as_inputs, copy_shared_rows, fit, plain_sizes, refuse_fakes
from clearhead.base.torch_state.contexts import cast_input, is_autocasting, raise_in_jit_trace
from clearhead.base.torch_state.mode import CURRENT, Mode, get_mode
from clearhead.base.torch_state.modules import after_hooks
from clearhead.base.torch_state.tensor_kind import has_no_values, is_dtensor, is_in_memory, is_readable
from clearhead.base.torch_state.versions import Versions
from clearhead.base.user_functions.function_reads import FunctionReads
from clearhead.biases.base import Added, lowered
from clearhead.biases.dense import DenseBias
from clearhead.masks.base import Mask, Spans
from clearhead.masks.dense import DenseMask, check_keep
from clearhead.problem.arguments import DOT, as_bias, as_score, as_sinks, make_type_error, validate_scale
from clearhead.problem.lengths import check_mask
from clearhead.problem.reads import tensors_in
from clearhead.problem.region import Region, bias_part, visible_part
from clearhead.problem.unseen import group, zero
from clearhead.problem.visible import Visible, finite_unseen, resolve, seen_of
from clearhead.scores.base import ByTile, Pairwise, Score, check_pairwise
from clearhead.scores.change_in_documents import count_in_documents


class ABSENT:
    """The default of `value`, for calls that return only the weights.

    A class, because a copy of a class is the class itself.
    """


class Problem(NamedTuple):
    """One attention call in normal form, as engines compute it; immutable.

    Tensors are (B, H, L, E). Key and value may have fewer heads (grouped queries).

    Attributes:
        scores: The score in normal form, with query and key.
        value: The value, (B, Hk, Lk, Ev); None if only the weights are computed.
        sizes: The sizes of the score matrix, its device, and the alignment.
        visible: The mask in normal form; None if every pair is allowed.
        bias: The bias in normal form; None without a bias.
        sinks: One logit for each head, (H,); None without sinks.
        dropout_p: The probability of dropping a weight; 0 by default.
        seed: The seed of the dropout, an int64 scalar.
        poison: NaN for queries, (B, H, Lq, 1), and keys, (B, Hk, 1, Lk), that were not finite, else 0: see `guard`.
        origin: The indices of this problem in the problem that it was cut out of: see `regions.cut`.
        documents: The edges of the documents in which positions count; None if they count in the whole row.
        mode: The state of PyTorch in which the call computes it. A stored problem has the mode of its reader.

    Formula:
        scores = score(query, key) + bias, and −∞ for masked pairs
        weights = softmax of the scores over the keys; a sink adds one term to the denominator
        output = dropout(weights) · value
    """

    scores: Pairwise | ByTile
    value: Tensor | None
    sizes: Sizes
    visible: Visible | None = None
    bias: Added | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    seed: Tensor | None = None
    poison: tuple[Tensor, Tensor] | None = None
    origin: tuple[range, ...] | None = None
    documents: DocumentEdges | None = None
    mode: Mode = CURRENT

    def __repr__(self) -> str:
        return outlined(self._replace(mode=CURRENT))

    def _refresh_mode(self) -> Problem:
        """Return the same problem for a call that computes it here, at once."""
        return self._replace(mode=get_mode())

    @property
    def query(self) -> Tensor:
        """The query, (B, H, Lq, Eq), as the score's normal form has it."""
        return self.scores.query

    @property
    def key(self) -> Tensor:
        """The key, (B, Hk, Lk, Ek), as the score's normal form has it."""
        return self.scores.key

    @property
    def lowered(self) -> Pairwise | None:
        """The scores in the form that the kernels take, a `Pairwise`; None if they have another form."""
        return self.scores if isinstance(self.scores, Pairwise) else None

    @property
    def tile_alone(self) -> str:
        """Why the scores are no `Pairwise`, for `Engine.objections`."""
        changes = isinstance(self.scores, ByTile) and self.scores.score.changed_by is not None
        return "a function of positions changes the scores" if changes else "the score has only tile()"

    @property
    def spans(self) -> Spans | None:
        """The spans of the mask; None without a mask."""
        return None if self.visible is None else self.visible.spans

    @property
    def edges(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The starts and stops of the spans on the host; None without a mask, or if they are unknown."""
        return None if self.visible is None else self.visible.edges

    @property
    def groups(self) -> int:
        """The number of query heads for each key head."""
        return self.sizes.heads // self.key.shape[1] if self.key.shape[1] else 1

    @property
    def added(self) -> tuple[Tensor, ...]:
        """The tensors of the bias."""
        return () if self.bias is None else self.bias.tensors

    @property
    def by_function(self) -> bool:
        """Whether a part of the bias is a function, which may read any tensor."""
        return self.bias is not None and self.bias.function is not None

    @property
    def calls_functions(self) -> bool:
        """Whether functions, maybe a user's, compute a part of the scores; a backward pass calls them again."""
        return self.lowered is None or self.by_function or (self.spans is not None and self.spans.residual is not None)

    @property
    def plain(self) -> bool:
        """Whether the call has no mask, bias, sinks or dropout."""
        return self.visible is None and self.bias is None and not self.dropout_p and self.sinks is None

    @property
    def needs_grad(self) -> bool:
        """Whether gradients are enabled, and an operand requires grad or may depend on a tensor that does."""
        if not torch.is_grad_enabled():
            return False
        scores = self.scores
        if isinstance(scores, ByTile) or (self.bias is not None and self.bias.function is not None):
            return True  # a score with tile() alone, or a function, may read any tensor
        dense, relative = (None, None) if self.bias is None else (self.bias.dense, self.bias.relative)
        for tensor in (scores.query, scores.key, scores.weight, self.sinks, self.value, dense, relative):
            if tensor is not None and tensor.requires_grad:
                return True
        return False

    @property
    def has_positions(self) -> bool:
        """Whether the positions of the queries among the keys are known."""
        same = self.sizes.queries == self.sizes.keys if self.documents is None else self.documents.same
        return same or self.sizes.align is not None

    def query_offset(self, who: str) -> int | Tensor:
        """Return the position of each query among the keys, minus its index, as the function `query_offset` does.

        Args:
            who: The name of the caller, for the error.

        Returns:
            An integer, or a tensor (B or 1, 1, 1); with documents one number for each query, (1, 1, Lq).
        """
        edges = self.documents
        return query_offset(self.sizes, who) if edges is None else edges.compute_offsets(self.sizes, who)

    def reads(self) -> Versions:
        """Return the tensors that a backward pass reads and autograd does not save.

        They belong to the mask, the bias, and a score with `tile()`.

        Returns:
            The tensors with their version counters.
        """
        found = []
        if self.spans is not None:
            found = [("the mask", tensor) for tensor in (*self.spans.edges(), *self.spans.reads)]
        return Versions([*found, *self.read_by_functions()])

    def read_by_functions(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that the bias and a score with `tile()` read.

        Returns:
            Pairs of the reader's name and the tensor.
        """
        found = [] if self.bias is None else [("the bias", tensor) for tensor in self.bias.reads]
        if self.by_function and self.bias is not None:
            found += [("the bias", tensor) for tensor in FunctionReads(self.bias.function).tensors]
        if isinstance(self.scores, ByTile):
            found += [("the score", tensor) for tensor in tensors_in(self.scores.score)]
        return found


def make_problem(
    query: Any,
    key: Any,
    value: Any = ABSENT,
    score: Score | Callable[[Tensor, Tensor], Tensor] | None = None,
    mask: Any = None,
    bias: Any = None,
    scale: float | None = None,
    sinks: Any = None,
    align: Any = None,
    dropout_p: float = 0.0,
    *,
    as_written: bool = False,
    by_tile: bool = False,
    among: tuple[int, int] | None = None,
    mode: Mode = CURRENT,
) -> Problem:
    """Validate all arguments of a call, and lower them to normal form. No argument is written to.

    The order of the checks is a part of the API, because it decides which error a call with several mistakes raises:
    query, key and value; `align`; the class of `score`, its hooks, and what it takes; `scale`; plain tensors beside
    masks, biases and dropout; `dropout_p`; `mask`; `bias`; the result of the score's `lower`; `sinks`. Without a mask,
    a bias, sinks and dropout only `lower` is checked after `scale`.

    Args:
        query: As in `attention`.
        key: As in `attention`.
        value: As in `attention`; `ABSENT` for the weights alone.
        score: As in `attention`.
        mask: As in `attention`.
        bias: As in `attention`.
        scale: As in `attention`.
        sinks: As in `attention`.
        align: As in `attention`.
        dropout_p: As in `attention`.
        as_written: Whether to use `tile()` of the score and the matrix of the mask. The reference engine computes this
            form, so it is an oracle for normal forms.
        by_tile: Whether to use `tile()` of the score, and the normal form of the mask. The steps of a score begin at
            query and key, as `tile()` does.
        among: If mask and bias cover more keys than `key` has: the index of the first given key, and the number of all
            keys.
        mode: The state of PyTorch here, for a problem that the caller computes at once and does not store.
    """
    by_tile, given, mode = by_tile or as_written, mode, get_mode() if mode is CURRENT else mode
    sizes = plain_sizes(query, key, value) if mode.eager and not mode.autocast else None
    plain = sizes is not None and is_in_memory(query, key, value)
    if sizes is None or not plain:
        query, key, value, sizes = inputs(query, key, value, mode)
    if align is not None:
        sizes = sizes._replace(align=check_align(align))
    if query.element_size() < 4:
        query, key, *values = copy_shared_rows(query, key, *([] if value is None else [value]))
        value = values[0] if values else None
    if not isinstance(score, Score):
        score = as_score(score)
    if score is not DOT:
        score = after_hooks(score, query, key)
    documents = mask._document_edges if mask is not None and isinstance(mask, Mask) else None
    if documents is not None:
        score = count_in_documents(score, documents)
    score.check(query, key)
    if 0 in sizes[:4] and not mode.compiled:  # even without pairs a NaN would reach the gradient of a projection
        query, key = (t.masked_fill(~t.isfinite(), 0.0) for t in (query, key))
    factor = score._default_scale(query.shape[-1]) if scale is None else validate_scale(scale, score)
    of_all = sizes if among is None else _of_all(sizes, *among)
    no_dropout = type(dropout_p) in (float, int) and not dropout_p
    if mask is None and bias is None and sinks is None and no_dropout:
        scores = _scores(score, query, key, factor, by_tile, among, mode.autocast)
        return Problem(scores, value, sizes, mode=given)
    if not plain:
        refuse_distributed({"query": query, "key": key, "value": value})
    dropout_p = 0.0 if no_dropout else check_dropout(dropout_p, "dropout_p")
    seed = draw_seed(sizes.device) if dropout_p else None
    visible, added = mask_and_bias(mask, bias, of_all, query.dtype, as_written, mode)
    if among is not None:
        region = Region(keys=slice(among[0], among[0] + sizes.keys))
        visible = None if visible is None else visible_part(visible, region, of_all)
        added = None if added is None else bias_part(added, region, of_all)
    scores = _scores(score, query, key, factor, by_tile, among, mode.autocast)
    projected = scores.query is not query or scores.key is not key
    unseen = None if visible is None or visible.unseen == "none" else visible
    # A key that no query may attend to may be NaN, which would reach the gradients of the score's projections. Without
    # projections the engines, and the code that shows raw scores, handle such keys.
    if unseen is not None and projected and not finite_unseen(unseen, query, key):
        keys, queries = seen_of(unseen, sizes)
        query = zero(query, queries, only_not_finite=True)
        key = zero(key, group(keys, key.shape[1]), only_not_finite=True)
        scores = _scores(score, query, key, factor, by_tile, among, mode.autocast)
    sinks = None if sinks is None else as_sinks(sinks, sizes)
    if sinks is not None and not mode.compiled and has_no_values(sinks):
        refuse_fakes({"query": query, "sinks": sinks})
    problem = Problem(scores, value, sizes, visible, added, sinks, dropout_p, seed, mode=given)
    return problem if documents is None or among is not None else problem._replace(documents=documents)


def mask_and_bias(
    mask: Any, bias: Any, sizes: Sizes, dtype: torch.dtype, as_written: bool = False, mode: Mode = CURRENT
) -> tuple[Visible | None, Added | None]:
    """Return the normal forms of the arguments `mask` and `bias`; `dtype` is the dtype of the query."""
    visible = float_mask = None
    if isinstance(mask, Mask):
        visible = resolve(mask, sizes, as_written, mode)
    elif mask is not None:
        visible, float_mask = _tensor_mask(mask, sizes, dtype, as_written, mode)
    added = None if bias is None else lowered(as_bias(bias, mask), sizes)
    if float_mask is not None:
        added = Added(dense=float_mask) if added is None else added.plus(Added(dense=float_mask))
    return visible, added


def _of_all(sizes: Sizes, first: int, total: int) -> Sizes:
    """Return the sizes with all `total` keys, of which the given keys begin at `first`."""
    if first < 0 or first + sizes.keys > total:
        raise ShapeError(
            f"keys is ({first}, {total}), and there are {sizes.keys} keys here: their indices would be {first} … "
            f"{first + sizes.keys - 1} of {total}."
        )
    return sizes._replace(keys=total)


def inputs(query: Any, key: Any, value: Any, mode: Mode) -> tuple[Tensor, Tensor, Tensor | None, Sizes]:
    """Convert the arguments to tensors (B, H, L, E)."""
    query, key = to_tensor_float(query, "query"), to_tensor_float(key, "key")
    value = None if value is ABSENT else to_tensor_float(value, "value")
    if mode.autocast or not mode.eager:
        raise_in_jit_trace()
        query, key, value = cast_input(query), cast_input(key), None if value is None else cast_input(value)
    return as_inputs(query, key, value)


def with_value(problem: Problem, value: Any) -> Problem:
    """Return the problem with a value (..., Lk, Ev), whose leading dimensions broadcast to those of the problem."""
    value = to_tensor_float(value, "value")
    if value.dtype != problem.query.dtype and value.is_floating_point():  # autocast changed the dtype of the call
        dtype = torch.promote_types(value.dtype, problem.query.dtype)
        scores = problem.scores._replace(query=problem.query.to(dtype), key=problem.key.to(dtype))
        problem, value = problem._replace(scores=scores), value.to(dtype)
    sizes = problem.sizes
    if sizes.heads_last is not None and value.ndim > 2:  # an index chose sequences or heads
        # insert the dimension of the heads, which the number of dimensions does not show
        value = value.unsqueeze(-3) if not sizes.has_heads else value[None] if value.ndim == 3 else value
    if problem.groups > 1 and sizes.has_heads and value.ndim > 3 and value.shape[-3] == sizes.heads:
        key = problem.key.repeat_interleave(problem.groups, 1)  # the value has one head for each query head
        problem = problem._replace(scores=problem.scores._replace(key=key))
    key_heads = problem.key.shape[1]
    outer = sizes.shown[:-1] if sizes.has_heads else sizes.shown
    heads, key_heads_shown = ((sizes.heads,), (key_heads,)) if sizes.has_heads else ((), ())
    if sizes.heads_last is not None:
        outer, heads, key_heads_shown = outer or (1,), (sizes.heads,), (key_heads,)
    number = problem.query.detach().new_zeros(())  # expands to a query and key, beside which as_inputs checks the value
    query = number.expand(*outer, *heads, sizes.queries, 1)
    _, key, value, both = as_inputs(query, number.expand(*outer, *key_heads_shown, sizes.keys, 1), value)
    if both.shape != sizes.shape:
        raise ShapeError(
            f"value has more leading dimensions than the weights {(*sizes.shown, sizes.queries, sizes.keys)}.\n"
            + columns({"weights": (*sizes.shown, sizes.queries, sizes.keys), "output": (*both.shown, sizes.queries, 1)})
        )
    if key.shape[1] == key_heads:
        return problem._replace(value=value)
    scores = problem.scores._replace(key=problem.key.expand(-1, key.shape[1], -1, -1))  # broadcasts one head
    return problem._replace(value=value, scores=scores)


def refuse_distributed(inputs: dict[str, Tensor | None]) -> None:
    """Raise if one of the inputs is a DTensor."""
    for name, tensor in inputs.items():
        if tensor is not None and is_dtensor(tensor):
            raise UnsupportedError(
                f"{name} is a DTensor, shape {tuple(tensor.shape)}; expected a plain tensor beside masks, biases and "
                f"dropout, which PyTorch does not mix with DTensors.\nPass {name}.to_local() and each rank's part of "
                f"the mask, or {name}.full_tensor()."
            )


def _scores(
    score: Score,
    query: Tensor,
    key: Tensor,
    factor: float,
    by_tile: bool,
    among: tuple[int, int] | None,
    autocast: bool,
) -> Pairwise | ByTile:
    """Return the normal form of a score in the dtype of the inputs, which a projection may widen under autocast."""
    lowered = None if by_tile or score.changed_by is not None else score.lower(query, key)
    if lowered is None:
        if score.changed_by is None:
            return ByTile(score, query, key, factor, score.softcap)
        keys = None if among is None else range(among[0], among[0] + key.shape[2])
        places = None if keys is None else (*map(range, query.shape[:3]), keys)
        return ByTile(score, query, key, factor, score.softcap, places, Memo())
    if autocast:
        lowered = lowered._replace(query=lowered.query.to(query.dtype), key=lowered.key.to(query.dtype))
    lowered = check_pairwise(lowered, query, key, type(score).__name__)
    phi, low_query, low_key, weight, scale, _ = lowered
    return Pairwise(phi, low_query, low_key, weight, scale * factor, score.softcap)


def _tensor_mask(
    mask: Any, sizes: Sizes, dtype: torch.dtype, as_written: bool, mode: Mode
) -> tuple[Visible | None, Tensor | None]:
    """Return the normal form of a tensor or an array passed as `mask`: spans for bool, a bias for float."""
    if not isinstance(mask, Tensor | np.ndarray):
        check_mask(mask)
        raise make_type_error(
            "mask", mask, "a Mask, such as Causal(), a bool tensor (True = may attend), or a float tensor"
        )
    tensor = to_tensor(mask, "mask")
    if tensor.device != sizes.device:
        raise ClearheadError(f"mask is on {tensor.device}; expected {sizes.device}. Pass mask.to(query.device).")
    if not tensor.is_floating_point():
        return resolve(DenseMask(check_keep(tensor, "mask", mask)), sizes, as_written, mode), None
    if tensor.dtype != dtype and not is_autocasting(tensor.device):  # autocast changes only the dtype of the inputs
        raise ClearheadError(
            f"mask has dtype {tensor.dtype}, shape {tuple(tensor.shape)}; expected {dtype}, as the scores have.\n"
            "Pass mask.to(query.dtype), or a bool tensor, True = may attend."
        )
    check_float(tensor, "mask")
    if only_zeros_and_ones(tensor):
        raise ClearheadError(
            f"mask has dtype {tensor.dtype}, shape {tuple(tensor.shape)}, and holds only 0 and 1; added to the scores, "
            f"as a float mask is, it would mask nothing.\n{mask_forms('mask', tensor)}\nTo add it nevertheless, pass "
            "it as bias=mask."
        )
    return None, fit(tensor, sizes, "mask")


def only_zeros_and_ones(mask: Tensor) -> bool:
    """Whether a float mask is known to hold only 0 and 1, and some 1. Such a mask masks nothing."""
    if mask.requires_grad or mask.device.type != "cpu" or not is_readable(mask):
        return False
    flat = mask.detach().flatten()
    parts = flat[:256], flat  # the first numbers of most masks give the answer
    return all(bool(((part == 0) | (part == 1)).all()) for part in parts) and bool((flat == 1).any())


def with_given(problem: Problem, bias: Any, mask: Any) -> Problem:
    """Return the problem with the arguments `bias` and float `mask` stored in its `Added`: explanations name them."""
    if problem.bias is None:
        return problem
    given = [] if bias is None else [as_bias(bias, mask)]
    if isinstance(mask, Tensor | np.ndarray) and to_tensor(mask, "mask").is_floating_point():
        given.append(DenseBias(mask))
        given[-1].of_mask = True
    return problem._replace(bias=problem.bias._replace(given=sum(given[1:], start=given[0])))
