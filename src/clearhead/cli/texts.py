"""The text that is given to a command, and the model that reads it."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError, require
from clearhead.base.output.text import printable, short
from clearhead.base.output.written import check_writable
from clearhead.models.loading import bundled, check_length, load, most_tokens, quiet, reason
from clearhead.models.recording import Recording
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.models.views.paged import Paged
from clearhead.models.watch import watch


def check_outputs(options: argparse.Namespace, outputs: Mapping[str, str | None], text: str | None = None) -> None:
    """Raise an error for an output that cannot be written, or that is another file which the command reads or writes.

    `outputs`: the outputs by the names of their options, None where one is not given. `text`: the file of the text.
    """
    others = _files_read(options, text)
    for name, path in ((name, check_writable(given)) for name, given in outputs.items() if given is not None):
        if path in others:
            raise ClearheadError(f"{name} is {str(path)!r:.300}, the file of {others[path]}: pass another path.")
        if not path.exists() or path.is_file():  # several outputs may go to one pipe
            others[path] = name


def _files_read(options: argparse.Namespace, text: str | None) -> dict[Path, str]:
    """The files that the command reads, each with the option that names it."""
    try:
        files = {"--file": [] if text in (None, "-") else [Path(str(text))]}
        files["--model"] = [] if options.model is None else list(Path(options.model).glob("*"))
        return {path.resolve(): name for name, paths in files.items() for path in paths if path.is_file()}
    except (OSError, ValueError, RuntimeError):  # a file that cannot be read is an error when it is read
        return {}


class Read(NamedTuple):
    """The calls of a model that has read a text, with the words of the text.

    `words`: the words of the decoder, or of the only text. `source`: the words of the encoder, none where the model has
    one text. `encoder`: the beginning of the names of the encoder's modules. `said`: a note on the origin of words that
    were not in the text; "" where there are none. `answer`: the text that the model generated. `begins`: the place of
    its first token, where it continues the text. `spelled`: the spelling of tokens that the tokenizer does not know.
    """

    recording: Recording
    words: list[str]
    source: list[str]
    encoder: str
    said: str
    answer: str | None
    begins: int | None
    spelled: dict[int, str]

    def of(self, call: AttentionCall) -> tuple[list[str], list[str] | None]:
        """The words of a call's queries, and those of its keys where they are another text."""
        if self.source and call.name.startswith(self.encoder):
            return self.source, None
        return self.words, self.source if call.kind == "cross" else None

    def paged(self) -> Paged:
        """The calls as layers of a page."""
        return Paged(self.recording.calls, self.words, self.source or None, answer=self.begins)


def model_of(options: argparse.Namespace, head: bool | None = None) -> tuple[Any, Any, Path]:
    """The model, its tokenizer, and the folder that they are from. `head`: as for `load`."""
    folder = bundled() if options.model is None else Path(options.model)
    return *load(folder, head), folder


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise a `ClearheadError` that says why a text cannot be read. `what`: such as "the file 'a.txt'"."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ClearheadError(f"{what} is not UTF-8: {error}.") from error
    except ClearheadError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ClearheadError(f"cannot read {what}: {getattr(error, 'strerror', None) or error}.") from error


def text_of(options: argparse.Namespace) -> str:
    """The text of the argument, of a file, or of standard input."""
    if options.file is None and options.text is None:
        raise ClearheadError("no text: pass it as TEXT, in a file with --file F, or - for standard input.")
    if options.file is None and options.text != "-":
        return checked(options.text)
    name = "of standard input" if options.file in (None, "-") else repr(options.file)
    with reading(f"the text {name}"):
        if options.file not in (None, "-"):
            return checked(Path(options.file).read_text(encoding="utf-8-sig"))
        if sys.stdin is None:
            raise OSError("it is closed")
        return checked(sys.stdin.buffer.read().decode("utf-8-sig"))


def layer_of(option: str) -> int | str:
    """The layer that an option names: a number, or a name."""
    return int(option) if re.fullmatch("-?[0-9]{1,9}", option, re.ASCII) else option


def checked(text: str, name: str = "the text") -> str:
    """The text, after a check that it can be given to a model."""
    if any("\ud800" <= c <= "\udfff" for c in text):  # bytes of the command line that are no character
        raise ClearheadError(f"{name} is not UTF-8: pass it in a file, and convert that (iconv -t UTF-8).")
    if not text.strip():
        raise ClearheadError(f"{name} is empty.")
    return text


def watched(
    model: Any, tokenizer: Any, text: str, generate: int | None = None, target: str | None = None, **watching: Any
) -> Read:
    """The calls of the model that reads the text. `watching`: arguments of `watch`.

    `generate`: the model continues the text for at most so many tokens. `target`: the text for the decoder of an
    encoder-decoder; without a target, it reads the text that the model generates.
    """
    try:
        with quiet():
            return _read(model, tokenizer, text, generate, target, watching)
    except ClearheadError:
        raise
    except Exception as error:  # any error of a tokenizer and a model that do not match
        raise ClearheadError(
            f"{type(model).__name__} cannot read the text: {reason(error)}\nThe folder needs a model of texts, and the "
            "tokenizer that it was trained with."
        ) from error


def _read(
    model: Any, tokenizer: Any, text: str, generate: int | None, target: str | None, watching: dict[str, Any]
) -> Read:
    inputs = dict(tokenizer(text, return_tensors="pt", verbose=False))
    ids, body = inputs["input_ids"], model.base_model
    source: list[str] = []
    encoder, said, answer, begins = "", "", None, None
    if target is not None and not model.config.is_encoder_decoder:
        raise ClearheadError(
            f"--target is the text for the decoder of an encoder-decoder, and {type(model).__name__} has one text "
            "alone: leave it out."
        )
    if model.config.is_encoder_decoder:
        check_length(body, ids.shape[1], "the text", "encoder")
        source = _words(tokenizer, ids)
        encoder = next(name for name, module in body.named_modules() if module is model.get_encoder()) + "."
        ids, answer = decoder_words(model, tokenizer, inputs, target, generate)
        inputs = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
        inputs |= {"decoder_input_ids": ids}
        said = "the decoder reads " + ("the given target" if answer is None else "what the model generated")
    else:
        check_length(body, ids.shape[1], "the text", more=generate or 0)
        if generate is not None:
            check_causal(model)
            begins = ids.shape[1]
            ids = generated(model, inputs, generate)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            answer = tokenizer.decode(ids[0, begins:], skip_special_tokens=True)
            said = f"the last {ids.shape[1] - begins} of {ids.shape[1]} tokens are what the model generated"
    with torch.inference_mode(), watch(body, **watching) as recording:
        body(**inputs)
    spelled = _spelled(tokenizer, text)
    return Read(recording, _words(tokenizer, ids), source, encoder, said, answer, begins, spelled)


def _spelled(tokenizer: Any, text: str) -> dict[int, str]:
    """The spelling of tokens that the tokenizer does not know, by their places, where it can be found."""
    if not getattr(tokenizer, "is_fast", False) or tokenizer.unk_token_id is None:
        return {}
    read = tokenizer(text, return_offsets_mapping=True, verbose=False)
    pairs = zip(read["input_ids"], read["offset_mapping"], strict=True)
    return {
        place: text[first:last]
        for place, (number, (first, last)) in enumerate(pairs)
        if number == tokenizer.unk_token_id and last > first
    }


def _words(tokenizer: Any, ids: torch.Tensor) -> list[str]:
    numbers = ids[0].tolist()
    words = tokenizer.convert_ids_to_tokens(numbers)
    return [str(n) if word is None else word for n, word in zip(numbers, words, strict=True)]


def quoted(text: str) -> str:
    """A text on one line, with line breaks escaped, cut where it is long."""
    return short(repr(printable(text))[1:-1], 300)


USUAL = 50  # the most tokens that a decoder generates without --generate


def generated(model: Any, inputs: dict[str, Tensor], most: int) -> Tensor:
    """The ids (1, L) of a greedy generation, with the other settings of the folder's generation_config.json."""
    given = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
    with torch.inference_mode():
        ids: Tensor = model.generate(**given, max_new_tokens=most, do_sample=False, num_beams=1, num_return_sequences=1)
    return ids


def fills_in_words(config: Any) -> bool:
    """Whether a model of this configuration fills in masked words, as BERT does."""
    transformers = require("transformers", "models", "this command")
    return type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)


def is_causal(config: Any) -> bool:
    """Whether a model of this configuration generates text, so that its tokens see earlier tokens alone."""
    transformers = require("transformers", "models", "this command")
    return type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not fills_in_words(config)


def check_causal(model: Any) -> None:
    """Raise an error for a model whose tokens see later tokens, such as BERT: it cannot generate sensible text."""
    if fills_in_words(model.config):
        raise ClearheadError(
            f"--generate needs a model that generates text; {type(model.base_model).__name__} fills in masked words. "
            "Leave --generate out."
        )


def decoder_words(
    model: Any, tokenizer: Any, inputs: dict[str, Tensor], target: str | None, most: int | None
) -> tuple[Tensor, str | None]:
    """The ids (1, L) that an encoder-decoder's decoder reads, its start token first; and the answer, if it generated.

    The token that ends the text is left out, since no decoder reads it.
    """
    body, answer = model.base_model, None

    def setting(name: str) -> Any:
        """A setting of the model's generation, or where it has none, of the model's configuration."""
        found = getattr(model.generation_config, name, None) if model.can_generate() else None
        return getattr(model.config, name, None) if found is None else found

    if target is not None:
        start = setting("decoder_start_token_id")
        start = setting("bos_token_id") if start is None else start
        words = tokenizer(text_target=target, return_tensors="pt", verbose=False)["input_ids"]
        ids = torch.cat([torch.tensor([[start]], device="cpu"), words.long()], 1)
    else:
        room = most_tokens(body, "decoder")
        limit = USUAL if room is None else min(USUAL, room - 1)
        if most is not None:
            check_length(body, 1, "the decoder's start", "decoder", most)
        ids = generated(model, inputs, limit if most is None else most)
        answer = tokenizer.decode(ids[0, 1:], skip_special_tokens=True)
    ends = setting("eos_token_id")
    ends = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id]
    if ids.shape[1] > 1 and int(ids[0, -1]) in ends:
        ids = ids[:, :-1]
    check_length(body, ids.shape[1], "the target", "decoder")
    return ids, answer
