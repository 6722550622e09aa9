"""All sources at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from clearhead.models.tap import functions, own
from clearhead.models.tap.interface import Given, subscribed
from clearhead.models.tap.receiver import Receiver


@contextmanager
def given_calls(receiver: Receiver, innermost: bool = False) -> Iterator[None]:
    """The receiver is given each attention call of its model inside the `with`.

    Of several receivers the later one sees a call first, and its result last; or, `innermost`, after all others, and
    its result before them.
    """
    with ExitStack() as stack:
        # first: what the compiler makes of it would keep the rest alive
        stack.enter_context(functions.source(receiver, innermost))
        stack.enter_context(receiver.stack.entered())
        stack.enter_context(subscribed(Given(receiver), innermost))
        stack.enter_context(own.source(receiver, innermost))
        yield
