"""The sameness test: do the same tokens have the same outputs alone, in a batch, and with a key/value cache?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.models.audits.audit_report import AuditFinding, AuditTest, describe_error
from clearhead.models.audits.audited_model import DROPOUT, AuditedModel, find_output, repeatable
from clearhead.models.audits.batches import DECODER_INPUTS
from clearhead.models.audits.movement import measure_distance, measure_size
from clearhead.models.audits.probes import Positions
from clearhead.models.model_calls import call_model

TOLERANCE = 1e-3  # of the size of the outputs
# Where that is exceeded: how often as far as noise of one rounding in the input moves the outputs. A random Gemma 3n
# amplifies rounding so that noise moves its outputs by 3e-3 to 1e-2, and a cache by 4e-3; in float64 they are equal.
# Of Jamba and Bamba, whose cache gives other outputs in float64 too, the cache moves them 3,000 times as far as noise.
ROUNDINGS = 8
MOST_PIECES = 4
CACHES = ("cache", "past_key_values", "cache_params")  # the first name is new in transformers 5.24


@torch.no_grad()
def audit_sameness(audited: AuditedModel, positions: Positions) -> AuditTest:
    """Run pieces of the batch alone, and the batch in parts with a cache; compare with the outputs of the whole."""
    batch = audited.batch
    if not isinstance(batch, Mapping) or not audited.has_ids:
        return AuditTest("same", None, "the batch has no ids by name")
    if audited.has_dropout:
        return AuditTest("same", None, DROPOUT)
    whole = audited.outputs
    size = measure_size(whole[positions.tokens.to(whole.device)][None])
    examined, skipped, findings, rounding = [], [], [], None
    for code, words, runs in (
        ("alone-differs", "alone", _run_alone(audited, positions)),
        ("cache-differs", "with a cache by token", _run_cached(audited, positions, by_token=True)),
        ("chunks-differ", "with a cache in chunks", _run_cached(audited, positions, by_token=False)),
    ):
        try:
            for sequence, start, result in runs:
                examined.append(words)
                own = whole[sequence : sequence + 1, start : start + result.shape[1]]
                distance = measure_distance(own, result)[0][0] / size
                if float(distance.max()) > TOLERANCE:
                    if rounding is None:
                        rounding = _measure_rounding(audited) / size
                    if float(distance.max()) <= ROUNDINGS * rounding:
                        continue
                    place = start + int(distance.argmax())
                    text = f"output ({sequence}, {place}) differs {words}, by {float(distance.max()):.2g} of its size"
                    findings.append(AuditFinding(code, "same", text, output=(sequence, place)))
                    break
        except Exception as error:  # not every model takes a piece of its batch, or a cache
            skipped.append(f"not {words}: {describe_error(error)}")
    ways = "; ".join(dict.fromkeys([*examined, *skipped]))
    if findings:
        return AuditTest("same", False, f"the same tokens have other outputs ({ways})", tuple(findings))
    if not examined:
        return AuditTest("same", None, ways or "no part of the batch can be run otherwise")
    return AuditTest("same", True, f"the same tokens have the same outputs ({ways})")


def _name_masks(audited: AuditedModel) -> tuple[str, str]:
    """The names of the attention mask and the positions that belong to the input that is cut."""
    prefix = "decoder_" if audited.name in DECODER_INPUTS else ""
    return f"{prefix}attention_mask", f"{prefix}position_ids"


def _measure_rounding(audited: AuditedModel) -> float:
    """How far outputs (B, L, C) move when the embeddings change by one rounding each; 0 where they can't be changed."""

    def add_noise(vectors: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(audited.seed)
        noise = torch.randn(vectors.shape, generator=generator, dtype=torch.float32, device="cpu").to(vectors)
        return vectors * (1 + torch.finfo(vectors.dtype).eps * noise)

    try:
        with audited.embeddings_replaced(add_noise):
            distance = measure_distance(audited.outputs, audited.run())[0]
            return float(distance[distance.isfinite()].max())
    except ClearheadError:
        return 0.0


Piece = tuple[int, int, Tensor]  # a sequence, the first position, and the outputs (1, n, C) from there on


def _run_alone(audited: AuditedModel, positions: Positions) -> Iterator[Piece]:
    """Some groups of neighbouring positions, such as documents or sequences without padding, each by itself."""
    mask_name, positions_name = _name_masks(audited)
    rows, length = audited.shape
    mask = audited.batch.get(mask_name)
    tensors = [value for value in audited.batch.values() if isinstance(value, Tensor) and value.ndim]
    if any(len(value) != rows for value in tensors):  # such as the patches of all images
        return
    groups = positions.list_groups()
    found = 0
    for group in groups:
        members = (positions.group == group).nonzero()
        sequence, start, stop = int(members[0, 0]), int(members[0, 1]), int(members[-1, 1]) + 1
        if stop - start != len(members) or (len(groups) == 1 and stop - start == length):
            continue
        piece = {}
        for name, value in audited.batch.items():
            own = name.startswith("decoder_") or mask_name == "attention_mask"  # not of the encoder before a decoder
            if isinstance(value, Tensor) and own and value.shape[:2] == (rows, length):
                value = value[:, start:stop]
            piece[name] = value[sequence : sequence + 1] if isinstance(value, Tensor) and value.ndim else value
        piece.pop(positions_name, None)
        of_tokens = piece.pop(mask_name, None)  # which some models need
        if mask is not None and mask.ndim == 4:  # a mask of pairs
            piece[mask_name] = mask[sequence : sequence + 1, :, start:stop, start:stop]
        try:
            result = _run(audited, piece)
        except Exception:
            if of_tokens is None:
                raise
            result = _run(audited, {**piece, mask_name: of_tokens})
        yield sequence, start, result
        found += 1
        if found == MOST_PIECES:
            return


def _run_cached(audited: AuditedModel, positions: Positions, by_token: bool) -> Iterator[Piece]:
    """The first half of the batch, then two tokens, or the rest together, with the cache."""
    batch, length = audited.batch, audited.shape[1]
    cache = next((name for name in CACHES if name in audited.parameters), None)
    first = torch.zeros_like(positions.tokens)
    first[:, -1] = True
    is_causal = not bool(positions.reach.find_outputs(first[None])[0, :, :-1].any())
    if not by_token and cache == "cache_params":  # a state alone is updated by one token
        return
    if cache is None or not is_causal or length < 4 or len(positions.list_groups()) > len(first):
        return
    mask_name, positions_name = _name_masks(audited)
    whole = [name for name in batch if name not in (mask_name, positions_name, audited.name)]
    state, half = None, length // 2
    steps = ((half, half + 1), (half + 1, half + 2)) if by_token else ((half, length),)
    for start, stop in ((0, half), *steps):
        given = {name: batch[name] for name in whole} | {"use_cache": True, audited.name: audited.inputs[:, start:stop]}
        if mask_name in batch:
            given[mask_name] = batch[mask_name][:, :stop]
        if positions_name in batch:
            given[positions_name] = batch[positions_name][:, start:stop]
        if state is not None:
            given[cache] = state
        result = _call(audited, given)
        state = getattr(result, cache, None)
        outputs = find_output(result, (len(first), stop - start))
        for sequence in range(len(first)):
            tokens = positions.tokens[sequence, start:stop]
            if bool(tokens.all()):
                yield sequence, start, outputs[sequence : sequence + 1]
        if state is None:
            return


def _run(audited: AuditedModel, given: dict[str, Any]) -> Tensor:
    ids = given[audited.name]
    return find_output(_call(audited, given), (ids.shape[0], ids.shape[1]))


def _call(audited: AuditedModel, given: dict[str, Any]) -> Any:
    audited.count()
    with repeatable(audited.model, audited.seed):
        return call_model(audited.model, given, copies_tensors=True)
