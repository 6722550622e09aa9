"""The state of a survey: a folder with one file for each batch, which has the sums in float64."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError, require
from clearhead.base.output.written import beside
from clearhead.base.torch_state.versions import compute_checksum
from clearhead.models.recordings.reduced import Means
from clearhead.models.surveys.batches import Batch

HEADER, CHECKSUM = "clearhead survey", "sha256"
EXAMPLES, IDS, SPREAD = "examples ", "tokens of the examples", "spread "
_NAME = re.compile(r"batch-(\d{9})\.safetensors")


class Done(NamedTuple):
    """The results of a batch: its sums by their names in `Means`, and by module in the order of the calls.

    `examples`: the strongest examples by module, see `examples.py`. `ids`: the tokens, int32 (B, L), −1 for padding.
    `spread`: the moments over the texts by module.
    """

    texts: int
    tokens: int
    truncated: int
    modules: list[str]
    sums: dict[str, Tensor]
    examples: dict[str, Tensor]
    ids: Tensor
    spread: dict[str, Tensor]


def done(batch: Batch, means: Means, examples: dict[str, Tensor], spread: dict[str, Tensor]) -> Done:
    sums, ids = means.state_dict(), batch.ids.masked_fill(~batch.words, -1).int()
    return Done(len(batch.ids), int(batch.words.sum()), batch.truncated, list(means), sums, examples, ids, spread)


class State:
    """The files of a folder. `settings`: the settings that all files must have."""

    def __init__(self, folder: Any, settings: Mapping[str, str]) -> None:
        self._settings = dict(settings)
        try:
            self.folder = Path(folder)
            self.folder.mkdir(parents=True, exist_ok=True)
        except (OSError, TypeError, ValueError) as error:  # TypeError: no path; ValueError: a NUL in it
            why = getattr(error, "strerror", None) or error
            raise ClearheadError(
                f"survey: state is {str(folder)!r:.200}, which is no folder and cannot be made one ({why}). Pass "
                "a folder that only this survey uses."
            ) from error
        for name in [name for name in self._names() if _NAME.fullmatch(name)][:1]:
            self._read(self.folder / name, None)  # the folder of another survey is found before anything is computed

    def load(self, number: int, digest: str) -> Done | None:
        """The results of a batch; None where it has no file. Raises an error for a damaged or foreign file."""
        return self._read(self._path(number), digest)

    def has(self, number: int) -> bool:
        return self._path(number).exists()

    def keep(self, number: int, digest: str, found: Done) -> None:
        """Write the file of a batch, completely or not at all. A file that another process has written stays."""
        about: dict[str, Any] = {"settings": self._settings, "tokens read": digest, "modules": found.modules}
        about |= {"texts": found.texts, "tokens": found.tokens, "truncated": found.truncated}
        save = require("safetensors.torch", "models", "the state of a survey").save
        tensors = found.sums | {f"{EXAMPLES}{name}": table for name, table in found.examples.items()}
        tensors |= {IDS: found.ids} if found.examples else {}
        tensors |= {f"{SPREAD}{name}": table for name, table in found.spread.items()}
        header, path = json.dumps(about), self._path(number)
        raw = save(tensors, {HEADER: header, CHECKSUM: compute_checksum(header, tensors)})
        try:
            with beside(path) as part:
                part.write_bytes(raw)
                try:
                    os.link(part, path)
                except FileExistsError:
                    pass
                except OSError:  # a file system without links
                    part.replace(path)
        except OSError as error:
            if not path.exists():  # else a process with the same batches has written it, and tidied up
                raise ClearheadError(
                    f"survey: cannot write {str(path)!r}: {error.strerror}. The other files stay: start again with the "
                    "same arguments once it can be written, and the survey goes on."
                ) from error
        self.load(number, digest)  # this raises an error where the file is of another survey

    def tidy(self, count: int) -> None:
        """Raise an error for files beyond the last batch, and remove unfinished files of killed processes.

        It is called once all batches are there.
        """
        numbers = [int(found[1]) for name in self._names() if (found := _NAME.fullmatch(name))]
        if max(numbers, default=0) >= count:
            raise self._another(f"has a batch {max(numbers)}, and these texts make {count} batches, from 0")
        for name in self._names():
            if name.startswith(".batch-") and name.endswith(".part"):
                with suppress(OSError):  # the folder is read-only, or another process has just removed the file
                    (self.folder / name).unlink()

    def _names(self) -> list[str]:
        """The names of all files of the folder, sorted."""
        try:
            return sorted(os.listdir(self.folder))
        except OSError as error:
            raise ClearheadError(f"survey: cannot read the folder {str(self.folder)!r}: {error.strerror}.") from error

    def _another(self, what: str) -> ClearheadError:
        return ClearheadError(
            f"survey: the folder {str(self.folder)!r} has the state of another survey, which {what}. Pass another "
            "folder, or the same texts and the same arguments: nothing there was changed."
        )

    def _path(self, number: int) -> Path:
        return self.folder / f"batch-{number:09}.safetensors"

    def _read(self, path: Path, digest: str | None) -> Done | None:
        require("safetensors", "models", "the state of a survey")
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ClearheadError(f"survey: cannot read {str(path)!r}: {error.strerror}.") from error
        try:
            found, settings, read = _parts(raw)
        except Exception as error:  # errors of safetensors, of JSON, and of other parts
            raise ClearheadError(
                f"survey: {str(path)!r} is not what a survey of this version wrote there: its checksum is missing or "
                "another. Delete that file, and the same call computes it anew: the other files are kept."
            ) from error
        differ = [name for name in self._settings | settings if self._settings.get(name) != settings.get(name)]
        if differ:
            each = "; ".join(f"{name}: {settings.get(name)} there, {self._settings.get(name)} here" for name in differ)
            raise self._another(f"differs in {each}")
        if digest is not None and read != digest:
            raise self._another("is of other texts, or of texts in another order, or of another tokenizer")
        return found


def _parts(raw: bytes) -> tuple[Done, dict[str, str], str]:
    """The results of a batch, its settings, and the digest of its tokens. Raises an error for other content."""
    stop = 8 + int.from_bytes(raw[:8], "little")
    metadata = json.loads(raw[8:stop])["__metadata__"]
    sums = require("safetensors.torch", "models", "the state of a survey").load(raw)
    if compute_checksum(metadata[HEADER], sums) != metadata[CHECKSUM]:
        raise ValueError("the checksum differs")
    about = json.loads(metadata[HEADER])
    parts = ([name for name in sums if name.startswith(begins)] for begins in (EXAMPLES, SPREAD))
    examples, spread = ({name.partition(" ")[2]: sums.pop(name) for name in names} for names in parts)
    ids = sums.pop(IDS, torch.empty(0, 0, dtype=torch.int32, device="cpu"))
    counts = {name: about[name] for name in ("texts", "tokens", "truncated", "modules")}
    found = Done(**counts, sums=sums, examples=examples, ids=ids, spread=spread)
    return found, dict(about["settings"]), about["tokens read"]
