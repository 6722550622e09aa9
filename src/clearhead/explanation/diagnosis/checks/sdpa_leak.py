"""Masked keys that other backends would let through."""

from __future__ import annotations

from collections.abc import Iterator

from clearhead.explanation.diagnosis.case import Case, Check
from clearhead.explanation.diagnosis.diagnosis import Finding


class SdpaLeak(Check):
    """A key or value is not finite, and the mask hides keys. The check is exact.

    The weight of a masked key is 0, and 0 · NaN is NaN: in PyTorch's kernels it reaches every output of the head.
    clearhead's engines leave out keys that no query sees. A key that only some queries see reaches the outputs of these
    queries alone on `native`, `tiled` and `reference`, and every output on `sdpa`.
    """

    name = "NaN behind the mask"
    looks_for = "masked NaN that SDPA would leak"

    def find(self, case: Case) -> Iterator[Finding]:
        if case.problem.spans is None or bool((case.extent.allowed == case.shape[3]).all()):
            return
        for name in ("key", "value"):
            tensor = case.inputs.get(name)
            if tensor is None:
                continue
            bad = ~tensor.isfinite().all(-1)
            if bool(bad.any()):
                sequence, head, key = (int(i) for i in bad.nonzero()[0])
                yield self.finding(
                    case,
                    "warning",
                    f"{name} {tuple(tensor.shape)} has {int(bad.sum())} vectors that are not finite, and the mask "
                    "hides keys: F.scaled_dot_product_attention computes 0 · NaN = NaN there, for every query.",
                    f"Fill it before: {name}.masked_fill(~keep[:, None, :, None], 0.0), or "
                    "torch.nan_to_num, where another backend than clearhead's runs.",
                    input=name,
                    sequence=sequence,
                    head=head,
                    key=key,
                )
