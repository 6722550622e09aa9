"""The public names, for the tables that must have each of them."""

import clearhead as ch


def public():
    """Every public name: those of clearhead, of clearhead.nn, of Weights, and what classes are built by."""
    spaces = ("edits", "explanation", "extend", "models", "nn", "reductions", "results")
    owners = [(ch, ""), (ch.results.Weights, "Weights."), *((getattr(ch, name), f"{name}.") for name in spaces)]
    for owner, prefix in owners:
        for name in dir(owner):
            value = getattr(owner, name)
            of_ours = callable(value) and str(getattr(value, "__module__", "")).startswith("clearhead")
            if owner not in (ch, ch.results.Weights) and name in ch.__all__:
                continue  # it stands at the top, too
            if not name.startswith("_") and (of_ours or owner is ch.results.Weights):
                yield prefix + name
            if isinstance(value, type) and of_ours:
                yield from (f"{prefix}{name}.{n}" for n in vars(value) if n.startswith(("from_", "to_")))
