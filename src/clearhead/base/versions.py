"""Whether the tensors that were read are still as they were."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.tracing import address, compiling, transformed


class Versions:
    """The number of writes to each tensor when it was read. Each tensor is given with the name of its reader.

    Tensors made in inference mode do not count their writes: where one of them is read, `known` is False.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._counted = self.known = not compiling() and not transformed()
        self._seen: list[tuple[str, Tensor, int, int]] = []
        for name, tensor in tensors if self.known else ():
            if tensor.is_inference():
                self.known = False
            else:
                self._seen.append((name, tensor, tensor._version, address(tensor)))

    def __reduce__(self) -> Any:  # a copy has tensors of its own, whose writes are counted anew
        return _again, ([(name, tensor, tensor._version != version) for name, tensor, version, _ in self._seen],)

    def changed(self, tensors: Iterable[tuple[str, Tensor]]) -> tuple[str, Tensor] | None:
        """The first of these tensors that is another object, was written to since, or was given other memory."""
        if not self._counted:
            return None
        now = [(name, tensor) for name, tensor in tensors if not tensor.is_inference()]
        for (name, other), (_, tensor, version, at) in zip(now, self._seen, strict=False):
            if other is not tensor or tensor._version != version or address(tensor) != at:
                return name, other
        if len(now) == len(self._seen):
            return None
        return now[-1] if now else self._seen[-1][:2]

    def written(self) -> tuple[str, Tensor] | None:
        """The first tensor that has been written to since, with the name of what reads it."""
        for name, tensor, version, _ in self._seen:
            if tensor._version != version:
                return name, tensor
        return None

    def check(self) -> None:
        """Raise where a backward pass would compute with other numbers than the forward pass."""
        found = self.written()
        if found is not None:
            name, tensor = found
            raise ClearheadError(
                f"a tensor that {name} of attention() reads, {tensor.dtype}, shape {tuple(tensor.shape)}, was modified "
                "in place after the forward pass, and the backward pass needs it as it was. Pass a copy: "
                "tensor.clone()."
            )


def _again(seen: list[tuple[str, Tensor, bool]]) -> Versions:
    versions = Versions((name, tensor) for name, tensor, _ in seen)
    for i, (name, tensor, written) in enumerate(seen):
        if written:
            versions._seen[i] = (name, tensor, -1, 0)
    return versions
