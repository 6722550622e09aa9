"""Whether this thread calls a layer to read its numbers, and not to run the model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Probe(threading.local):
    active = False


_PROBE = _Probe()


def is_probing() -> bool:
    """Whether the layer that is called now is only read, so that no watch sees it."""
    return _PROBE.active


@contextmanager
def probing() -> Iterator[None]:
    """A context in which layers are called to be read."""
    before, _PROBE.active = _PROBE.active, True
    try:
        yield
    finally:
        _PROBE.active = before
