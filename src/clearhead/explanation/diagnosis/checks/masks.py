"""Checks of masks. Their polarity has a file of its own, `opposite_mask.py`."""

from __future__ import annotations

import torch

from clearhead.explanation.diagnosis.case import Case, Check, Findings, first_place
from clearhead.explanation.diagnosis.diagnosis import Severity
from clearhead.problem.fills import FILL
from clearhead.problem.problem import only_zeros_and_ones

HALF = torch.finfo(torch.float16)


class ZerosAndOnes(Check):
    """A float mask holds only 0 and 1, and some 1. The check is exact.

    `attention` refuses such a mask. Other libraries add it to the scores, where it hides nothing.
    """

    name = "a mask of 0 and 1"

    def find(self, case: Case) -> Findings:
        for name in case.as_mask:
            tensor = case.added[name].cpu()
            if not only_zeros_and_ones(tensor):
                continue
            ones = int((tensor == 1).sum())
            yield self.finding(
                "error",
                f"{name} is {str(tensor.dtype).removeprefix('torch.')}, {tuple(tensor.shape)}, and holds {ones} ones "
                f"and {tensor.numel() - ones} zeros: a float mask is added to the scores, and hides nothing.",
                'Pass mask.bool() where 1 means "may attend", mask == 0 where it means "may not"; one row a sequence, '
                "(B, Lk), as Padding(mask.bool()), or mask.bool()[:, None, None].",
                input=name,
            )


class UnequalLengths(Check):
    """A mask or bias that depends on positions, with Lq ≠ Lk.

    It is an error where no alignment says where query 0 stands. It is a warning where query 0 stands at key 0 and there
    are more keys than queries: no query sees the last keys, and these are the newest of a cache. The check is exact.
    """

    name = "positions of unequal lengths"

    def find(self, case: Case) -> Findings:
        queries, keys = case.shape[2:]
        if case.unaligned:
            yield self.finding(
                "error",
                f"The mask or bias depends on positions, there are {queries} queries and {keys} keys, and no align= "
                "says where query 0 stands. The other findings are for "
                f"{'lower_right' if queries < keys else 'upper_left'}.",
                'Pass align="lower_right" (the last query stands at the last key, as with a cache), "upper_left" '
                "(query 0 stands at key 0), or the position of query 0.",
            )
            return
        align = case.problem.sizes.align
        at_first = isinstance(align, str | int) and align in ("upper_left", 0)
        positional = case.mask is None or (case.mask.positional and case.mask._document_edges is None)
        if at_first and positional and queries < keys and not bool(case.seen[0][..., queries:].any()):
            yield self.finding(
                "warning",
                f"{queries} queries are aligned at the upper left of {keys} keys: no query sees the last "
                f"{keys - queries} keys, and the last query stands at key {queries - 1}.",
                'Where these keys are a cache\'s, pass align="lower_right"; to F.scaled_dot_product_attention, whose '
                "is_causal=True is aligned at the upper left, pass the mask.",
            )


class PaddingAttended(Check):
    """Words may see padding, where the padding is known (`AttentionCall.padding`). The check is exact.

    It is an error where the words of these sequences see no word at all: the mask is of the opposite polarity.
    """

    name = "padding attended"

    def find(self, case: Case) -> Findings:
        words = case.words.keys
        if words is None:
            return
        found = case.keys_seen.any(1)
        padding = found & ~words
        sequences = padding.any(-1)
        if not bool(sequences.any()):
            return
        number = int(sequences.int().argmax())
        key = int(padding[number].int().argmax())
        severity: Severity = "warning"
        evidence = (
            f"In {int(sequences.sum())} of {len(found)} sequences words may see padding: {int(padding.sum())} keys of "
            f"{int((~words).sum())} that are padding."
        )
        remedy = "Pass the tokenizer's attention_mask to the model, or mask=Padding(attention_mask)."
        if not bool((found & words)[sequences].any()):
            severity, evidence = "error", f"{evidence} They see no word."
            remedy = (
                "The mask is of the opposite polarity: True means 'may attend' to SDPA and transformers, 'may not' "
                "to torch.nn's modules. In place of its padding pass Padding(attention_mask), to torch.nn's modules "
                "key_padding_mask=attention_mask == 0."
            )
        yield self.finding(severity, evidence, remedy, sequence=number, key=key)


class SeesNothing(Check):
    """Queries may see no key at all. The check is exact, so there is no threshold.

    It is a note where no query sees the keys of these queries either: they are likely padding, and their output is not
    used. It is an error where no query of the call sees a key, and a warning else.
    """

    name = "queries that see nothing"

    def find(self, case: Case) -> Findings:
        blind = ~case.seen[1] & case.real
        count = int(blind.sum())
        if not count:
            return
        severity: Severity = "warning"
        evidence = f"{count} of {blind.numel()} queries of {case.shape} may see no key: their output is 0."
        remedy = (
            "Let each query see one key at least, such as its own, or leave these queries out. Where this is "
            "padding: other backends give NaN, or the mean of all values, there."
        )
        if count == int(case.real.sum()):
            severity, evidence = "error", f"All {count} queries of {case.shape} may see no key: their output is 0."
            remedy = (
                "Pass a mask that is True where a query may attend; torch.nn's modules mean the opposite by True, for "
                "them pass ~mask."
            )
        elif case.only_padding(blind):
            severity, evidence = "note", f"{evidence} No query sees their keys either, as with padding."
            remedy = (
                "Nothing, if these positions are padding. Other backends give NaN, or the mean of all values, there."
            )
        yield self.finding(severity, evidence, remedy, **first_place(blind))


class FiniteFill(Check):
    """A mask or bias that is added to the scores holds finite numbers of −9000 and less in place of −∞.

    exp(−9000) is 0 in every dtype, so such numbers hide keys. But a query whose keys are all filled attends to all of
    them: the same number added to every score changes no softmax. It is a warning, or a note where no other query sees
    the keys of such queries, as with padding. Numbers below −65504, the least of float16, become −∞ in float16, and a
    row of them gives NaN: a warning for inputs in float16 and bfloat16, else a note.
    """

    name = "a finite fill"

    def find(self, case: Case) -> Findings:
        remedy = "Use −∞, or a bool mask (True: may attend), which says the same in every dtype."
        if case.blind is not None:
            words = case.words.queries
            blind = case.blind.expand(case.shape[:3])
            blind = blind if words is None else blind & words.unsqueeze(1)
            if bool(blind.any()):
                yield self.finding(
                    "note" if case.only_padding(blind) else "warning",
                    f"{int(blind.sum())} of {blind.numel()} queries have every key filled with a finite number: the "
                    "softmax undoes it, and they attend to all keys, masked ones too.",
                    remedy,
                    **first_place(blind),
                )
        for name, tensor in case.added.items():
            fills = tensor[(tensor <= FILL) & tensor.isfinite()]
            count, least = fills.numel(), float(fills.min()) if fills.numel() else 0.0
            if least >= HALF.min:
                continue
            yield self.finding(
                "warning" if case.inputs["query"].dtype in (torch.float16, torch.bfloat16) else "note",
                f"{name} {tuple(tensor.shape)} holds {count} number{'s' * (count > 1)} down to {least:.3g}, as if −∞; "
                f"the least of float16 is {HALF.min:.0f}, so there they overflow to −∞, and a row of them gives NaN.",
                remedy,
                input=name,
            )


class AllTrue(Check):
    """A mask allows every query every key. The check is exact.

    It is a note: a batch without padding has such a mask. One query that stands at the last key is left out.
    """

    name = "a mask that is all true"

    def find(self, case: Case) -> Findings:
        queries, keys = case.shape[2:]
        given = case.problem.visible is not None or bool(case.as_mask)
        adds = any(bool(case.added[name].any()) for name in case.as_mask)
        one = queries == 1 and (case.mask is None or case.mask.positional)
        if not given or adds or one or keys == 1 or not bool((case.rows.visible == keys).all()):
            return
        what = "the mask" if case.mask is None else case.mask.title()
        yield self.finding(
            "note",
            f"Under {what} each of {queries} queries may see all {keys} keys: it does nothing.",
            "Leave the mask out if it never hides a key; else check the lengths, or the window.",
        )
