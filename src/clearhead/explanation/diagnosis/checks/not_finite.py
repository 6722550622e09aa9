"""Checks of NaN and infinity: in the inputs, in parameters, and behind a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.engines.tiled import tiles
from clearhead.explanation.diagnosis.case import Case, Check, Findings, used
from clearhead.explanation.diagnosis.diagnosis import Finding
from clearhead.problem.region import EVERY, Region
from clearhead.problem.regions import cut
from clearhead.scores.base import ByTile


class BrokenParameters(Check):
    """NaN and infinity in the parameters of the module that was called, or of the score. The check is exact.

    Such a number reaches queries, keys, values, scores or the output whatever the module is given. −∞ counts in the
    layers that project, the last one too, and in scores; elsewhere it counts where a query, key or value is not finite:
    a sink or a learnt bias of −∞ is right. Of a recorded call the layers around it are looked at, where they were kept
    and were given finite numbers, and the layer that writes its heads.
    """

    name = "parameters that are not finite"

    def find(self, case: Case) -> Findings:
        for name, tensor in case.broken.items():
            counts = {"NaN": int(tensor.isnan().sum()), "infinite numbers": int(tensor.isinf().sum())}
            held = " and ".join(f"{count} {what}" for what, count in counts.items() if count)
            inputs = "are finite" if case.given_finite else "are not finite either"
            yield self.finding(
                "error",
                f"parameter {name} {tuple(tensor.shape)} holds {held}; the call's inputs {inputs}.",
                "Find what wrote it: a checkpoint, or a step of the optimizer after a gradient that was not finite. "
                "torch.nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True) raises before such a step.",
                parameter=name,
            )


class NotFinite(Check):
    """NaN and ±∞ in query, key and value, and NaN and +∞ in a bias, a float mask or sinks. The check is exact.

    It is an error where such a number reaches an output, and a note where the mask hides it from every query:
    clearhead leaves such keys out.
    """

    name = "inputs that are not finite"

    def find(self, case: Case) -> Findings:
        told = case.given_finite and case.broken  # parameters made these numbers, and are named by a check of their own
        for name, tensor in () if told else case.inputs.items():
            bad = ~tensor.isfinite().all(-1)
            if bool(bad.any()):
                yield self._of_vectors(name, tensor, bad, bad & used(case, name, tensor))
        sinks = {} if case.problem.sinks is None else {"sinks": case.problem.sinks}
        for name, tensor in {**case.added, **sinks}.items():
            infinite = tensor == torch.inf
            bad = tensor.isnan() | infinite
            if bool(bad.any()):
                yield self.finding(
                    "error",
                    f"{name} {tuple(tensor.shape)} has {int(tensor.isnan().sum())} NaN and {int(infinite.sum())} "
                    f"numbers of +∞, the first at {bad.nonzero()[0].tolist()}: they make a query's whole row NaN.",
                    "Use −∞ for a pair that is not allowed, and finite numbers elsewhere. 0 · ∞ is NaN: use "
                    "torch.where.",
                    input=name,
                )

    def _of_vectors(self, name: str, tensor: Tensor, bad: Tensor, reached: Tensor) -> Finding:
        """`bad` (B, H, L): vectors that are not finite. `reached`: those among them that reach an output."""
        count = int(reached.sum())
        sequence, head, at = (int(i) for i in (reached if count else bad).nonzero()[0])
        evidence = (
            f"{name} {tuple(tensor.shape)} has {int(tensor.isnan().sum())} NaN and {int(tensor.isinf().sum())} "
            f"infinite numbers, in {int(bad.sum())} vectors"
        )
        place = {"input": name, "sequence": sequence, "head": head, "query" if name == "query" else "key": at}
        if not count:
            remedy = "Fill padding with 0, where other backends are to give the same."
            return self.finding("note", f"{evidence}: the mask hides them all.", remedy, **place)
        evidence += f"; of these {count} {'see a key' if name == 'query' else 'are seen by a query'}."
        remedy = (
            "Find what made these numbers before this call: a division by 0, an overflow, a parameter that is not "
            "finite, or memory never written to."
        )
        return self.finding("error", evidence, remedy, **place)


class SdpaLeak(Check):
    """A key or value is not finite, and the mask hides keys. The check is exact.

    The weight of a masked key is 0, and 0 · NaN is NaN: in PyTorch's kernels it reaches every output of the head.
    clearhead's engines leave out keys that no query sees. A key that only some queries see reaches the outputs of these
    queries alone on `native`, `tiled` and `reference`, and every output on `sdpa`.
    """

    name = "NaN behind the mask"

    def find(self, case: Case) -> Findings:
        if bool((case.extent.allowed == case.shape[3]).all()):
            return
        for name, tensor in case.inputs.items():
            bad = ~tensor.isfinite().all(-1)
            if name != "query" and bool(bad.any()):
                sequence, head, key = (int(i) for i in bad.nonzero()[0])
                yield self.finding(
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


class HiddenPairs(Check):
    """A function after a score (`then`), or of a bias, gives NaN or +∞ at a pair that the mask hides.

    The output is right, because the pair is left out. The gradient of the function there is 0 · NaN, so what it learns
    gets NaN. The `few_queries` of the first sequence are looked at; the numbers are exact.
    """

    name = "a function that is NaN behind the mask"

    def find(self, case: Case) -> Findings:
        problem, scores, spans = case.problem, case.problem.scores, case.problem.spans
        changed = isinstance(scores, ByTile) and scores.score.changed_by is not None
        by_function = problem.bias is not None and problem.bias.function is not None
        finite = all(bool(tensor.isfinite().all()) for tensor in case.inputs.values())
        if spans is None or not finite or not (changed or by_function):
            return
        part = cut(problem, Region(batch=slice(0, 1), queries=case.few_queries))
        assert part.spans is not None
        hidden = ~part.spans.keep(EVERY, EVERY, EVERY, EVERY, case.shape[3])
        given = {"The function after the score": tiles.raw_scores(part)} if changed else {}
        if part.bias is not None and part.bias.function is not None:
            sides = (slice(0, size) for size in part.sizes.shape)
            given["The function of the bias"] = part.bias.function(*sides)
        for what, numbers in given.items():
            bad = hidden & (numbers.isnan() | (numbers == torch.inf))
            if not bool(bad.any()):
                continue
            _, head, query, key = (int(n) for n in bad.nonzero()[0])
            yield self.finding(
                "warning",
                f"{what} gives NaN or +∞ at {int(bad.sum())} of {bad.numel()} pairs that were looked at, where the "
                "mask hides them: the output is right, and gradients of what the function learns are NaN, for 0 · NaN "
                "is NaN.",
                "Give sqrt, log or a division numbers that they can take at hidden pairs too: (i - j).clamp(min=0), or "
                "torch.where on what goes in. A torch.where around the result does not help.",
                **({"head": head} if bad.shape[1] > 1 else {}),
                query=query * case.few_queries.step,
                key=key,
            )
