"""`audit` and `assert_attends`: does a model attend as expected, whatever computes it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from clearhead.base.arrays import Array
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.torch_state.torch_private import uncompiled
from clearhead.models.audits.arguments import (
    AuditOptions,
    Model,
    OutputPicker,
    validate_arguments,
    validate_labels,
    validate_level,
)
from clearhead.models.audits.audit_report import AuditReport, AuditTest, Level
from clearhead.models.audits.audited_model import AuditedModel, repeatable, unwrap_model
from clearhead.models.audits.batches import DECODER_INPUTS, find_inputs, share_batch
from clearhead.models.audits.blocks import Block, record_blocks
from clearhead.models.audits.calls import CallTests
from clearhead.models.audits.expectation import Expectation
from clearhead.models.audits.expected_masks import Expected, describe_mask
from clearhead.models.audits.gradient import audit_gradient, compute_gradient
from clearhead.models.audits.influence import audit_influence
from clearhead.models.audits.layers import audit_layers
from clearhead.models.audits.probes import Positions, choose_probes
from clearhead.models.audits.sameness import audit_sameness
from clearhead.models.interception.padding import checked
from clearhead.models.recording import Recording
from clearhead.models.surveys.run import bar
from clearhead.models.watch import watch_own

PROBES = {"outputs": 2, "layers": 3, "all": 4}  # that change many inputs, by level
FORWARDS = {"outputs": 9, "layers": 18, "all": 30}  # about so many, by level
NO_ENCODER_REACH = "the keys of the cross attention of each layer are not recorded, or no positions of the inputs"
TESTS = ["given", "computed", "influence", "layer", "gradient", "same"]  # as a report lists them


def audit(
    model: Model | Recording,
    batch: object = None,
    mask: Expected = None,
    *,
    padding: Array | None = None,
    level: Level = "layers",
    inputs: str | None = None,
    output: OutputPicker | None = None,
    seed: int = 0,
    expect: Sequence[str] = (),
) -> AuditReport:
    """Test whether a model attends as expected, whatever computes its attention.

    >>> import torch, torch.nn.functional as F, clearhead as ch
    >>> class Block(torch.nn.Module):
    ...     def forward(self, x):                       # (B, L, E), without a mask
    ...         return x + F.scaled_dot_product_attention(x, x, x)
    >>> report = ch.audit(Block(), torch.rand(1, 6, 8), ch.Causal())
    >>> report.ok
    False
    >>> [finding.code for finding in report.findings][:2]
    ['not-causal', 'mask-ignored']

    The report has one line for each independent test:

    - given: was each attention call given the expected mask?
    - computed: is each call's output softmax(scores) · value of its own inputs with the expected mask, row by row? If
      not, which known mistake does it equal?
    - influence: do outputs keep every bit when inputs change that must not reach them? Inputs are changed by ids, then
      by embeddings. Which inputs may reach which outputs follows from the mask, through all layers.
    - layer: the same for each block alone, from its recorded input.
    - gradient: is d output / d input exactly zero where it must be?
    - same: do the same tokens have the same outputs alone, in a batch, and with a cache?

    Args:
        model: A module, or any callable that takes the batch; a compiled model too, whose attention calls and blocks
            are those of the model that was compiled. A `Recording` of a finished run:
            then the second argument is the mask, and the tests are given and computed.
        batch: A dict of keywords, such as a tokenizer returns, a tuple of arguments, or one tensor.
        mask: The expected mask: a `Mask`; a bool tensor, True for "may attend"; None for every key; a function of an
            `AttentionCall` that returns one of these; or a dict of them by layer, as `Recording.view` names layers, or
            by "encoder", "decoder" and "cross". Padding is never expected to be attended to.
        padding: Which positions are tokens, (B, L), 0 for padding; by default the batch's `attention_mask`.
        level: "outputs": given and influence. "layers": also computed and layer. "all": also gradient and same.
        inputs: The name of the input that is changed; by default the ids, else the embeddings or features. Of an
            encoder-decoder, by default its inputs and the decoder's, one after the other.
        output: Picks the tensor (B, L, ...) from what the model returns; by default the first one of that shape.
        seed: Of the changes, and of the random numbers in each forward pass: the same seed, the same report.
        expect: Known findings, each by its label as the report prints it, such as "layers.3: documents-mix". They
            neither fail the audit nor hide others.

    Returns:
        An `AuditReport`: `print(report)`, `report.ok`, `report.findings`, `report.to_dict()`.

    Raises:
        ClearheadError: If the mask fits no call, the batch has no input to change, or no test could examine the model.

    Cost: 9 forward passes for "outputs"; for "layers" about 18, and a pass over each call's scores; for "all" about 30,
    some with a backward pass. A bar on a terminal counts them. Memory: the inputs of all blocks, and the inputs of all
    attention calls where `mask` is a dict. For a Llama of 4 layers the peak is 1.5 times the peak of a forward pass,
    and 7.5 times for "all", whose backward passes hold the activations.

    Over several ranks, with `DistributedDataParallel` or FSDP2, call it on every rank: all run the batch of rank 0, and
    return the same report.
    """
    validate_level(level)
    known = validate_labels(expect)
    if isinstance(model, Recording):
        return replace(_audit_recording(model, batch), known=known)
    validate_arguments(model, batch, inputs, output, seed)
    batch = share_batch(model, batch)
    names = find_inputs(batch) if inputs is None else [inputs]
    with repeatable(model, seed), bar(FORWARDS[level] * len(names), "forward passes") as progress:
        first, *others = [AuditedModel(model, batch, name, output, seed, progress.update) for name in names]
        calls = CallTests(mask)
        blocks, why = _run_recorded(first, padding, level, calls)
        with_positions = next((audited for audited in (first, *others) if not audited.objection), None)
        if with_positions is None:
            tokens, encoder_tokens = _find_tokens_of_blocks(blocks), None
        else:
            tokens, encoder_tokens = _find_tokens(with_positions, padding)
            if not bool(tokens.any()):
                raise ClearheadError("audit: every position is padding; expected a mask (B, L), 0 for padding alone.")
        tests = [AuditTest("given", None, why)] if why else calls.finish()[: 1 if level == "outputs" else 2]
        expectation = Expectation(mask, tokens, encoder_tokens, [] if why else calls.calls)
        coverage: dict[str, float] = {}
        for audited in (first, *others):
            whole, shares = _audit_whole(audited, expectation, level)
            tests += whole
            coverage |= {f"{name} ({audited.name})" if others else name: share for name, share in shares.items()}
        if level != "outputs" and isinstance(model, nn.Module):
            tests.append(audit_layers(blocks, expectation, PROBES["outputs"], seed, first.count))
    if all(test.holds is None for test in tests):
        raise ClearheadError(f"audit: no test could examine the model: {'; '.join(test.text for test in tests)}")
    tests.sort(key=lambda test: TESTS.index(test.name))
    forwards = round(sum(audited.forwards for audited in (first, *others)))
    return AuditReport(expectation.text, level, tests, coverage, forwards, known)


def assert_attends(
    model: Model | Recording, batch: object = None, mask: Expected = None, **options: Unpack[AuditOptions]
) -> None:
    """Raise an AssertionError with the report, unless `audit(model, batch, mask, **options)` has no finding.

    >>> import torch, clearhead as ch
    >>> block, x = ch.nn.MultiHeadAttention(16, 4), torch.rand(1, 6, 16)
    >>> ch.assert_attends(lambda x: block(x, x, x, mask=ch.Causal()), x, ch.Causal())
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    raise_findings(audit(model, batch, mask, **options))


def raise_findings(report: AuditReport) -> None:
    """Raise an AssertionError with a report, where it has findings."""
    __tracebackhide__ = True
    if not report.ok:
        raise AssertionError(f"\n{report}")


def _audit_whole(
    audited: AuditedModel, expectation: Expectation, level: Level
) -> tuple[list[AuditTest], dict[str, float]]:
    """The tests that change the inputs of the whole model, and the share of the forbidden pairs that they examine."""
    if audited.objection:
        return [AuditTest("influence", None, audited.objection)], {}
    if audited.reads_encoder:
        reach = expectation.find_encoder_reach()
        if reach is None:
            return [AuditTest("influence", None, NO_ENCODER_REACH)], {}
        positions = Positions(reach, expectation.tokens, expectation.encoder_tokens)
    else:
        own = expectation.find_reach()
        if own is None:
            return [AuditTest("influence", None, "no attention call has the length of the outputs")], {}
        positions = Positions(own, expectation.tokens)
    probes, coverage = choose_probes(positions, PROBES[level], torch.Generator().manual_seed(audited.seed))
    differentiate = partial(_differentiate, audited)
    try:
        tests = [audit_influence(audited, differentiate, positions, probes, PROBES[level])]
    except ShapeError as error:
        if audited.picks_output:
            raise
        return [AuditTest("influence", None, str(error).removeprefix("audit: ").replace("\n", " "))], {}
    if level == "all" and isinstance(audited.model, nn.Module):
        tests.append(audit_gradient(differentiate, positions, probes))
        if not audited.reads_encoder:  # the outputs have no pieces that belong to pieces of the inputs
            tests.append(audit_sameness(audited, positions))
    return tests, coverage.shares


def _audit_recording(recording: Recording, mask: Any) -> AuditReport:
    """The tests that need no model: given, and computed where the values were recorded."""
    calls = CallTests(mask)
    for call in recording.calls:
        calls.add(call)
    tests = calls.finish()
    if not calls.calls:
        raise ClearheadError("audit: the recording holds no call.")
    return AuditReport(describe_mask(mask), "layers", tests)


def _differentiate(audited: AuditedModel, outputs: Tensor) -> Tensor | None:
    """The gradient of some outputs, bool (B, L), for each input; None for a model without one."""
    if not isinstance(audited.model, nn.Module):
        return None
    return compute_gradient(audited.run_from_leaf, outputs, audited.seed)


def _run_recorded(
    audited: AuditedModel, padding: Array | None, level: Level, calls: CallTests
) -> tuple[list[Block], str]:
    """Run the model once, and judge its attention calls.

    Returns its blocks, and why the calls could not be recorded, "" where they were.
    """
    if not isinstance(audited.model, nn.Module):
        return [], "the model is a function, whose calls are not recorded"
    model, blocks = uncompiled(audited.model), []
    # the models of transformers give their padding to each call, which may have other lengths than the ids
    if padding is None and isinstance(audited.batch, Mapping) and not hasattr(unwrap_model(model), "config"):
        given = audited.batch.get("attention_mask")
        padding = given if isinstance(given, Tensor) and given.shape == audited.shape else None
    try:
        with torch.no_grad(), ExitStack() as stack:
            in_layers = level != "outputs"
            stack.enter_context(watch_own(model, padding, values=in_layers, judge=calls.add))
            if in_layers:
                blocks = stack.enter_context(record_blocks(model, audited.seed))
            audited.run_plain(model)
    except ClearheadError as error:
        return blocks, str(error).splitlines()[0]
    return blocks, ""


def _find_tokens_of_blocks(blocks: list[Block]) -> Tensor:
    """All positions of the first block's hidden states, bool (B, L), where the inputs have no positions."""
    shape = next((block.hidden.shape[:2] for block in blocks if block.can_run), (1, 1))
    return torch.ones(shape, dtype=torch.bool, device="cpu")


def _find_tokens(audited: AuditedModel, padding: Array | None) -> tuple[Tensor, Tensor | None]:
    """Which outputs are tokens, bool (B, L), and which inputs of an encoder, where the outputs are a decoder's.

    By the argument `padding`, or by the attention masks of the batch.
    """
    batch = audited.batch if isinstance(audited.batch, Mapping) else {}
    names = find_inputs(audited.batch, audited.name)
    own_shape = tuple(batch[names[0]].shape[:2]) if batch else audited.shape

    def read(mask: Any, shape: tuple[int, int]) -> Tensor:
        if mask is None or tuple(mask.shape) != shape:
            return torch.ones(shape, dtype=torch.bool, device="cpu")
        return torch.as_tensor(mask).cpu() != 0

    own = batch.get("attention_mask")
    if padding is not None and names[0] not in DECODER_INPUTS:
        own = checked(padding)
        if tuple(own.shape) != own_shape:
            raise ShapeError(f"audit: padding has shape {tuple(own.shape)}; expected (B, L) = {own_shape}.")
    if names[-1] not in DECODER_INPUTS:
        return read(own, audited.output_shape), None
    tokens = read(batch.get("decoder_attention_mask"), audited.output_shape)
    return tokens, read(own, own_shape) if len(names) == 2 else None
