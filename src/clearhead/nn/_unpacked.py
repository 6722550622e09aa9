"""A module's output that the caller unpacks into two names, as torch's (output, weights).

A tensor whose first size is 2 unpacks without an error: the names would hold its two sequences.
"""

from __future__ import annotations

import dis
import inspect

from torch import Tensor

from clearhead.base.arrays import Array
from clearhead.base.errors import ClearheadError
from clearhead.base.tracing import compiling

# the modules whose frames stand between a forward and its caller, and pass the output on; the last one's under `watch`
_BETWEEN = ("clearhead.nn.", "torch.nn.modules.", "clearhead.models.tap.modules")
_UNPACK, _CACHE = (dis.opmap.get(name, -1) for name in ("UNPACK_SEQUENCE", "CACHE"))


def refuse_unpacking(who: str, output: Array) -> None:
    """Raise where the instruction that follows the caller's call unpacks this output into two.

    The instruction is read from the caller's bytecode, at the cost of a microsecond, and for a first size of 2 alone.
    Compiled code is not looked at.
    """
    if compiling() or type(output.shape[0]) is not int or output.shape[0] != 2:
        return
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    if frame is None or not _unpacks(frame.f_code.co_code, frame.f_lasti):
        return
    rest = "output.unbind(0)" if isinstance(output, Tensor) else "list(output)"
    raise ClearheadError(
        f"{who} returns the output alone, and this call unpacks it into two: the names would get the first and the "
        f"second of its 2 sequences, {tuple(output.shape)}, not (output, weights).\nWrite output = module(…); the "
        f"weights are module.attention_weights. For the two sequences write first, second = {rest}."
    )


def _unpacks(code: bytes, call: int) -> bool:
    """Whether the instruction after the call at this place unpacks into two."""
    after = call + 2
    while after < len(code) and code[after] == _CACHE:
        after += 2
    return code[after : after + 2] == bytes((_UNPACK, 2)) if _UNPACK >= 0 else False
