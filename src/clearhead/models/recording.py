"""The recording of a watched model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor

from clearhead.base.arrays import Array
from clearhead.base.errors import require
from clearhead.base.output.words import TokensLike
from clearhead.explanation.diagnosis.diagnose import diagnosis_of
from clearhead.explanation.diagnosis.diagnosis import Diagnosis
from clearhead.inspection.measures import Found, Measure
from clearhead.inspection.reductions.base import Reduction
from clearhead.inspection.reductions.by_query import Entropy, MeanDistance, SinkShare, TopK
from clearhead.models.comparison.differences import Differences, compare_calls
from clearhead.models.interception.choice import Layers, Pairs, Positions
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.models.recordings.call_explanation import case_of
from clearhead.models.recordings.calls import labels
from clearhead.models.recordings.distinctive import Distinctive, distinctive, measured
from clearhead.models.recordings.generation import Generation, found_rows, joined_call, warn_of_beams
from clearhead.models.recordings.reduced import reduced
from clearhead.models.recordings.rollout import rollout
from clearhead.models.recordings.tokens import Tokens
from clearhead.models.table import Table
from clearhead.models.views.paged import roles
from clearhead.models.views.recorded_calls import RecordedCalls


class Recording(RecordedCalls):
    """The attention calls of a watched model, from which their weights are computed.

    `calls`: a list, in order; iterating gives the calls too. `seen[3]`: call number 3, which need not be of layer 3,
    because a layer makes a call in each run. `seen["L3"]`, `seen["decoder 1, cross"]`: the calls of a layer, by its
    name in tables and pages. `seen["encoder.layer.3.attention.self"]`: the calls of one module, in order;
    `seen["*.layer.3.*"]`: the calls of all layers that fit a pattern, as for `view`. `names`: of the modules. `runs`:
    the calls of each run of the model. `missing`: the layers with calls that could not be recorded, and why: what names
    such a layer, or is of all layers, raises an `UnsupportedError` with this reason. The calls of one module are a
    `Generation`: its steps, which `seen[name].joined()` makes one matrix.
    """

    @overload
    def __getitem__(self, which: int) -> AttentionCall: ...

    @overload
    def __getitem__(self, which: str | slice) -> Generation: ...

    def __getitem__(self, which: Any) -> Any:
        found = super().__getitem__(which)
        return Generation(found) if isinstance(found, list) else found

    def table(
        self, *reductions: Reduction[object], tokens: TokensLike | None = None, source_tokens: TokensLike | None = None
    ) -> Table:
        """A row for each call and head: measures of the head, beside those of uniform attention under the same mask.

        >>> import torch, clearhead as ch
        >>> block, x = ch.nn.DotProductAttention(), torch.zeros(1, 2, 5, 8)
        >>> with ch.watch(block) as seen:
        ...     output = block(x, x, x, mask=ch.Causal())
        >>> row = seen.table(tokens="the pump and the pump".split())[1]
        >>> row["head"], round(row["same word"], 3), round(row["same word uniform"], 3)
        (1, 0.225, 0.225)

        The first columns: layer, its number in the model, or its name, such as "decoder 0, cross", where the model has
        several stacks; run; in generations step, 0 for the prompt; module, kind, backend, queries, keys, head.
        Without `reductions`: the means over queries of the entropy in nats, the largest weight, for self attention the
        mean distance, and with sinks their share; then each measure, and beside it "… uniform" and "… queries", the
        number of queries that it is a mean over: previous, next, itself, first, same word, induction, normalised
        entropy (a part of the largest possible), sink, distance, weighted value norm, weighted transformed norm. A
        measure is left out if it needs tokens, positions, values or the layer that writes the heads, and they are not
        known (`watch(values=True)`). `about(column)` of the result describes a measure. Where there are sinks, measures
        except the norms are of the keys' weights divided by their sum. Inside an `edit` every column is of the weights
        that ran, `call.weights`: where an edit multiplied rows after the softmax (`call.factor`), shares of weight and
        norms are of the product, and may leave the range of a share; entropies and distances are of weights divided by
        their sum, which a factor does not change; and "… uniform" has no factor. Padding, and queries whose mask, or a
        factor of 0, leaves them no key, are left out; NaN where no query counts.
        `reductions`: a column for each of these, the mean over queries, in place of all others. `tokens`: a word for
        each position, a list of such lists for several sequences, or the ids (B, L) that the model was given; in an
        encoder-decoder the decoder's, and `source_tokens` the encoder's. Gives a `Table`, a list of dicts, which has
        `top(column)` and `to_pandas()`.
        Raises a `ClearheadError` for tokens that fit no call, and for the words of one sequence where a call has
        several: all sequences count here, where `view` shows one.
        Cost: two passes over each call's pairs. With tokens, a further pass over the pairs of equal tokens, or over all
        pairs where the mask is not a few intervals a query or a bias is added. O(Lq + Lk) memory a head.
        """
        known = Tokens(tokens, source_tokens)
        known.check(self.calls)
        rows, steps = Table(), [label.step for label in labels(self.calls)]
        for call, step in zip(self.calls, steps, strict=True):
            own = reduced(call, reductions or _usual(call)).table()
            if any(one is not None for one in steps):
                own = Table({"layer": row["layer"], "run": row["run"], "step": step or 0, **row} for row in own)
            rows += own if reductions else _beside(own, measured(call, known))
        return rows

    def distinctive(self, tokens: TokensLike | None = None, source_tokens: TokensLike | None = None) -> Distinctive:
        """The head that departs most from uniform attention under its mask, and by which measure.

        >>> import torch, torch.nn.functional as F, clearhead as ch
        >>> class Back(torch.nn.Module):
        ...     def forward(self, x):
        ...         return F.scaled_dot_product_attention(x, x.roll(-1, 2), x, is_causal=True, scale=6.0)
        >>> block = Back()
        >>> with ch.watch(block) as seen:
        ...     output = block(torch.eye(20).expand(1, 2, 20, 20))
        >>> print(seen.distinctive())
        L0H0 attends to the previous token: 98%, uniform would be 14% (a mean over 19 queries of Back).

        Heads are compared by shares of weight: on the previous token, the next, itself, the first, the sink, and, with
        `tokens`, as for `table`, the same word and induction; each less the share of uniform attention. The shares are
        means over the queries that may see such a key, at least 8, or half of all, and never fewer than 5. Where no
        share is 5% above uniform, the head with the least entropy is named; and where no entropy is below 98% of the
        largest possible, the sentence says that all heads are near uniform. `L1H8` is head 8 of layer 1; in a
        generation it is `L1H8, step 2`, and where a model has several stacks "decoder 1, cross, head 8". Gives a
        `Distinctive`, whose `str()` is the sentence. Raises a `ClearheadError` where fewer than 5 queries see several
        keys, and for the words of one sequence where a call has several. Cost: the passes of `table` for its measures.
        """
        self.check_complete("distinctive")
        return distinctive(self.calls, Tokens(tokens, source_tokens))

    def compare(self, other: Recording, matched: Pairs | None = None) -> Differences:
        """Compare the weights of two recordings, such as those of two checkpoints or of two texts.

        >>> import torch, clearhead as ch
        >>> block, x, y = ch.nn.DotProductAttention(), torch.zeros(1, 2, 3, 4), torch.eye(4)[:3].expand(1, 2, 3, 4) * 2
        >>> with ch.watch(block) as before:
        ...     output = block(x, x, x, mask=ch.Causal())
        >>> with ch.watch(block) as after:
        ...     output = block(y, y, y, mask=ch.Causal())
        >>> differences = before.compare(after)
        >>> differences[0].divergence
        tensor([0.0661, 0.0661], dtype=torch.float64)
        >>> differences[0].weights[0, 1, 2]                 # the other's less this one's
        tensor([-0.2268, -0.2268,  0.4537])

        Calls are compared by their numbers: both recordings are of one run of one architecture. `matched`: where the
        texts differ in length, the positions that correspond, ([of this text], [of the other]), ascending, as
        `clearhead.models.match_tokens` finds them; None: all.
        Formula: JS(p, q) = ½ Σ_j (p_j log p_j/m_j + q_j log q_j/m_j), m = (p + q) / 2, of each query, in nats; of a
        head the mean over the queries that see a key and are no padding in both recordings. The weight that a row lacks
        to 1, of a sink, of keys that are not matched, or that an edit took away, counts as one more key: nothing is
        renormalised. Masks may differ where an edit changed a call; then a query counts that sees a key in either.
        Gives `Differences`, which has `table()`. Raises a `ClearheadError` where calls, heads, shapes or masks do not
        fit. Cost: a pass over both calls' pairs, a block at a time; O(Lq + Lk) memory a head.
        Source: Lin 1991, "Divergence Measures Based on the Shannon Entropy".
        """
        for one in (self, other):
            one.check_complete("compare")
        return compare_calls(self.calls, other.calls, matched)

    def rollout(
        self, tokens: Positions = None, layers: Layers = None, *, residual: float = 0.5, gradients: bool = False
    ) -> Tensor:
        """The share of each position's input in each token after the last layer, (B, T, L); rows sum to 1.

        >>> import torch, torch.nn.functional as F, clearhead as ch
        >>> class Twice(torch.nn.Module):
        ...     def forward(self, x):
        ...         for _ in range(2):
        ...             x = x + F.scaled_dot_product_attention(x, x, x, is_causal=True)
        ...         return x
        >>> model = Twice()
        >>> with ch.watch(model) as seen:
        ...     output = model(torch.rand(1, 4, 10, 8))
        >>> seen.rollout(tokens=[9]).shape
        torch.Size([1, 1, 10])

        `tokens`: T positions whose sources are wanted, a number, a slice or a list of these; None is all of them.
        `layers`: which layers, as for `view`; None is all. Their calls must be the self-attention of one run, all of
        one length. `residual`: the share r of the residual stream, 0 to 1. `gradients`: whether weights count by their
        gradients, after `watch(model, gradients=True)` and a backward pass of what is to be explained; then the rows
        have the scale of the gradients, and no sum.
        Formula: R = Ã_N … Ã_1, Ã = r I + (1 − r) Ā, Ā the mean over the heads; a row of Ā that sums to s, as with
        sinks, is divided by r + (1 − r) s. With gradients Ã = I + mean_h (A ∘ ∂L/∂A)⁺, for the loss L.
        Raises a `ClearheadError` for a result above 256 MiB, for calls of several lengths, or of several runs, and
        where a gradient is missing; an `UnsupportedError` for attention in windows, such as Swin's, whose next layer
        cuts other windows.
        Cost: for up to 64 tokens, about a backward pass of attention for each layer, by products with lazy matrices:
        the result is the only L × L array. With gradients each layer's pairs once, a block of rows at a time.
        Source: Abnar and Zuidema 2020, "Quantifying Attention Flow in Transformers"; with gradients Chefer, Gur and
        Wolf 2021, "Generic Attention-model Explainability for Interpreting Bi-Modal and Encoder-Decoder Transformers".
        """
        if layers is None:
            self.check_complete("rollout")
        return rollout(self.calls, tokens, layers, residual, gradients)

    def joined(self, sequences: Array | None = None) -> Recording:
        """The steps of a generation as one recording: one call for each module, as a forward over the final text.

        >>> import torch, torch.nn.functional as F, clearhead as ch
        >>> class Block(torch.nn.Module):
        ...     def forward(self, x, past):
        ...         keys = torch.cat([past, x], 2)
        ...         return F.scaled_dot_product_attention(x, keys, keys, is_causal=x.shape[2] > 1), keys
        >>> block, past = Block(), torch.rand(1, 4, 0, 8)
        >>> with ch.watch(block) as seen:
        ...     for length in (5, 1, 1):
        ...         output, past = block(torch.rand(1, 4, length, 8), past)
        >>> seen.joined()[0].shape
        (1, 4, 7, 7)

        Its tables, pages and explanations are those of the whole text. The page tells prompt and answer apart, and says
        in which step a token was read. `call.begins`: the first query of each step. Values are joined where they were
        kept; outputs, gradients and the layers around a call are not. The last token of an answer was never read, so it
        has no query: it is left out of `tokens`, with a warning. A file that `write` makes of it has no steps.
        Of several generations that took turns, it is the one of the last run.
        `sequences`: the ids that `generate` returned, (N, L): sequence i of the batch is then sequences[i], as for
        `Generation.joined`; where beams need them, a warning says so. An encoder's sequences are those of its decoder.
        Raises a `ClearheadError` as `Generation.joined`. Cost: a copy of the queries and of the keys, once.
        """
        self.check_complete("joined")
        # where several generations ran at once, the last call of every module is of the last run
        each = [sorted(self[name], key=lambda call: call.run) for name in self.names]
        kinds = roles([(calls[0].name, calls[0].kind) for calls in each])
        steps = [calls for kind, calls in zip(kinds, each, strict=True) if kind != "encoder"]
        if sequences is None:
            joined = Recording([joined_call(calls) for calls in each])
            warn_of_beams(steps[0][-1].cached_key, [calls[-1].cached_key for calls in steps])
            return joined
        # calls without tokens are those of an image, and no steps
        steps = [calls for calls in steps if calls[-1].ids is not None] or steps[:1]
        found = {calls[0].name: found_rows(calls, sequences) for calls in steps}
        (*_, last), rows, _ = found[steps[0][0].name]

        def beside(calls: list[AttentionCall]) -> tuple[Sequence[AttentionCall], Tensor | None]:
            times, rest = divmod(last.shape[0], calls[-1].shape[0])  # as many beams for each sequence
            return calls, None if rest else rows // times

        return Recording([joined_call(*(found.get(calls[0].name) or beside(calls))) for calls in each])

    def diagnose(self) -> Diagnosis:
        """Faults and risks of the calls: see `clearhead.diagnose`. Findings name the layer and the module, and the run,
        or the step of a generation, where there are several.

        >>> import torch, torch.nn.functional as F, clearhead as ch
        >>> class Block(torch.nn.Module):
        ...     def forward(self, x):
        ...         return F.scaled_dot_product_attention(x, x, x, scale=1.0)           # 1/√64 was forgotten
        >>> block = Block()
        >>> with ch.watch(block) as seen:
        ...     output = block(torch.randn(1, 2, 50, 64, generator=torch.Generator().manual_seed(0)))
        >>> print(seen.diagnose().warnings[0].evidence)
        The scores of a query have a standard deviation of ...; divided by √64 it would be ...

        Values, outputs, and errors against float64 are checked with `watch(values=True)` alone. Cost: a pass over each
        call's pairs.
        """
        self.check_complete("diagnose")
        named = zip(self.calls, self._labels, strict=True)
        return diagnosis_of(case_of(call, str(label)) for call, label in named)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            hint = ". A recording is saved by .write(path)" if name == "save" else ""
            raise AttributeError(f"'Recording' object has no attribute {name!r}{hint}")


def load_recording(path: str | Path) -> Recording:
    """A recording that `Recording.write` has written.

    >>> import tempfile, torch, clearhead as ch
    >>> block, x = ch.nn.DotProductAttention(), torch.rand(1, 4, 10, 8)
    >>> with ch.watch(block) as seen:
    ...     output = block(x, x, x, mask=ch.Causal())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     again = ch.models.load_recording(seen.write(folder + "/seen.safetensors"))
    >>> again.calls
    [AttentionCall('DotProductAttention', self, query (1, 4, 10, 8), key (1, 4, 10, 8), Causal(), clearhead ...)]
    >>> torch.equal(again[0].weights.entropy(), seen[0].weights.entropy())
    True

    Gives a `Recording`, its tensors on the CPU; a mask is shown as it was, and holds its intervals or its matrix.
    Raises a `ClearheadError` for a file that is no recording, that was changed, or whose header has an entry that
    `write` does not write, before it asks for memory. Cost: the file is read whole, and may then be written to or
    removed.
    """
    require("msgspec", "models", "loading a recording")
    from clearhead.models.recordings.recording_file import read_recording

    return Recording(read_recording(path))


def _usual(call: AttentionCall) -> tuple[Reduction[Any], ...]:
    """The reductions whose means a table begins with."""
    sizes = call.problem.sizes
    placed = sizes.align is not None or sizes.queries == sizes.keys
    far = (MeanDistance(),) if call.kind == "self" and placed else ()
    return (Entropy(), TopK(1), *far, *(() if call.problem.sinks is None else (SinkShare(),)))


def _beside(rows: Table, found: Mapping[Measure, Found]) -> Table:
    """A call's rows, one for each head, with its measures, each beside the measure of uniform attention."""
    columns = {}
    for measure, values in found.items():
        columns[measure.name] = values.value.tolist()
        columns[f"{measure.name} uniform"] = values.uniform.tolist()
        columns[f"{measure.name} queries"] = values.queries.long().tolist()
    return Table(row | more for row, more in zip(rows, Table.of({}, columns), strict=True))
