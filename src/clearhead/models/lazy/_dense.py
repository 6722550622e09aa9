"""The bytes of dense weights that stand in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from clearhead.base.errors import ClearheadError


class Dense:
    """Counts what lazy weights have been made into, for as long as anything holds its memory.

    `made`: how many times, `bytes`: how many in all, since the process began. `standing`: those that are held now.
    """

    def __init__(self) -> None:
        self.made = self.bytes = 0
        self._lock = threading.Lock()
        self._held: list[tuple[StorageWeakRef, int]] = []
        self._most_held = 0  # the length at which those that are gone are looked for
        self._total = 0  # of what is held, of what is gone and not yet looked for, and of what is underway

    @property
    def standing(self) -> int:
        with self._lock:
            self._forget()
            return self._total

    def _forget(self) -> None:
        """Forget those whose memory is free."""
        before = sum(size for _, size in self._held)
        self._held = [one for one in self._held if not one[0].expired()]  # type: ignore[no-untyped-call]
        self._total -= before - sum(size for _, size in self._held)
        self._most_held = 2 * len(self._held) + 100

    def make(
        self, size: int, most: int | None, make: Callable[[], Tensor], error: Callable[[int], ClearheadError]
    ) -> Tensor:
        """What `make` gives, `size` bytes; the error, given what stands, where that would be more than `most`."""
        with self._lock:
            if len(self._held) > self._most_held or (most is not None and self._total + size > most):
                self._forget()
            if most is not None and self._total + size > most:
                raise error(self._total)
            self._total += size
        try:
            made = make()
        except BaseException:
            with self._lock:
                self._total -= size
            raise
        with self._lock:
            self.made += 1
            self.bytes += size
            self._held.append((StorageWeakRef(made.untyped_storage()), size))  # type: ignore[no-untyped-call]
        return made


DENSE = Dense()
