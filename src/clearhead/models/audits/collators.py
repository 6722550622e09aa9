"""Audits of training batches: of a collator that packs examples, and of the first batch of a trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError, require
from clearhead.base.output.text import brief
from clearhead.masks.base import Mask
from clearhead.masks.causal import Causal
from clearhead.masks.documents import Documents
from clearhead.models.audits.arguments import Model
from clearhead.models.audits.audit import audit, raise_findings
from clearhead.models.audits.audit_report import AuditFinding, AuditReport, AuditTest, Level
from clearhead.models.audits.batches import share_batch

IGNORED = -100  # the label of a position that the loss leaves out
Example = Mapping[str, Any]
MaskOfBatch = Callable[[Any], Mask | None]
Callback = Any  # a transformers.TrainerCallback


def audit_collator(
    model: Model,
    collator: Callable[[list[Example]], object],
    examples: Sequence[Example],
    *,
    level: Level = "all",
    seed: int = 0,
) -> AuditReport:
    """Test whether a collator's batch keeps the examples apart in a causal model.

    >>> import clearhead as ch
    >>> from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaModel
    >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> model = LlamaModel(LlamaConfig(vocab_size=100, **sizes)).eval()
    >>> examples = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 10, 11]}]
    >>> ch.models.audit_collator(model, DataCollatorWithFlattening(), examples).ok
    True

    The documents are found by looking for each example's ids in the batch, so an error in the batch's own positions or
    masks cannot hide itself. Beside the tests of `audit`, "labels" tests that no label is predicted from the example
    before, and that no example lost labels.

    Args:
        model: A causal model, as for `audit`.
        collator: Called with a list of the examples; returns the batch, a mapping with `input_ids` (B, L).
        examples: At least two, each with `input_ids`, a list or tensor of ids; no example is a part of another.
        level: As for `audit`; "all" also runs each example alone.
        seed: As for `audit`.

    Returns:
        An `AuditReport`.

    Raises:
        ClearheadError: If an example is not found in the batch exactly once.
    """
    if not callable(collator):
        raise ClearheadError(f"audit_collator: collator is {brief(collator)}; expected a function of the examples.")
    texts = _read_ids(examples)
    made = collator(list(examples))
    named = made if isinstance(made, Mapping) else {}
    batch = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    labels, ids = batch.pop("labels", None), batch.get("input_ids")
    if ids is None or ids.ndim != 2:
        raise ClearheadError(f"audit_collator: the collator returned {brief(made)}; expected input_ids (B, L) in it.")
    documents = find_documents(ids, texts)
    given = {"use_cache": False, **batch}
    report = audit(model, given, Causal() & Documents(documents), padding=documents >= 0, level=level, seed=seed)
    return report if labels is None else replace(report, tests=[*report.tests, audit_labels(labels.cpu(), documents)])


def _read_ids(examples: Any) -> list[Tensor]:
    """The ids of each example, (n,)."""
    try:
        found = [torch.as_tensor(example["input_ids"]).flatten() for example in examples]
    except (TypeError, ValueError, LookupError, RuntimeError) as error:
        raise ClearheadError(
            f"audit_collator: examples is {brief(examples)}; expected mappings with input_ids."
        ) from error
    if not isinstance(examples, Sequence) or len(found) < 2:
        raise ClearheadError(f"audit_collator: examples is {brief(examples)}; expected a list of two or more.")
    return found


def find_documents(ids: Tensor, examples: Sequence[Tensor]) -> Tensor:
    """The number of the example at each position of a batch (B, L); −1 where there is none."""
    documents = torch.full(ids.shape, -1, dtype=torch.int64, device="cpu")
    for number, example in enumerate(examples):
        length = len(example)
        windows = (
            ids.cpu().unfold(1, length, 1)
            if length <= ids.shape[1]
            else torch.zeros(0, 0, length, dtype=torch.float32, device="cpu")
        )
        places = (windows == example.cpu()).all(-1).nonzero().tolist()
        if len(places) != 1:
            raise ClearheadError(
                f"audit_collator: the ids of example {number} are in the batch {len(places)} times; expected once.\n"
                "Give examples of distinct ids, each short enough to stay whole."
            )
        sequence, start = places[0]
        documents[sequence, start : start + length] = number
    return documents


def audit_labels(labels: Tensor, documents: Tensor) -> AuditTest:
    """The label at position i is predicted by the output at i − 1, so the first token of an example has no label."""
    begins = (documents[:, 1:] != documents[:, :-1]) & (documents[:, 1:] >= 0)
    crossing = begins & (labels[:, 1:] != IGNORED)
    findings = []
    if bool(crossing.any()):
        sequence, position = crossing.nonzero()[0].tolist()
        text = f"{int(crossing.sum())} labels are predicted from another example, first ({sequence}, {position + 1})"
        output = (sequence, position)
        findings.append(
            AuditFinding("label-crosses-border", "labels", text, output=output, source=(sequence, position + 1))
        )
    inside = torch.cat([torch.zeros_like(begins[:, :1]), ~begins & (documents[:, 1:] >= 0)], 1)
    lost = inside & (labels == IGNORED)
    note = f"; {int(lost.sum())} positions inside examples have no label" if bool(lost.any()) else ""
    if findings:
        return AuditTest("labels", False, f"labels cross the borders of examples{note}", tuple(findings))
    return AuditTest("labels", True, f"no label crosses the border of an example{note}")


def make_audit_callback(mask_of_batch: MaskOfBatch, level: Level = "outputs") -> Callback:
    """A callback of transformers' Trainer that audits the first batch, and raises an AssertionError with its findings.

    >>> import clearhead as ch
    >>> callback = ch.models.make_audit_callback(lambda batch: ch.Causal())
    >>> type(callback).__name__
    'AuditCallback'

    Pass it as `Trainer(..., callbacks=[callback])`.

    Args:
        mask_of_batch: Returns the expected mask of a batch, as `audit` takes it.
        level: As for `audit`.
    """
    if not callable(mask_of_batch):
        raise ClearheadError(f"mask_of_batch is {brief(mask_of_batch)}; expected a function of a batch.")
    transformers = require("transformers", "models", "an audit in a trainer")

    class AuditCallback(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        """Audits the first batch of a training run."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            model = given["model"]
            batch = share_batch(model, dict(next(iter(given["train_dataloader"]))))  # whose mask each rank expects
            device = next(model.parameters()).device
            inputs = {name: value.to(device) for name, value in batch.items() if isinstance(value, Tensor)}
            inputs.pop("labels", None)
            raise_findings(audit(model, inputs, mask_of_batch(batch), level=level, seed=args.seed))

    return AuditCallback()
