"""Audits of small random models of transformers' architectures, on plain, padded and packed batches."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from transformers.models.auto import modeling_auto
from zoo.registry import config_class
from zoo.trial import small_model

import clearhead as ch
from clearhead.models.audits.audit import audit

# Which inputs an output may depend on, where transformers' own mapping of tasks says another thing; with the source.
KINDS = {
    "xlnet": ("full", "Yang et al. 2019: permutations are masked by perm_mask alone, which no batch here has"),
    "clip_text_model": ("causal", "Radford et al. 2021: the text encoder is a causal transformer"),
    "blip_text_model": ("full", "Li et al. 2022: the text encoder is BERT's"),
}
MAPPINGS = (
    ("seq2seq", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"),
    ("full", "MODEL_FOR_MASKED_LM_MAPPING"),
    ("causal", "MODEL_FOR_CAUSAL_LM_MAPPING"),
)


def find_kind(name: str) -> tuple[str, str] | None:
    """ "causal", "full" or "seq2seq", and the source; None for an architecture without a known mask."""
    if name in KINDS:
        return KINDS[name]
    config = config_class(name)
    for kind, mapping in MAPPINGS:
        if config in getattr(modeling_auto, mapping):
            return kind, f"transformers' {mapping}"
    return None


def expect_in_encoder_decoder(call: Any) -> Any:
    return None if call.kind == "cross" or call.layer.stack == "encoder" else ch.Causal()


def make_cases(model: Any, batch: dict[str, Any], kind: str) -> dict[str, tuple[dict[str, Any], Any]]:
    """The batches to audit, each with its expected mask."""
    known = inspect.signature(model.forward).parameters
    if "use_cache" in known:
        batch = {**batch, "use_cache": False}
    rows, length = batch["input_ids"].shape
    mask = {"causal": ch.Causal(), "full": None, "seq2seq": expect_in_encoder_decoder}[kind]
    cases = {"plain": (batch, mask)}
    if "attention_mask" in known:
        tokens = torch.ones(rows, length, dtype=torch.long)
        tokens[-1, -4:] = 0
        cases["right padding"] = {**batch, "attention_mask": tokens}, mask
        cases["left padding"] = {**batch, "attention_mask": tokens.flip(1).contiguous()}, mask
    if kind == "causal" and "position_ids" in known:
        positions = torch.cat([torch.arange(5), torch.arange(length - 5)]).expand(rows, -1).contiguous()
        unmasked = {name: value for name, value in batch.items() if name != "attention_mask"}
        documents = ch.Documents.from_lengths([5, length - 5])
        cases["packed"] = {**unmasked, "position_ids": positions}, ch.Causal() & documents
    return cases


def audit_architecture(name: str) -> dict[str, Any]:
    """The findings for each batch, and which tests could not examine the model."""
    warnings.simplefilter("ignore")
    kind, source = find_kind(name) or ("full", "unknown")
    torch.manual_seed(0)
    model, runs = small_model(name)
    batch = dict(runs[0])
    if "input_ids" not in batch or batch["input_ids"].ndim != 2:
        return {"name": name, "error": "it reads no ids"}
    row: dict[str, Any] = {"name": name, "kind": kind, "source": source, "cases": {}}
    for case, (given, mask) in make_cases(model, batch, kind).items():
        try:
            report = audit(model, given, mask, level="all" if case == "plain" else "layers")
        except ch.ClearheadError as error:
            row["cases"][case] = {"findings": [], "not examined": [], "error": str(error)[:200]}
            continue
        row["cases"][case] = {
            "findings": [(f.test, f.code, f.text) for f in report.findings],
            "not examined": [test.name for test in report.tests if test.holds is None],
        }
    return row
