"""What a recorder says of calls that it did not record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from clearhead.base.errors import ClearheadError
from clearhead.base.output.text import listed
from clearhead.inspection.deviation import Deviation
from clearhead.models.interception.layers import Site
from clearhead.models.interception.transformers_private import named_backend


def lost(calls: int) -> str:
    return (
        f"{calls} calls of scaled_dot_product_attention are not in the record: they were made in threads that ran no "
        "module. If they were the model's, call a module of it in these threads, or run it in one thread."
    )


def left(modules: Iterable[str]) -> str:
    """Of modules whose calls were made in other threads alone."""
    return (
        f"the calls of {listed(modules)} are left out: other threads made them. If the model's forward hands these "
        "modules to a pool of threads, run it in one thread; if another thread ran the model, nothing is missing."
    )


def nothing_seen(model: nn.Module, others: Iterable[str]) -> str:
    """`others`: what is said of calls that were made elsewhere."""
    backend = named_backend(getattr(model, "config", None))
    lines = [f"the model {type(model).__name__} made no attention call that clearhead recognises."]
    if backend is not None:
        lines.append(f"Its attention backend is {backend!r}.")
    if backend == "eager":
        lines.append("Some models make such calls on another one: load it with attn_implementation='sdpa', if it can.")
    lines += others
    lines.append(
        "Run the model itself inside the `with`, and not what torch.compile() made of it. Recognised are models that "
        "use the attention interface of transformers, torch.nn's attention and Transformer layers, and direct calls of "
        "scaled_dot_product_attention. Code of one's own (DeBERTa, Bloom, GPT-J) has to call one of these."
    )
    return "\n".join(lines)


def reason(error: Exception) -> str:
    """Why a call could not be recorded. An error of another library is named with its class."""
    return str(error) if isinstance(error, ClearheadError) else f"{type(error).__name__}: {error}"


def left_out(missing: Mapping[Site, str], where: str) -> str:
    """Of layers whose calls could not be recorded. `where`: completes "is not", as "in the record" does."""
    names = dict.fromkeys(site.name for site in missing)
    why = next(iter(missing.values()))
    return f"the attention of {listed(names)} is not {where}, and the model ran on without it: {why}"


def describe_deviations(found: Mapping[Site, Deviation | None], what: str) -> Iterable[str]:
    """Of layers that a function of another project computes, and not as it is recorded. `what`: such as "record"."""
    for site, one in found.items():
        if one is not None and not one.is_rounding:
            yield describe_deviation(f"{site.name} ({site.layer})", one, what)


def describe_deviation(name: str, found: Deviation, what: str) -> str:
    return (
        f"the output of {name} is not that of its {what}: a function of neither PyTorch nor transformers computes it, "
        f"and it differs from softmax(scores) · value by {found.ratio:.2g} times its rounding."
    )
