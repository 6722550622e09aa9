"""Words that see padding."""

from __future__ import annotations

from collections.abc import Iterator

from clearhead.explanation.diagnosis.case import Case, Check
from clearhead.explanation.diagnosis.diagnosis import Finding


class PaddingAttended(Check):
    """Words may see padding, where the padding is known (`AttentionCall.padding`). The check is exact.

    It is an error where the words of these sequences see no word at all: the mask is of the opposite polarity.
    """

    name = "padding attended"
    looks_for = "words that see padding"

    def find(self, case: Case) -> Iterator[Finding]:
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
        inverted = not bool((found & words)[sequences].any())
        evidence = (
            f"In {int(sequences.sum())} of {len(found)} sequences words may see padding: {int(padding.sum())} keys of "
            f"{int((~words).sum())} that are padding."
        )
        remedy = "Pass the tokenizer's attention_mask to the model, or mask=Padding(attention_mask)."
        if inverted:
            evidence += " They see no word."
            remedy = (
                "The mask is of the opposite polarity: True means 'may attend' to SDPA and transformers, 'may not' "
                "to torch.nn's modules. In place of its padding pass Padding(attention_mask), to torch.nn's modules "
                "key_padding_mask=attention_mask == 0."
            )
        yield self.finding(case, "error" if inverted else "warning", evidence, remedy, sequence=number, key=key)
