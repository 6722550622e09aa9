"""The sums that a survey takes from each call."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.base.errors import ClearheadError
from clearhead.inspection.measures import MEASURES, Found, Measure, Subject
from clearhead.inspection.reductions.base import Reduction, columns_of
from clearhead.models.interception.padding import same_words
from clearhead.models.origins.ran import Origin
from clearhead.models.recorder.runs import each_call, writers_of
from clearhead.models.recordings.attention_call import AttentionCall, norms_of
from clearhead.models.recordings.reduced import Means, reduced
from clearhead.models.surveys.batches import Batch
from clearhead.models.surveys.examples import BatchExamples, BatchSpread
from clearhead.problem.words import ALL_WORDS

FEW = 8  # tokens of the run that finds the layer which writes each module's heads
Sum = tuple[Tensor, Tensor]  # a sum (H, …) and the number of its terms, (H, 1, …): float64, on the CPU


class Kept(NamedTuple):
    """The measures, the classes of words (None where they were not asked for), and the reductions of a survey."""

    measures: tuple[Measure, ...]
    classes: WordClasses | None
    reductions: tuple[Reduction[Any], ...]
    examples: int = 0  # how many of each head and measure

    def needs(self, part: str) -> bool:
        """Whether a measure reads this part of a call."""
        return any(part in measure.needs for measure in self.measures)

    @property
    def named(self) -> list[str]:
        """The statistics that have a number for each text."""
        classes = [] if self.classes is None else [f"to {name}" for name in CLASSES]
        return [*(measure.name for measure in self.measures), *classes]

    @property
    def columns(self) -> list[str]:
        """The names of the sums, in their order."""
        beside = [column for name in self.named for column in (name, f"{name} uniform")]
        return ["queries", *beside, *columns_of(self.reductions)]


@torch.inference_mode()
def read(model: nn.Module, batch: Batch, kept: Kept) -> tuple[Means, dict[str, Tensor], dict[str, Tensor]]:
    """The sums of a batch, and by module its strongest examples and the moments over its texts."""
    body = getattr(model, "base_model", model)  # without the layer that makes words of its result
    there = (tensor.device for tensor in model.parameters() if not tensor.is_meta)  # others are fetched for a layer
    device = next(there, batch.ids.device)
    ids, words = batch.ids.to(device), batch.words.to(device)

    def run(some: Tensor, there: Tensor) -> None:
        body(input_ids=some, attention_mask=there.long())

    writers = writers_of(model, lambda: run(ids[:1, :FEW], words[:1, :FEW])) if kept.needs("transformed") else {}
    look = Look(kept, ids, words, writers)
    values = kept.needs("value") or kept.needs("transformed")
    with each_call(model, look, words, values):
        run(ids, words)
    return look.means, look.examples.found, look.spread.found


class Look:
    """Adds up the calls of one batch, one after the other."""

    def __init__(self, kept: Kept, ids: Tensor, words: Tensor, writers: Mapping[str, Origin]) -> None:
        self._kept, self._tokens, self._writers = kept, ids.masked_fill(~words, -1), writers
        self._members: Tensor | None = None  # float64 (B, L, classes), on the CPU: 1 where a token is of a class
        if kept.classes is not None:
            own = kept.classes.of(ids).masked_fill(~words, -1)
            self._members = (own.unsqueeze(-1) == torch.arange(len(CLASSES), device=ids.device)).double().cpu()
        self._before: tuple[AttentionCall, Subject] | None = None
        self.means = Means()
        self.examples = BatchExamples(kept.measures, kept.examples, self._tokens)
        self.spread = BatchSpread(len(kept.named))

    def __call__(self, call: AttentionCall) -> None:
        kept, heads = self._kept, call.problem.sizes.heads
        subject = self._subject(call)
        queries = subject.counted.cpu().expand(len(self._tokens), heads, -1).sum((0, 2)).double()
        found: list[Sum] = [(queries, torch.full_like(queries, len(self._tokens)))]
        measured = {place: one.of(subject) for place, one in enumerate(kept.measures) if one.applies(subject)}
        for place in range(len(kept.measures)):
            found += _sums(measured[place], heads) if place in measured else _nothing(heads, 2)
            texts = measured[place].texts() if place in measured else None
            if texts is not None:
                self.spread.add(call.name, place, *texts, heads)
        self.examples.look(call, subject, measured)
        if self._members is not None:
            found += self._received(call.name, subject, queries)
        if kept.reductions:
            found += reduced(call, kept.reductions).sums()
        self.means._include(call.name, kept.columns, tuple(range(heads)), found)

    def _subject(self, call: AttentionCall) -> Subject:
        words = call.padding or ALL_WORDS
        before = self._before
        context = call.context._replace(origin=self._writers.get(call.name))
        norms = norms_of(AttentionCall(call.inputs, call.result, context))
        like = before[1] if before is not None and not norms and _alike(before[0], call) else None
        own = call.kind == "self" and self._tokens.shape == (call.problem.sizes.batch, call.problem.sizes.keys)
        skipped = None if call.uniform is None else call.uniform[..., 0]  # the mask leaves them no key
        tokens = (None, self._tokens) if own else None
        own_text = call.kind == "self"
        subject = Subject(call.record.problem, own_text, words, skipped, tokens, norms, like, call.factor)
        self._before = call, subject
        return subject

    def _received(self, name: str, subject: Subject, queries: Tensor) -> list[Sum]:
        """The weight that the tokens of each class receive from all queries, beside that of uniform attention."""
        assert self._members is not None
        if subject.own.find("received").shape[-1] != self._members.shape[1]:
            return _nothing(len(queries), 2 * len(CLASSES))
        each = torch.einsum("bhk,bkc->cbh", subject.own.find("received").cpu().double(), self._members)
        other = torch.einsum("bhk,bkc->ch", subject.uniform.find("received").cpu().double(), self._members)
        counts, first = subject.counted.cpu().sum(-1).double().expand(len(self._tokens), -1), len(self._kept.measures)
        for place, sums in enumerate(each):
            self.spread.add(name, first + place, sums, counts, len(queries))
        rows = (row for pair in zip(each.sum(1), other, strict=True) for row in pair)
        return [(row.expand_as(queries).clone(), queries) for row in rows]


def _alike(one: AttentionCall, other: AttentionCall) -> bool:
    """Whether the same pairs are counted in both calls."""
    first, second = one.record.problem, other.record.problem
    bare = first.bias is None and second.bias is None and one.uniform is other.uniform
    same = first.visible is second.visible and first.sizes == second.sizes and one.kind == other.kind
    return bare and same and same_words(one.padding, other.padding)


def _sums(found: Found, heads: int) -> list[Sum]:
    """The sums of a measure and of uniform attention, from their means."""
    count = found.queries.expand(heads)
    means = (mean.expand(heads) for mean in (found.value, found.uniform))
    return [(torch.where(count > 0, mean * count, 0.0), count.clone()) for mean in means]


def _nothing(heads: int, columns: int) -> list[Sum]:
    none = torch.zeros(heads, dtype=torch.float64, device="cpu")
    return [(none.clone(), none.clone()) for _ in range(columns)]


NAMED = {measure.name: measure for measure in MEASURES}


CLASSES = ("special", "punctuation", "number", "word", "part")
SPECIAL, PUNCTUATION, NUMBER, WORD, PART = range(5)
_UNMARKED = 5  # letters that begin a word or continue one, which the token before decides
_MARKS = ("##", "Ġ", "▁")  # marks of a part that continues a word; of a beginning, in two kinds of vocabularies
_BYTE = re.compile("<0x[0-9A-F]{2}>")


class WordClasses:
    """The class of each token of a batch, by a tokenizer's vocabulary.

    Special tokens are the tokenizer's own. Punctuation has neither letters nor digits. A number has digits only. Of
    tokens with letters, a part continues a word, and a word begins one. WordPiece marks parts by ##. Other vocabularies
    mark beginnings (▁, Ġ): there a token without a mark is a part if the token before it has letters or digits. In
    vocabularies without marks all such tokens are words.
    """

    def __init__(self, tokenizer: Any) -> None:
        try:
            self._tokenizer, self._special = tokenizer, set(tokenizer.all_special_ids)
            found = Counter(mark for token in tokenizer.get_vocab() for mark in _MARKS if token.startswith(mark))
            tokenizer.convert_tokens_to_string(tokenizer.convert_ids_to_tokens([0]))
        except Exception as error:  # an object that is no tokenizer may raise any error
            kind = type(tokenizer).__name__
            raise ClearheadError(f"survey: 'word classes' reads the vocabulary, and a {kind} has none.") from error
        self._mark = found.most_common(1)[0][0] if found else None
        self._known = cache(self._class)

    def of(self, ids: Tensor) -> Tensor:
        """The class of each token, int64 (B, L), as its place in CLASSES."""
        every, places = torch.unique(ids, return_inverse=True)
        table = torch.tensor([self._known(token) for token in every.tolist()], dtype=torch.int64, device=ids.device)
        found = table[places]
        # a word begins at the start of a text, and after a token without letters and digits
        goes_on = F.pad(found[:, :-1] >= NUMBER, (1, 0), value=False)
        unmarked = found == _UNMARKED
        return torch.where(unmarked, torch.where(goes_on, PART, WORD), found)

    def _class(self, token: int) -> int:
        if token in self._special:
            return SPECIAL
        written = str(self._tokenizer.convert_ids_to_tokens([token])[0])
        marked = self._mark is not None and written.startswith(self._mark)
        if _BYTE.fullmatch(written):
            text = "\ufffd"
        else:
            text = self._tokenizer.convert_tokens_to_string([written])
            text = text.removeprefix("##") if self._mark == "##" and len(text) > 2 else text
        letters = any(c.isalpha() or c == "\ufffd" for c in text)  # "\ufffd" stands for some bytes of a character
        if not letters:
            return NUMBER if any(c.isnumeric() for c in text) else PUNCTUATION
        if self._mark == "##":
            return PART if marked else WORD
        return WORD if marked or self._mark is None else _UNMARKED
