"""The second source: direct calls of PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clearhead.masks.causal import Causal
from clearhead.models.recorder import Recorder


@contextmanager
def source(recorder: Recorder) -> Iterator[None]:
    """See every call of the function, under whatever name it was imported."""
    with _Mode(recorder):
        yield


class _Mode(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and not self.recorder.busy:
            _record(self.recorder, *args, **kwargs)
        return func(*args, **kwargs)


def _record(
    recorder: Recorder,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    causal = Causal(align="upper_left") if is_causal else None
    recorder.record(query, key, mask=attn_mask, causal=causal, scale=scale, backend="sdpa")
