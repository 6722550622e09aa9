"""The gradient test: is d output / d input exactly zero where an input must not influence an output?"""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.models.audits.audit_report import Finding, TestResult
from clearhead.models.audits.audited_model import AuditedModel
from clearhead.models.audits.movement import LEAK_CODES
from clearhead.models.audits.probes import Positions, Probe


def audit_gradient(audited: AuditedModel, positions: Positions, probes: list[Probe]) -> TestResult:
    """Run forward and backward once for each probe: from its fixed outputs, to the inputs that it changes."""
    for probe in probes:
        if not bool(probe.fixed.any() and probe.changed.any()):
            continue
        gradient = compute_gradient(audited, probe.fixed)
        if gradient is None:
            return TestResult("gradient", None, "the outputs do not require grad")
        wrong = probe.changed & (gradient != 0)  # NaN is no zero
        if bool(wrong.any()):
            source = divmod(int(gradient.nan_to_num(torch.inf).masked_fill(~wrong, -1).argmax()), wrong.shape[1])
            output = _find_output(audited, probe, source)
            relation = "several outputs" if output is None else positions.relate(output, source)
            text = f"output {output} has a gradient of input {source}, {relation}, which must be exactly zero"
            finding = Finding(LEAK_CODES.get(relation, "outputs-leak"), "gradient", text, output=output, source=source)
            return TestResult("gradient", False, "a gradient is not zero that must be", (finding,))
    return TestResult("gradient", True, "gradients that must be zero are exactly zero")


def compute_gradient(audited: AuditedModel, outputs: Tensor) -> Tensor | None:
    """The largest |d output / d input| of each input, (B, L), of a random combination of these outputs, bool (B, L)."""
    leaves: list[Tensor] = []

    def make_leaf(vectors: Tensor) -> Tensor:
        leaves.append(vectors.detach().clone().requires_grad_())
        return leaves[0]

    with torch.enable_grad():
        if audited.has_ids:
            with audited.embeddings_replaced(make_leaf):
                result = audited.run()
        else:
            result = audited.run(make_leaf(audited.inputs))
        if not result.requires_grad:
            return None
        generator = torch.Generator().manual_seed(audited.seed)
        factors = torch.randn(result.shape, generator=generator).to(result)
        chosen = (result * factors)[outputs.to(result.device)].sum()
        (gradient,) = torch.autograd.grad(chosen, leaves, allow_unused=True)
    shape = audited.shape
    return torch.zeros(shape) if gradient is None else gradient.reshape(*shape, -1).abs().amax(-1).cpu()


def _find_output(audited: AuditedModel, probe: Probe, source: tuple[int, int]) -> tuple[int, int] | None:
    """One of the fixed outputs that has a gradient of `source`, by halving their set."""
    outputs = probe.fixed.nonzero().tolist()
    while len(outputs) > 1:
        half = outputs[: len(outputs) // 2]
        some = torch.zeros_like(probe.fixed)
        some[tuple(torch.tensor(half).T)] = True
        gradient = compute_gradient(audited, some)
        outputs = half if gradient is not None and bool(gradient[source] != 0) else outputs[len(half) :]
    return (outputs[0][0], outputs[0][1]) if outputs else None
