"""All sources at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from clearhead.models._receiver import Receiver
from clearhead.models.sources import functions, own, transformers


@contextmanager
def given_calls(receiver: Receiver) -> Iterator[None]:
    """The receiver is given each attention call of its model inside the `with`."""
    with ExitStack() as stack:
        # first: what the compiler makes of it would keep the rest alive
        stack.enter_context(functions.source(receiver))
        stack.enter_context(receiver.stack.entered())
        stack.enter_context(transformers.source(receiver))
        stack.enter_context(own.source(receiver))
        yield
