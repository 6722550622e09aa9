"""The arguments of `survey`, checked."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from clearhead.base.errors import ClearheadError
from clearhead.base.numbers import check_count
from clearhead.inspection.reductions.base import Reduction
from clearhead.models._asked import asked
from clearhead.models._lengths import most_tokens
from clearhead.models.surveys._classes import WordClasses
from clearhead.models.surveys._looks import NAMED, Kept

USUAL = ("entropy", "first", "sink", "previous", "distance")
CLASSED = "word classes"


def kept_of(keep: Any, tokenizer: Any) -> Kept:
    if keep is None:
        keep = [*USUAL, *([CLASSED] if hasattr(tokenizer, "get_vocab") else [])]
    given = list(keep) if isinstance(keep, list | tuple) else [keep]
    names = [one for one in given if isinstance(one, str)]
    reductions = [one for one in given if not isinstance(one, str)]
    known = [name for name in NAMED if name != "value mass"]
    wrong = [name for name in names if name not in (*known, CLASSED)]
    if not given or wrong or not all(isinstance(one, Reduction) for one in reductions):
        raise ClearheadError(
            f"survey: keep is {keep!r:.300}; expected some of {', '.join(map(repr, known))}, {CLASSED!r}, and "
            "reductions such as ch.Entropy()."
        )
    if reductions:
        asked(reductions)  # refuses those that need a value of one call
    classes = WordClasses(tokenizer) if CLASSED in names else None
    return Kept(tuple(NAMED[name] for name in dict.fromkeys(names) if name != CLASSED), classes, tuple(reductions))


def rank_of(rank: Any, state: Any) -> tuple[int, int]:
    """The number of this process, and how many there are."""
    if rank is None:
        given = [os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")]
        rank = tuple(int(one) if one.isdecimal() else one for one in given)
    two = isinstance(rank, tuple | list) and len(rank) == 2 and all(type(one) is int for one in rank)
    if not two or not 0 <= rank[0] < rank[1]:
        raise ClearheadError(
            f"survey: rank is {rank!r}; expected (number, of how many), such as (0, 2), or None for what the variables "
            "RANK and WORLD_SIZE say."
        )
    if rank[1] > 1 and state is None:
        raise ClearheadError(
            f"survey: {rank[1]} ranks share a folder: pass state=, a folder that all of them can reach."
        )
    return rank[0], rank[1]


def length_of(model: Any, tokenizer: Any, asked_for: int | None) -> int | None:
    """How many tokens a text may have; None for any number."""
    if not isinstance(model, nn.Module):
        raise ClearheadError(f"survey takes a torch.nn.Module; got a {type(model).__name__}.")
    if model.training:
        raise ClearheadError("survey: the model is in training mode, whose dropout is random; call model.eval().")
    if not callable(tokenizer):
        raise ClearheadError(
            f"survey: tokenizer is a {type(tokenizer).__name__}; expected the tokenizer that the model was trained "
            "with, such as AutoTokenizer.from_pretrained(folder)."
        )
    most = most_tokens(model)
    if asked_for is None:
        return most
    check_count(asked_for, 1, "survey: max_length")
    if most is not None and asked_for > most:
        raise ClearheadError(
            f"survey: max_length is {asked_for}, and {type(model).__name__} takes at most {most} tokens."
        )
    return asked_for
