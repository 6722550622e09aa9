"""The gradient test: is d output / d input exactly zero where an input must not influence an output?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from clearhead.models.audits.audit_report import AuditFinding, AuditTest, describe_error
from clearhead.models.audits.movement import LEAK_CODES, Differentiate
from clearhead.models.audits.probes import Positions, Probe


def audit_gradient(differentiate: Differentiate, positions: Positions, probes: list[Probe]) -> AuditTest:
    """Run forward and backward once for each probe: from its fixed outputs, to the inputs that it changes."""
    for probe in probes:
        if not bool(probe.fixed.any() and probe.changed.any()):
            continue
        try:
            gradient = differentiate(probe.fixed)
        except Exception as error:  # not every model has a backward pass, and in eval mode some assert train mode
            return AuditTest("gradient", None, describe_error(error))
        if gradient is None:
            return AuditTest("gradient", None, "the outputs do not require grad")
        wrong = probe.changed & (gradient != 0)  # NaN is no zero
        if bool(wrong.any()):
            source = divmod(int(gradient.nan_to_num(torch.inf).masked_fill(~wrong, -1).argmax()), wrong.shape[1])
            output = _find_output(differentiate, probe, source)
            relation = positions.relate(output, source)
            text = f"output {output} has a gradient of input {source}, {relation}, which must be exactly zero"
            finding = AuditFinding(LEAK_CODES[relation], "gradient", text, output=output, source=source)
            return AuditTest("gradient", False, "a gradient is not zero that must be", (finding,))
    return AuditTest("gradient", True, "gradients that must be zero are exactly zero")


def compute_gradient(run: Callable[[], tuple[Tensor, Tensor]], outputs: Tensor, seed: int) -> Tensor | None:
    """The largest |d output / d input| of each input, (B, Li), of a random combination of outputs, bool (B, Lo).

    `run()` gives a leaf (B, Li, C) and the outputs (B, Lo, C). None where the outputs do not require grad.
    """
    with torch.enable_grad():
        leaf, result = run()
        if not result.requires_grad:
            return None
        factors = torch.randn(
            result.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu"
        ).to(result)
        chosen = (result * factors)[outputs.to(result.device)].sum()
        (gradient,) = torch.autograd.grad(chosen, leaf, allow_unused=True)
    return (
        torch.zeros(leaf.shape[:2], dtype=torch.float32, device="cpu")
        if gradient is None
        else gradient.abs().amax(-1).cpu()
    )


def _find_output(differentiate: Differentiate, probe: Probe, source: tuple[int, int]) -> tuple[int, int]:
    """One of the fixed outputs that has a gradient of `source`, by halving their set."""
    outputs = probe.fixed.nonzero().tolist()
    while len(outputs) > 1:
        half = outputs[: len(outputs) // 2]
        some = torch.zeros_like(probe.fixed)
        some[tuple(torch.tensor(half, device="cpu").T)] = True
        gradient = differentiate(some)
        outputs = half if gradient is not None and bool(gradient[source] != 0) else outputs[len(half) :]
    return outputs[0][0], outputs[0][1]
