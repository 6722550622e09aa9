"""Entropy that falls towards 0, or becomes NaN, while a model trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from clearhead.explanation.diagnosis.diagnosis import Finding

NAME, LOST = "entropy collapse", "no numbers"
LEAST = 3  # monitored steps
FALLEN = 0.1  # of the largest entropy before
LOW = 0.2  # nats: 1.2 effective keys
BEGAN = 0.4  # nats: a head that never had more has nothing to lose


def collapsed(rows: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """Heads whose entropy fell from 0.4 nats or more to less than 0.2 nats and less than a tenth of its peak.

    0.2 nats are 1.2 effective keys. A head that specialises loses entropy too, but rarely nine tenths of it. Where
    entropy collapses, the largest logit grows and training diverges (Zhai et al. 2023), so the finding names the
    logits. Heads whose last entropies are NaN have a finding of their own; their steps before are judged as all others.
    `rows`: those of `Monitor.table()`.
    """
    by_head: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    layers: dict[str, str] = {}  # by module
    for row in rows:
        layers[row["module"]] = f"L{row['layer']}" if isinstance(row["layer"], int) else row["layer"]
        by_head.setdefault((row["module"], row["head"]), []).append(row)
    fallen: dict[str, list[tuple[int, Mapping[str, Any], Mapping[str, Any]]]] = {}
    lost: dict[str, list[tuple[int, int]]] = {}
    for (module, head), every in by_head.items():
        steps = [row for row in every if row["entropy"] == row["entropy"]]
        since = [row["step"] for row in every if not steps or row["step"] > steps[-1]["step"]]
        if since:
            lost.setdefault(module, []).append((head, since[0]))
        if len(steps) >= LEAST:
            peak, last = max(steps, key=lambda row: row["entropy"]), steps[-1]
            if peak["entropy"] >= BEGAN and last["entropy"] < min(FALLEN * peak["entropy"], LOW):
                fallen.setdefault(module, []).append((head, peak, last))
    for module, heads in fallen.items():
        head, peak, last = min(heads, key=lambda one: one[2]["entropy"])
        yield Finding(
            NAME,
            "warning",
            f"The entropy of {len(heads)} heads fell; that of head {head} from {peak['entropy']:.3g} nats at step "
            f"{peak['step']} to {last['entropy']:.3g} at step {last['step']}, while its largest logit went from "
            f"{peak['max_logit']:.3g} to {last['max_logit']:.3g}.",
            "Normalise queries and keys before their product, cap the scores (softcap), lower the learning rate or "
            "warm it up longer.",
            {"layer": layers[module], "module": module, "heads": [head for head, _, _ in heads]},
        )
    for module, since in lost.items():
        step = min(step for _, step in since)
        yield Finding(
            LOST,
            "warning",
            f"The entropies of {len(since)} head{'s' * (len(since) > 1)} are no numbers from step {step} on: "
            "queries or keys hold NaN or infinite numbers.",
            "Look at the loss, the learning rate and the gradients of the step before; torch.autograd.detect_anomaly() "
            "names the operation that made them.",
            {"layer": layers[module], "module": module, "heads": [head for head, _ in since]},
        )
