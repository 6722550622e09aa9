"""Audits of small random models of transformers' architectures, on plain, padded and packed batches."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.models.auto import modeling_auto
from zoo.registry import config_class
from zoo.small import parts
from zoo.trial import NotBuiltError, small_model

import clearhead as ch
from clearhead.masks.base import Mask, all_keys
from clearhead.models.audits.audit import audit
from clearhead.models.audits.audit_report import AuditReport, Position
from clearhead.problem._recorded import RecordedMask

SEEDS = 0, 1  # a finding of the first is repeated with the others
WORDS = "input_ids", "decoder_input_ids"
FEATURES = "input_features", "input_values", "pixel_values", "hidden_states"
DOCUMENT = 5  # positions of the first of two packed documents
KEPT = 2  # findings of each test that are kept


class Group(NamedTuple):
    """Architectures whose mask has one source.

    `kind`: "causal", "full" or "seq2seq"; "causal beside other keys", where some keys are no positions; "given" where
    no mask is known.
    """

    kind: str
    source: str
    names: tuple[str, ...] = ()


# Which inputs an output may depend on, where transformers' mappings of tasks say another thing or nothing.
GROUPS = (
    Group("full", "XLNet (Yang et al. 2019): `perm_mask` alone hides keys, and no batch here has one", ("xlnet",)),
    Group("full", "the configuration's `is_decoder`, which is False", ("bert-generation",)),
    Group("full", "the model's forward: every word is context, and context is always attended to", ("cpmant",)),
    Group(
        "causal beside other keys",
        "the configuration's `layer_types`: causal, and beside it compressed keys of groups of earlier positions",
        ("deepseek_v4",),
    ),
    Group("causal", "the model's forward: causal, where `token_type_ids` name no prefix", ("paligemma",)),
    Group("given", "none: self attention and cross attention are one softmax", ("t5gemma2",)),
    Group("given", "none: a causal encoder, and a canvas whose positions attend to each other", ("diffusion_gemma",)),
    Group(
        "causal",
        "CLIP (Radford et al. 2021): the text encoder is a causal transformer",
        (
            "clip", "clip_text_model", "clipseg", "clipseg_text_model", "metaclip_2", "metaclip_2_text_model", "owlvit",
            "owlvit_text_model", "owlv2", "owlv2_text_model", "xclip", "xclip_text_model", "groupvit",
            "groupvit_text_model", "aimv2", "aimv2_text_model",
        ),
    ),
    Group(
        "full",
        "BERT (Devlin et al. 2019), whose encoder this model has for words",
        (
            "blip_text_model", "align", "align_text_model", "altclip", "altclip_text_model", "chinese_clip",
            "chinese_clip_text_model", "clap", "clap_text_model", "bridgetower_text_model", "dpr", "flava_text_model",
            "visual_bert", "vilt", "blip", "bridgetower",
        ),
    ),
    Group(
        "full",
        "SigLIP (Zhai et al. 2023): the text encoder has no causal mask",
        ("siglip", "siglip_text_model", "siglip2", "siglip2_text_model"),
    ),
    Group("full", "the model's documentation: an encoder", ("embedding_gemma2", "embedding_gemma2_text")),
    Group("full", "Splinter (Ram et al. 2021): BERT's encoder", ("splinter",)),
    Group("full", "TIPS (Maninis et al. 2025): a bidirectional text encoder", ("tipsv2", "tipsv2_text_model")),
    Group("causal", "CLVP's documentation: the decoder is GPT-2's", ("clvp_decoder",)),
    Group(
        "causal",
        "MusicGen (Copet et al. 2023): an autoregressive decoder",
        ("musicgen_decoder", "musicgen_melody_decoder"),
    ),
    Group("causal", "Kosmos-2 (Peng et al. 2023): a causal decoder", ("kosmos_2_text_model", "kosmos_2_5_text_model")),
    Group("causal", "Evolla's documentation: Llama with adapters", ("evolla", "EvollaModel")),
    Group("causal", "Image GPT (Chen et al. 2020): autoregressive", ("imagegpt",)),
    Group("causal", "Canary (Puvvada et al. 2024): the decoder is autoregressive", ("canary_decoder",)),
    Group("causal", "Step-3.5's documentation: a causal decoder", ("step3p5",)),
)  # fmt: skip
# The source of a mask is the first of transformers' mappings of tasks that has an architecture.
MAPPINGS = (
    ("seq2seq", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"),
    ("full", "MODEL_FOR_MASKED_LM_MAPPING"),
    ("causal", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    ("causal", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"),
    ("causal", "MODEL_FOR_MULTIMODAL_LM_MAPPING"),
    ("seq2seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING"),
    ("full", "MODEL_FOR_QUESTION_ANSWERING_MAPPING"),
    ("full", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING"),
)
UNKNOWN = Group("given", "none: the masks that its attention is given")


def find_group(name: str) -> Group:
    """The kind of mask of an architecture, and its source."""
    for group in GROUPS:
        if name in group.names:
            return group._replace(names=())
    for one in dict.fromkeys((name, name.removesuffix("_text"), name.removesuffix("_text_model"))):
        try:
            config = config_class(one)
        except KeyError:
            continue
        for kind, mapping in MAPPINGS:
            if config in getattr(modeling_auto, mapping):
                if kind == "causal" and is_encoder_decoder(config):
                    return Group("seq2seq", f"transformers' `{mapping}`, and `is_encoder_decoder`")
                beside = "" if one == name else ", of the whole model, whose language model this is"
                return Group(kind, f"transformers' `{mapping}`{beside}")
    return UNKNOWN


def is_encoder_decoder(config: Any) -> bool:
    try:
        return bool(getattr(config(), "is_encoder_decoder", False))
    except Exception:  # a configuration may need arguments
        return False


def make_mask(kind: str, batch: dict[str, Any], recorded: bool, documents: Mask | None = None) -> Any:
    """The expected mask of a batch: of the attention among words; other attention is not judged.

    `recorded`: whether attention calls of the model are recorded, which a mask by call needs.
    """
    words = None if kind in ("full", "given") else ch.Causal()
    if words is not None and documents is not None:
        words = words & documents
    length = find_length(batch)
    if kind in ("causal", "full") and not (recorded and any(name in batch for name in FEATURES)):
        return words

    def expect(call: Any) -> Any:
        in_encoder = any(part.endswith("encoder") for part in call.layer.stack.split("."))
        if kind == "seq2seq" and (in_encoder or (call.kind == "cross" and "decoder_input_ids" in batch)):
            return None
        is_of_words = call.kind == "self" and call.shape[-2:] == (length, length)
        return words if kind != "given" and is_of_words else get_given_mask(call)

    return expect


def get_given_mask(call: Any) -> Mask:
    """The mask that an attention call was given."""
    problem = call.problem
    return RecordedMask(all_keys(problem.sizes) if problem.spans is None else problem.spans, problem.sizes)


@torch.no_grad()
def is_recorded(model: Any, batch: dict[str, Any]) -> bool:
    """Whether clearhead records attention among the words of a batch, or any attention where it has none."""
    length = find_length(batch)
    try:
        with ch.watch(model) as seen:
            model(**batch)
    except ch.ClearheadError:
        return False
    return length is None or any(call.shape[-2:] == (length, length) for call in seen.calls)


def find_length(batch: dict[str, Any]) -> int | None:
    """The number of words in each sequence of a batch; None where it has no words."""
    return next((batch[name].shape[1] for name in WORDS if name in batch), None)


def make_cases(model: Any, batch: dict[str, Any], kind: str) -> dict[str, tuple[dict[str, Any], Any]]:
    """The batches to audit, each with its expected mask."""
    known = inspect.signature(model.forward).parameters
    if "use_cache" in known:
        batch = {**batch, "use_cache": False}
    else:  # with a cache, transformers does not look for documents in position_ids
        for part in parts(model.config):
            if getattr(part, "use_cache", False):
                part.use_cache = False
    mask = make_mask(kind, batch, recorded := is_recorded(model, batch))
    cases = {"plain": (batch, mask)}
    ids = batch.get("input_ids")
    if ids is None or ids.ndim != 2:
        return cases
    rows, length = ids.shape
    if "attention_mask" in known:
        tokens = torch.ones(rows, length, dtype=torch.long)
        tokens[-1, -4:] = 0
        cases["right padding"] = {**batch, "attention_mask": tokens}, mask
        cases["left padding"] = {**batch, "attention_mask": tokens.flip(1).contiguous()}, mask
    if kind.startswith("causal") and "position_ids" in known:
        positions = torch.cat([torch.arange(DOCUMENT), torch.arange(length - DOCUMENT)]).expand(rows, -1).contiguous()
        unmasked = {name: value for name, value in batch.items() if name != "attention_mask"}
        documents = ch.Documents.from_lengths([DOCUMENT, length - DOCUMENT])
        cases["packed"] = {**unmasked, "position_ids": positions}, make_mask(kind, batch, recorded, documents)
    return cases


def audit_architecture(name: str) -> dict[str, Any]:
    """What each test says of each batch, as plain values."""
    warnings.simplefilter("ignore")
    kind, source, _ = find_group(name)
    row: dict[str, Any] = {"name": name, "kind": kind, "source": source, "cases": {}}
    torch.manual_seed(0)
    try:
        model, runs = small_model(name)
    except NotBuiltError as error:
        return {**row, "error": f"not built: {error}"}
    for case, (given, mask) in make_cases(model, dict(runs[0]), kind).items():
        row["cases"][case] = found = audit_repeatedly(model, given, mask, case)
        if case == "packed" and found.get("findings"):  # such as those with positions of three axes
            stacked = {**given, "position_ids": given["position_ids"].expand(4, -1, -1)}
            other = audit_repeatedly(model, stacked, mask, case)
            if not other.get("findings", True):
                row["cases"][case] = {**other, "note": "by position_ids of shape (4, B, L), ignored as (B, L)"}
    return row


def audit_repeatedly(model: Any, batch: dict[str, Any], mask: Any, case: str) -> dict[str, Any]:
    """The result of an audit, with the findings that another seed gives too, and those that it does not give."""

    def run(seed: int) -> AuditReport:
        copied = {name: value.clone() if isinstance(value, Tensor) else value for name, value in batch.items()}
        return audit(model, copied, mask, level="all" if case == "plain" else "layers", seed=seed)

    try:
        report = run(SEEDS[0])
        repeated = [run(seed) for seed in SEEDS[1:]] if report.findings else []
    except Exception as error:  # a model may raise anything
        first = next(iter(str(error).splitlines()), "")
        return {"error": first if isinstance(error, ch.ClearheadError) else f"{type(error).__name__}: {first}"}
    codes = [{(finding.test, finding.code) for finding in other.findings} for other in repeated]
    found: dict[str, list[Any]] = {"findings": [], "once": []}
    for finding in report.findings:
        same = all((finding.test, finding.code) in others for others in codes)
        kept = found["findings" if same else "once"]
        if sum(other[0] == finding.test for other in kept) < KEPT:
            kept.append([finding.test, finding.code, finding.module, finding.text.splitlines()[0]])
    tests: dict[str, list[Any]] = {}
    for test in report.tests:  # an encoder-decoder has one of a name for each of its inputs
        holds, text = tests.get(test.name, [None, ""])
        both = holds if test.holds is None else test.holds if holds is None else holds and test.holds
        tests[test.name] = [
            both,
            f"{text}; {'not examined: ' * (test.holds is None)}{test.text[:300]}".removeprefix("; "),
        ]
    leak = next((f for f in report.findings if f.test == "influence" and f.output and f.source), None)
    if leak is not None and not any(f.test in ("given", "layer") for f in report.findings):
        found["place"] = find_first_module(model, batch, leak.output, leak.source)
    return {"tests": tests, **found}


@torch.no_grad()
def find_first_module(model: Any, batch: dict[str, Any], output: Position, source: Position) -> str:
    """The first module, in the order of the computation, whose output at a position depends on another position."""
    ids = batch["input_ids"]
    other = ids.clone()
    other[source] = next(number for number in ids.unique().tolist() if number != ids[source])
    names, runs = {module: name for name, module in model.named_modules()}, []
    for given in (ids, other):
        found: list[tuple[str, Tensor]] = []

        def keep(module: Any, _: Any, result: Any, found: list[tuple[str, Tensor]] = found) -> None:
            first = result[0] if isinstance(result, tuple) else result
            if isinstance(first, Tensor) and first.ndim == 3 and first.shape[:2] == ids.shape and names[module]:
                found.append((names[module], first[output].clone()))

        handles = [module.register_forward_hook(keep) for module in names]
        torch.manual_seed(0)
        model(**{**batch, "input_ids": given})
        for handle in handles:
            handle.remove()
        runs.append(found)
    pairs = zip(*runs, strict=True)
    return next((name for (name, one), (_, two) in pairs if not torch.equal(one, two)), "")
