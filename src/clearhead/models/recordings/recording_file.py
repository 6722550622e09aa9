"""A recording in a file: tensors as safetensors, all else as JSON in the header; no part of it can run code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from clearhead.base.errors import ClearheadError, require
from clearhead.base.output.written import replacing
from clearhead.base.torch_state.versions import compute_checksum
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.models.recordings.recording_schema import FORMAT, Version, decode_header, encode_header

HEADER, CHECKSUM = "clearhead recording", "sha256"


def write_recording(calls: Sequence[AttentionCall], path: str | Path) -> Path:
    """Write calls to a file: see `Recording.write`."""
    safetensors = require("safetensors.torch", "models", "saving a recording")
    header, tensors = encode_header(calls)
    metadata = {HEADER: header, CHECKSUM: compute_checksum(header, tensors)}
    with replacing(path, "recording") as beside:
        try:
            if beside.exists():  # a pipe or a device, which save_file would replace by a file
                beside.write_bytes(safetensors.save(tensors, metadata))
            else:
                safetensors.save_file(tensors, beside, metadata)
        except Exception as error:  # an OSError, or an error of safetensors, whose class depends on its version
            raise OSError(str(error)) from error
    return Path(path)


def read_recording(path: str | Path) -> list[AttentionCall]:
    """Read the calls of a file."""
    safetensors = require("safetensors", "models", "loading a recording")
    try:
        with safetensors.safe_open(Path(path), "pt") as file:
            metadata = file.metadata() or {}
            # copies, since the file is mapped: a later write to it would change them, and a truncation end the process
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - a file is no dict
    except Exception as error:  # copied for the same reason
        raise ClearheadError(f"cannot read a recording from {str(path)!r}: {error}.") from error
    header = metadata.get(HEADER)
    if header is None:
        raise ClearheadError(f"{str(path)!r} is no recording: pass a file that seen.write() has written.")
    try:
        written = msgspec.json.decode(header, type=Version).format
        if written == FORMAT:
            if metadata.get(CHECKSUM) != compute_checksum(header, tensors):
                raise ValueError("its checksum is not that of its content")
            return decode_header(header, tensors)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:  # a ClearheadError is a ValueError
        raise ClearheadError(f"the recording in {str(path)!r} is damaged: {error}. Record the model again.") from error
    raise ClearheadError(
        f"the recording in {str(path)!r} has format {written}, and this version reads {FORMAT}: record the model again."
    )
