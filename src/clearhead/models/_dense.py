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
        self._underway = 0

    @property
    def standing(self) -> int:
        with self._lock:
            return self._standing()

    def _standing(self) -> int:
        self._held = [(storage, size) for storage, size in self._held if not storage.expired()]  # type: ignore[no-untyped-call]
        return self._underway + sum(size for _, size in self._held)

    def make(
        self, size: int, most: int | None, make: Callable[[], Tensor], error: Callable[[int], ClearheadError]
    ) -> Tensor:
        """What `make` gives, `size` bytes; the error, given what stands, where that would be more than `most`."""
        with self._lock:
            standing = self._standing()
            if most is not None and standing + size > most:
                raise error(standing)
            self._underway += size
        try:
            made = make()
        finally:
            with self._lock:
                self._underway -= size
        with self._lock:
            self.made += 1
            self.bytes += size
            self._held.append((StorageWeakRef(made.untyped_storage()), size))  # type: ignore[no-untyped-call]
        return made


DENSE = Dense()
