"""A finding of an audit as a script for a bug report, in PyTorch and transformers alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.models.audits.arguments import Model
from clearhead.models.audits.audit_report import AuditReport
from clearhead.models.audits.audited_model import AuditedModel, unwrap_model
from clearhead.models.audits.batches import find_inputs
from clearhead.models.interception.transformers_private import backend_of

MOST_NUMBERS = 4096  # of a float tensor that is written out; a longer one is random


def make_bug_script(report: AuditReport, model: Model, batch: Mapping[str, object]) -> str:
    """Write the first finding that names an input and an output as a script of at most 30 lines.

    >>> import torch, clearhead as ch
    >>> from transformers import LlamaConfig, LlamaModel
    >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> model = LlamaModel(LlamaConfig(vocab_size=100, **sizes)).eval()
    >>> batch = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]])}
    >>> report = ch.audit(model, batch, ch.Causal() & ch.Documents.from_lengths([2, 3]))
    >>> print(ch.models.make_bug_script(report, model, batch).splitlines()[-1])
    print((after - before)[0, 2].abs().max())  # expected: 0

    The script makes the model from its configuration, with random weights, changes one input, and prints how far an
    output moves that must not. It needs no clearhead.

    Args:
        report: Of `audit(model, batch, ...)`.
        model: A model of transformers; in the place of any other, the script has a line to be filled in.
        batch: The batch of the audit.

    Raises:
        ClearheadError: If no finding names an input and an output of the whole model.
    """
    found = next((one for one in report.findings if one.source and one.test in ("influence", "gradient")), None)
    if found is None or found.source is None or found.output is None:
        raise ClearheadError("make_bug_script: no finding of the report names an input that moves an output.")
    core = unwrap_model(model)
    name = next((name for name in find_inputs(batch) if f"of {name}" in found.text), find_inputs(batch)[0])
    audited = AuditedModel(model, batch, name, None, 0, lambda passes: None)
    place = torch.zeros(audited.shape, dtype=torch.bool, device="cpu")
    place[found.source] = True
    other = int(audited.replace_ids(place)[found.source]) if audited.has_ids else 1.0
    source, output = (", ".join(map(str, position)) for position in (found.source, found.output))
    lines = [
        f"# {found.text}",
        f"# Seen with {', '.join(_list_versions(core))}.",
        "import torch",
        "from math import inf, nan",
        *_make_model(core),
        "batch = {",
        *(f'    "{key}": {_describe_input(value)},' for key, value in batch.items()),
        "}",
        "with torch.no_grad():",
        "    before = model(**batch)[0]",
        f'    batch["{name}"][{source}] = {other}',
        "    after = model(**batch)[0]",
        f"print((after - before)[{output}].abs().max())  # expected: 0",
    ]
    return "\n".join(lines)


def _list_versions(model: Any) -> Iterator[str]:
    for name in ("torch", type(model).__module__.partition(".")[0]):
        if hasattr(sys.modules[name], "__version__"):
            yield f"{name} {sys.modules[name].__version__}"


def _make_model(model: Any) -> list[str]:
    """The lines that make a model of transformers, or leave place for another one."""
    kind, config = type(model).__name__, getattr(model, "config", None)
    if config is None or not type(model).__module__.startswith("transformers."):
        return [f"model = ...  # a {kind}, in eval mode"]
    left_out = ("transformers_version", "architectures", "dtype", "model_type")
    settings = {key: value for key, value in config.to_diff_dict().items() if key not in left_out and key[0] != "_"}
    given = {**settings, "attn_implementation": backend_of(config)}
    return [
        f"from transformers import {type(config).__name__}, {kind}",
        "torch.manual_seed(0)",
        f"model = {kind}({type(config).__name__}(**{given})).eval()",
    ]


def _describe_input(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    if value.numel() > MOST_NUMBERS and value.is_floating_point():
        return f"torch.randn{tuple(value.shape)}"
    return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
