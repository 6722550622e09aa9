"""The old names and the new ones: an old name raises an error that says the new one, for this version.

`RENAMED` has a row for each: a name of a namespace ("clearhead.Entropy"), a method of a class ("Recording.save"), or a
keyword of a function ("watch(keep=)").
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from opcode import opmap

_MOVED = {
    "clearhead.reductions": "Entropy TopK Received Pool MeanDistance LogSumExp MaxScore Mass SinkShare Output",
    "clearhead.edits": "Edit Knockout AddBias",
    "clearhead.extend": "Score Mask Bias Pairwise Spans Added",
    "clearhead.models": "survey monitor lazy_attentions assert_attends AttentionCall Audit AuditedCall CallDifference "
    "ComparedCall Comparison Differences Distinctive LazyAttention Means Monitor Recording ReducedCall Statistics "
    "Survey Table",
    "clearhead.explanation": "Explanation Diagnosis Finding",
    "clearhead.results": "Plan PartialAttention Weights WeightGradients WeightDifference",
}
_OF_MODELS = {
    "Steps": "clearhead.models.Generation",
    "compare": "clearhead.models.compare_backends",
    "align": "clearhead.models.match_tokens",
    "use_in_transformers": "clearhead.models.run_on_clearhead",
    "load_seen": "clearhead.models.load_recording",
    "Scale": "clearhead.edits.ScaleHeads",
    "Force": "clearhead.edits.ForceMask",
}
_STATISTICS = "clearhead.models.statistics(model, reductions)"

RENAMED: Mapping[str, str] = {
    **{f"clearhead.{name}": f"{home}.{name}" for home, names in _MOVED.items() for name in names.split()},
    **{f"clearhead.{name}": new for name, new in _OF_MODELS.items()},
    **{f"clearhead.models.{name}": new for name, new in _OF_MODELS.items()},
    **{f"clearhead.models.{name}": f"clearhead.edits.{name}" for name in ("Edit", "Knockout", "AddBias")},
    **{f"clearhead.edits.{name}": _OF_MODELS[name] for name in ("Scale", "Force")},
    "clearhead.distributed.Plan": "clearhead.distributed.RankPlan",
    "AttentionCall.weighted_norms": "AttentionCall.weighted_value_norms",
    "Recording.save": "Recording.write(path)",
    "Recording.report": "Recording.view(tokens=…).write(path)",
    "Survey.save": "Survey.write(path), with a path that ends in .csv",
    "Survey.report": "Survey.write(path), with a path that ends in .html",
    "Explanation.html(path=)": "Explanation.write(path)",
    "watch(keep=)": _STATISTICS,
    "watch(heads=)": f"{_STATISTICS[:-1]}, heads=…)",
    "watch(merge=)": f"{_STATISTICS[:-1]}, merge=…)",
    "watch(fuse=)": f"{_STATISTICS[:-1]}, fuse=…)",
    "Recording.compare(aligned=)": "Recording.compare(matched=)",
}


def public(names: Mapping[str, object]) -> list[str]:
    """The `__all__` of a namespace that only imports: its classes and functions, which `help` shows; no modules."""
    return sorted(name for name, value in names.items() if name[0] != "_" and hasattr(value, "__module__"))


def missing(owner: str, name: str, elsewhere: Iterable[str] = ()) -> AttributeError | ImportError:
    """The error for a name that a namespace, or an object of a class, lacks: it says the new name of an old one.

    `elsewhere`: namespaces that may have the name; the error says which one does. `from clearhead import name` would
    put an error of its own in the place of an AttributeError, without the new name: it is given an ImportError.
    """
    asker = sys._getframe(2)  # asked `__getattr__`
    imports = asker.f_code.co_code[asker.f_lasti] == opmap["IMPORT_FROM"]
    error = ImportError if imports else AttributeError
    new = RENAMED.get(f"{owner}.{name}")
    elsewhere = tuple(elsewhere)
    for place in elsewhere if new is None and not name.startswith("_") else ():
        if name in vars(import_module(place)):
            return error(f"{owner}.{name} is in a namespace: {place}.{name}.")
    if new is None and (near := _near(owner, name, elsewhere)):
        return error(f"{owner} has no {name!r}. Did you mean {near}?")
    if new is None:
        what = f"module {owner!r}" if owner.startswith("clearhead") else f"{owner!r} object"
        return AttributeError(f"{what} has no attribute {name!r}")
    return error(f"{owner}.{name} is now {new}.")


def _near(owner: str, name: str, elsewhere: Iterable[str]) -> str | None:
    """The public name that an unknown name of the package is most like, of its own or of its namespaces."""
    from difflib import get_close_matches

    if name.startswith("_") or not elsewhere:
        return None
    plain: dict[str, str] = {}  # each name as it is compared, the first place that has it
    for place in (owner, *elsewhere):
        for full in getattr(import_module(place), "__all__", ()):
            plain.setdefault(full.lower().replace("_", ""), f"{place}.{full}")
    asked = name.lower().replace("_", "")
    ends = [known for known in plain if len(asked) > 3 and known.endswith(asked)]
    near = [asked] if asked in plain else ends or get_close_matches(asked, plain, 1, 0.8)
    return plain[near[0]] if near else None


def refuse(function: str, given: Mapping[str, object]) -> None:
    """Raise the TypeError for keywords that a function does not take: it says the new name of an old keyword."""
    known = [name for name in given if f"{function}({name}=)" in RENAMED]
    for name in sorted(known, key=lambda name: name != "keep"):  # the others went with `keep` alone
        raise TypeError(f"{function}({name}=…) is now {RENAMED[f'{function}({name}=)']}.")
    for name in given:
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
