"""The arguments of the functions that record or reduce calls, checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from clearhead.base.errors import ClearheadError
from clearhead.base.numbers import check_count, check_flag
from clearhead.inspection.reductions.base import Reduction
from clearhead.inspection.reductions.by_query import Output, TopK
from clearhead.models.interception.choice import Heads, Item, checked_layers, checked_positions, chooses
from clearhead.models.interception.layers import Site
from clearhead.models.recordings.reduced import Means

if TYPE_CHECKING:
    from clearhead.models.recordings.attention_call import AttentionCall


class Asked(NamedTuple):
    """The arguments of `watch` and `statistics`.

    `keep`: the reductions, or None to keep query and key. `layers`: None takes all layers. `each`: a function that a
    survey calls with each call when it happens; then nothing of the call is kept. `own`: whether the calls of this
    thread alone are recorded, as functions do that run the model themselves: other threads may run it meanwhile. `who`:
    the function, for messages. `judge`: a function that an audit calls with each call when it has ended. Then the
    recorder keeps no call, compares no output with its record, and reads no padding from a call's own mask.
    """

    keep: tuple[Reduction[Any], ...] | None
    every: int
    layers: tuple[Item, ...] | None
    heads: Heads
    merge: Means | None
    values: bool = False
    gradients: bool = False
    fuse: bool = False
    each: Callable[[AttentionCall], None] | None = None
    own: bool = False
    who: str = "watch"
    judge: Callable[[AttentionCall], None] | None = None

    def chooses(self, site: Site) -> bool:
        """Whether the calls that a layer makes are recorded."""
        return chooses(self.layers, site, self.who)


def asked(every: Any = 1, layers: Any = None, values: Any = False, gradients: Any = False) -> Asked:
    """The arguments of `watch`, checked."""
    check_count(every, 1, "every")
    values, gradients = check_flag(values, "watch: values"), check_flag(gradients, "watch: gradients")
    return Asked(None, every, checked_layers(layers, "watch"), None, None, values, gradients)


def asked_to_reduce(
    reductions: Any, every: Any = 1, layers: Any = None, heads: Any = None, merge: Any = None, fuse: Any = False
) -> Asked:
    """The arguments of `statistics`, checked."""
    keep = tuple(reductions) if isinstance(reductions, list | tuple) else (reductions,)
    if not keep or not all(isinstance(one, Reduction) and not isinstance(one, Output) for one in keep):
        raise ClearheadError(
            f"statistics: reductions is {reductions!r}; expected reductions, as ch.reductions.Entropy(), and no "
            "Output(value), whose values are of one call."
        )
    for one in keep:
        if type(one) is TopK:
            check_count(one.k, 1, "k of TopK", most=2**31 - 1)
    check_count(every, 1, "every")
    checked_positions(heads, "statistics: heads")
    if not (merge is None or isinstance(merge, Means)):
        raise ClearheadError(f"statistics: merge is a {type(merge).__name__}; expected a ch.models.Means().")
    if not isinstance(fuse, bool) or (fuse and heads is not None):
        raise ClearheadError(f"statistics: fuse is {fuse!r}; True goes with all heads, whose pass gives the output.")
    return Asked(keep, every, checked_layers(layers, "statistics"), heads, merge, fuse=fuse, who="statistics")
