"""How the command ends by Ctrl-C or SIGTERM: it writes one line, leaves no file half written, and ends by the signal.

A handler ends the process at once, wherever it is: an exception could be caught, or turned into another one, by
the code that is being imported or is running. The program that started the command sees that a signal ended it, which
shells show as 130 and 143. So a loop of a shell ends too, and torchrun knows why a rank is gone.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import suppress
from types import FrameType

SAID = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}

unfinished: set[str] = set()  # paths of files that are removed if the process ends now


def is_command() -> bool:
    """Whether this process is the command: the script `clearhead`, or `python -m clearhead`. It is asked at the start.
    Until Python has found the module of `-m`, `sys.argv[0]` is "-m"."""
    name = sys.argv[0] if sys.argv else ""
    if name == "-m":
        given = sys.orig_argv[-len(sys.argv)] if len(sys.orig_argv) >= len(sys.argv) else ""
        return re.fullmatch(r"(-\w*m)?clearhead(\.cli)?(\.__main__)?", given) is not None
    return os.path.basename(name) in ("clearhead", "clearhead.exe")


def handle_signals() -> None:
    """Let Ctrl-C and SIGTERM end the process. A signal that is ignored, as under `nohup` and `&`, stays ignored."""
    for number in SAID:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    for path in list(unfinished):
        with suppress(OSError):
            os.unlink(path)
    with suppress(OSError):
        if "rich" in sys.modules and os.isatty(1):
            os.write(1, b"\x1b[?25h")  # the cursor, which a progress bar hides
        if os.environ.get("RANK", "0") == "0":  # one rank of several writes the line
            os.write(2, b"\n" * os.isatty(2) + f"clearhead: {SAID[signal.Signals(number)]}\n".encode())
    if os.name == "posix":
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(128 + number)
