"""Whether the tensors that were read are still as they were."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.tracing import address, compiling, transformed


class Versions:
    """How often each tensor had been written to when it was read. Each is given with the name of what reads it.

    Tensors made in inference mode do not count their writes: where one of them is read, `known` is False.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.known = not compiling() and not transformed()
        self._seen: list[tuple[str, Tensor, int, int]] = []
        for name, tensor in tensors if self.known else ():
            if tensor.is_inference():
                self.known = False
            else:
                self._seen.append((name, tensor, tensor._version, address(tensor)))

    def same(self, tensors: Iterable[Tensor]) -> bool:
        """Whether these are the same tensors, nothing has been written to since, and none was given other memory."""
        now = list(tensors)
        return len(now) == len(self._seen) and all(
            other is tensor and tensor._version == version and address(tensor) == at
            for other, (_, tensor, version, at) in zip(now, self._seen, strict=True)
        )

    def written(self) -> tuple[str, Tensor] | None:
        """The first tensor that has been written to since, with the name of what reads it."""
        for name, tensor, version, _ in self._seen:
            if tensor._version != version:
                return name, tensor
        return None

    def check(self) -> None:
        """Raise where a backward pass would compute with other numbers than the forward did."""
        found = self.written()
        if found is not None:
            name, tensor = found
            raise ClearheadError(
                f"a tensor that {name} of attention() reads, {tensor.dtype}, shape {tuple(tensor.shape)}, was modified "
                "in place after the forward pass, and the backward pass needs it as it was. Pass a copy: "
                "tensor.clone()."
            )
