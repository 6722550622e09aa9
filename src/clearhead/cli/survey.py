"""The command `clearhead survey`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from clearhead.base.errors import ClearheadError
from clearhead.base.output.text import printable
from clearhead.base.output.written import ending_of
from clearhead.cli.texts import check_outputs, model_of, reading
from clearhead.models.loading import quiet
from clearhead.models.surveys.run import rank_of
from clearhead.models.surveys.survey import survey


def run(options: argparse.Namespace) -> None:
    """`clearhead survey` with these options."""
    rank = rank_of(None, options.state)
    first = rank[0] == 0
    if first:
        check_outputs(options, {"-o": options.output, "--page": options.page}, options.file)
        ending_of(options.output, [".csv"], "table")
        if options.page is not None:
            ending_of(options.page, [".html"], "page")
    model, tokenizer, _ = model_of(options)
    keep = None if options.keep is None else [name.strip() for name in options.keep.split(",")]
    with quiet():
        found = survey(
            model,
            texts_of(options.file, options.field),
            tokenizer,
            keep=keep,
            state=options.state,
            batch=options.batch,
            max_length=options.max_length,
            rank=rank,
            wait=options.wait,
        )
    if not first:
        return
    cut = f", {found.truncated:,} texts cut to {found.max_length:,} tokens" if found.truncated else ""
    print(f"{found.texts:,} texts, {found.tokens:,} tokens{cut}; digest {found.digest}")
    print(f"The table: {printable(str(found.write(options.output).resolve()))}")
    if options.page is not None:
        print(f"The page: {printable(str(found.write(options.page).resolve()))}")


def texts_of(file: str, field: str) -> Iterator[str]:
    """The texts of a file: one text, or one JSON object, on each line. Empty lines are skipped."""
    objects = file.endswith((".jsonl", ".ndjson"))
    with reading(f"the texts' file {file!r}"), Path(file).open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _text(line, field, f"line {number} of {file!r}") if objects else line.strip()


def _text(line: str, field: str, where: str) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ClearheadError(f"{where} cannot be read as JSON: {error}. A .jsonl file has an object a line.") from error
    text = found.get(field) if isinstance(found, dict) else None
    if not isinstance(text, str) or not text.strip():
        has = f"has {', '.join(map(repr, found))}" if isinstance(found, dict) else f"is a {type(found).__name__}"
        raise ClearheadError(
            f"{where} {has:.200}; expected an object whose {field!r} is a text that is not empty. Pass --field with "
            "the name that the text has."
        )
    return text
