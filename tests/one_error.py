"""A call is refused by one clear error."""

from collections.abc import Callable, Sequence

import pytest

import clearhead as ch


def check_error(call: Callable[[], object], kind: type[ch.ClearheadError], says: Sequence[str]) -> None:
    """Fails unless the call raises an error of this kind, and of none narrower, whose short message has these words."""
    with pytest.raises(ch.ClearheadError) as caught:
        call()
    assert isinstance(caught.value, kind)
    assert kind is not ch.ClearheadError or not isinstance(caught.value, ch.ShapeError | ch.UnsupportedError)
    message = str(caught.value)
    missing = [word for word in says if word not in message]
    assert not missing, f"{missing} is not in:\n{message}"
    assert len(message.splitlines()) < 14
