"""A call of attention that a model makes, as its source reads it before it is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._attention import Arguments, Ran
from clearhead.base.errors import UnsupportedError
from clearhead.base.torch_state.torch_private import OWN_SDPA
from clearhead.models.interception.keywords import RANKS, dot, unread_keywords
from clearhead.models.interception.masks import Recorded
from clearhead.models.interception.modules import Kind
from clearhead.models.interception.patch import original
from clearhead.models.interception.place import Place
from clearhead.problem.problem import Problem
from clearhead.scores.base import ChangeOfPair
from clearhead.scores.dot import Dot

KNOWN = ("torch", "transformers", "clearhead")  # the packages whose functions compute softmax(score + mask) · value


def is_foreign(function: Callable[..., Any]) -> bool:
    """Whether a function, or a function inside it, belongs to none of the known packages.

    A plain function is judged by the module of its globals, since `functools.wraps` copies the name of the module.
    """
    inside: Any = function
    while inside is not None:
        if isinstance(inside, partial):
            inside = inside.func
            continue
        if inside is OWN_SDPA:  # a function of C, without a module
            return False
        inside = getattr(inside, "__func__", inside)  # of a bound method
        plain = isinstance(inside, FunctionType)
        named = inside.__globals__.get("__name__") if plain else getattr(inside, "__module__", None)
        if str(named).partition(".")[0] not in KNOWN:
            return True
        inside = getattr(inside, "__wrapped__", None)
    return False


def is_sdpa_foreign() -> bool:
    """Whether a function of another project stands in the place of F.scaled_dot_product_attention."""
    return is_foreign(original(F, "scaled_dot_product_attention"))


@dataclass(eq=False)
class InterceptedCall:
    """A call of attention that a model makes.

    query (B, H, Lq, E), key (B, Hk, Lk, E), value (B, Hk, Lk, Ev), or None where the handler reads no values; the key
    heads are not repeated. `read_masks`: reads the masks of the call; where there are sinks, they are those of
    `Recorded.with_sinks`. `place`: the place of the output in the result, if it is known. `origin`: the layers that
    made query, key and value, as the handler's notes hold them; None means the layers of the running module. `name`,
    `kind`: None means the name and the kind of the innermost running module. `change`: of the scores, as `Score.then`
    takes it. `function`: the function that computes the call, where another project may have made it.

    Of a call of a backend's function by a model of transformers: `module`; `mask`, the model's attention_mask, a tensor
    or FlexAttention's BlockMask; `keywords`, all other arguments by name, which the function is given after `before`;
    `own`, the name of the function where it is one of transformers' own.
    Of a call of clearhead's own attention: the `problem` that the engine is given, and the `arguments` of `attention`:
    the problem's score is lowered, and its inputs are projected already.

    A handler sets `state`, which `after` reads, and `ran`, where an edit changes a call of clearhead's own attention.
    """

    query: Tensor
    key: Tensor
    value: Tensor | None
    backend: str
    read_masks: Callable[[], Recorded] = Recorded
    place: Place | None = None
    name: str | None = None
    kind: Kind | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    origin: Any = None
    change: ChangeOfPair | None = None
    function: Callable[..., Any] | None = None
    module: nn.Module | None = None
    mask: Any = None
    keywords: dict[str, Any] = field(default_factory=dict)
    own: str = ""
    problem: Problem | None = None
    arguments: Arguments | None = None
    state: Any = None
    ran: Ran | None = None
    instead: Any = None  # the result that `before` gave, in place of the function's

    @cached_property
    def masks(self) -> Recorded:
        return self.read_masks()

    @property
    def score(self) -> Dot:
        score = dot(self.scale, self.softcap)
        return score if self.change is None else score.then(self.change)

    @property
    def foreign(self) -> bool:
        """Whether a function of another project computes the call, by itself or inside of transformers' own."""
        inside = self.own == "sdpa_attention_forward" and is_sdpa_foreign()
        return inside or (self.function is not None and is_foreign(self.function))

    def check(self, name: str) -> None:
        """Raise for a call that would be read wrong. `name`: of the module."""
        message = self.unread(name)
        if message:
            raise UnsupportedError(message)

    def unread(self, name: str) -> str:
        """Of a call that would be read wrong; "" for any other call."""
        if self.backend == RANKS:
            return f"{name} attends over ranks. Set it back (run_on_clearhead(model)), and watch it in one process."
        if self.mask is not None and not isinstance(self.mask, Tensor) and not hasattr(self.mask, "mask_mod"):
            return (
                f"{name} gave the backend {self.backend!r} an attention_mask of type {type(self.mask).__name__}, which "
                "cannot be read. Load the model with attn_implementation='sdpa' or 'eager'."
            )
        return unread_keywords(name, self.backend, self.keywords)


def of_one_dtype(query: Tensor, key: Tensor, value: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Query, key and value of one dtype: under autocast they may differ."""
    dtype = torch.promote_types(query.dtype, key.dtype)
    return query.to(dtype), key.to(dtype), None if value is None else value.to(dtype)
