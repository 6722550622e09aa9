"""Parameters of a module that are not finite."""

from __future__ import annotations

from collections.abc import Iterator

from clearhead.explanation.diagnosis.case import Case, Check
from clearhead.explanation.diagnosis.diagnosis import Finding


class BrokenParameters(Check):
    """NaN and infinity in the parameters of the module that was called, or of the score. The check is exact.

    Such a number reaches queries, keys, values, scores or the output whatever the module is given. −∞ counts in the
    layers that project, the last one too, and in scores; elsewhere it counts where a query, key or value is not finite:
    a sink or a learnt bias of −∞ is right. Of a recorded call the layers around it are looked at, where they were kept
    and were given finite numbers, and the layer that writes its heads.
    """

    name = "parameters that are not finite"
    looks_for = "NaN and infinity in the parameters of a module or a score"

    def find(self, case: Case) -> Iterator[Finding]:
        for name, tensor in case.broken.items():
            counts = {"NaN": int(tensor.isnan().sum()), "infinite numbers": int(tensor.isinf().sum())}
            held = " and ".join(f"{count} {what}" for what, count in counts.items() if count)
            inputs = "are finite" if case.given_finite else "are not finite either"
            yield self.finding(
                case,
                "error",
                f"parameter {name} {tuple(tensor.shape)} holds {held}; the call's inputs {inputs}.",
                "Find what wrote it: a checkpoint, or a step of the optimizer after a gradient that was not finite. "
                "torch.nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True) raises before such a step.",
                parameter=name,
            )
