"""Whether the tensors that were read are still as they were."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from clearhead._errors import ClearheadError
from clearhead._values import compiling, transformed


class Versions:
    """How often each tensor had been written to when it was read.

    Tensors made in inference mode do not count their writes: where one of them is read, `known` is False.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.known = not compiling() and not transformed()
        self._seen: list[tuple[Tensor, int]] = []
        for tensor in tensors if self.known else ():
            if tensor.is_inference():
                self.known = False
            else:
                self._seen.append((tensor, tensor._version))

    @property
    def same(self) -> bool:
        """Whether nothing has been written to since."""
        return all(tensor._version == version for tensor, version in self._seen)

    def check(self) -> None:
        """Raise where a backward pass would compute with other numbers than the forward did."""
        for tensor, version in self._seen:
            if tensor._version != version:
                raise ClearheadError(
                    f"a tensor that a mask or a score of attention() reads, {tensor.dtype}, shape "
                    f"{tuple(tensor.shape)}, was modified in place after the forward pass, and the backward pass needs "
                    "it as it was. Pass a copy: tensor.clone()."
                )
