"""Words that see padding."""

from __future__ import annotations

from collections.abc import Iterator

from clearhead.explanation.diagnosis.base import Check
from clearhead.explanation.diagnosis.case import Case
from clearhead.explanation.diagnosis.finding import Finding
from clearhead.masks.base import Spans
from clearhead.problem.unseen import seen


class PaddingAttended(Check):
    """Padding that is known (`AttentionCall.padding`) and that some word may see; exact.

    An error where such a sequence's words see no word at all: the mask is of the opposite polarity.
    """

    name = "padding attended"
    looks_for = "words that see padding"

    def find(self, case: Case) -> Iterator[Finding]:
        words, spans = case.words, case.problem.spans
        if words.keys is None:
            return
        batch, heads, queries, keys = case.shape
        if spans is None:
            whole = case.real.new_zeros(1, 1, 1).long()
            spans = Spans(whole, whole + keys)
        spans = spans._replace(stop=spans.stop.expand(batch, heads, queries).where(case.real, 0))
        found = seen(spans, case.problem.sizes)[0].expand(batch, heads, keys).any(1)
        padding = found & ~words.keys
        sequences = padding.any(-1)
        if not bool(sequences.any()):
            return
        number = int(sequences.int().argmax())
        key = int(padding[number].int().argmax())
        inverted = not bool((found & words.keys)[sequences].any())
        evidence = (
            f"In {int(sequences.sum())} of {batch} sequences words may see padding: {int(padding.sum())} keys of "
            f"{int((~words.keys).sum())} that are padding."
        )
        remedy = "Pass the tokenizer's attention_mask to the model, or mask=Padding(attention_mask)."
        if inverted:
            evidence += " They see no word."
            remedy = (
                "The mask is of the opposite polarity: True means 'may attend' to SDPA and transformers, 'may not' "
                "to torch.nn's modules. Pass ~mask."
            )
        yield self.finding(case, "error" if inverted else "warning", evidence, remedy, sequence=number, key=key)
