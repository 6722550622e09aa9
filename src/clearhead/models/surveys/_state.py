"""The state of a survey: a folder with one file a batch, its sums in float64."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from clearhead.base.errors import ClearheadError, require
from clearhead.models.means import Means
from clearhead.models.surveys._batches import Batch

HEADER = "clearhead survey"
_NAME = re.compile(r"batch-(\d{9})\.safetensors")


class Done(NamedTuple):
    """A batch that was read: its sums by their names in `Means`, and by module in the order of the calls."""

    texts: int
    tokens: int
    truncated: int
    modules: list[str]
    sums: dict[str, Tensor]


def done(batch: Batch, means: Means) -> Done:
    return Done(len(batch.ids), int(batch.words.sum()), batch.truncated, list(means), means.state_dict())


class State:
    """The files of a folder. `settings`: what all of them must agree in."""

    def __init__(self, folder: Any, settings: Mapping[str, str]) -> None:
        self._settings = dict(settings)
        try:
            self.folder = Path(folder)
            self.folder.mkdir(parents=True, exist_ok=True)
        except (OSError, TypeError, ValueError) as error:  # TypeError: no path at all; ValueError: a NUL in it
            why = getattr(error, "strerror", None) or error
            raise ClearheadError(
                f"survey: state is {str(folder)!r:.200}, which is no folder and cannot be made one ({why}). Pass "
                "a folder that only this survey uses."
            ) from error
        for path in sorted(self.folder.glob("batch-*.safetensors"))[:1]:
            self._read(path, None)  # another survey's is found before anything is computed

    def load(self, number: int, digest: str) -> Done | None:
        """What is known of a batch; None where there is no file, or one that cannot be read."""
        return self._read(self._path(number), digest)

    def has(self, number: int) -> bool:
        return self._path(number).exists()

    def keep(self, number: int, digest: str, found: Done) -> None:
        """Write a batch's file: all of it, or, however this ends, none."""
        about: dict[str, Any] = {"settings": self._settings, "tokens read": digest, "modules": found.modules}
        about |= {"texts": found.texts, "tokens": found.tokens, "truncated": found.truncated}
        save = require("safetensors.torch", "models", "the state of a survey").save
        path = self._path(number)
        beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
        try:
            with beside.open("wb") as file:
                file.write(save(found.sums, {HEADER: json.dumps(about)}))
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise ClearheadError(
                f"survey: cannot write {str(path)!r}: {error.strerror}. What is there stays: start again with the same "
                "arguments once there is room, and the survey goes on."
            ) from error

    def tidy(self, count: int) -> None:
        """Once all batches are there: raise for files beyond them, and remove what a killed process left unfinished."""
        numbers = [int(found[1]) for path in self.folder.iterdir() if (found := _NAME.fullmatch(path.name))]
        if max(numbers, default=0) >= count:
            raise ClearheadError(
                f"survey: the folder {str(self.folder)!r} has a batch {max(numbers)}, and these texts make {count} "
                "batches, from 0: it is the state of other texts. Pass another folder, or the same texts."
            )
        for path in self.folder.glob(".batch-*.part"):
            path.unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self.folder / f"batch-{number:09}.safetensors"

    def _read(self, path: Path, digest: str | None) -> Done | None:
        safetensors = require("safetensors", "models", "the state of a survey")
        try:
            with safetensors.safe_open(path, "pt") as file:
                about = json.loads((file.metadata() or {})[HEADER])
                sums = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a file is no dict
            found = Done(**{name: about[name] for name in ("texts", "tokens", "truncated", "modules")}, sums=sums)
            settings, read = about["settings"], about["tokens read"]
        except Exception:  # no file, or a damaged one: an OSError, the library's own errors, or what JSON makes of it
            return None
        differ = [name for name in self._settings | settings if self._settings.get(name) != settings.get(name)]
        if differ:
            each = "; ".join(f"{name}: {settings.get(name)} there, {self._settings.get(name)} here" for name in differ)
            raise ClearheadError(
                f"survey: the folder {str(self.folder)!r} has the state of another survey, which differs in {each}. "
                "Pass another folder, or the same arguments: nothing there was changed."
            )
        if digest is not None and read != digest:
            raise ClearheadError(
                f"survey: {str(path)!r} is of other texts, or of texts in another order, or of another tokenizer. Pass "
                "another folder, or the same texts: nothing there was changed."
            )
        return found
