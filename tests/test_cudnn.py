"""Calls of PyTorch's kernel for which cuDNN's backward pass gives NaN. No device is needed: the choice is looked at."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from clearhead.engines.sdpa.fused import fused


@pytest.mark.parametrize(
    "keys, masked, gradients, may_run",
    [
        (64, True, True, False),
        (192, True, True, False),
        (128, True, True, True),
        (192, False, True, True),
        (192, True, False, True),
    ],
)
def test_cudnn_is_left_out_where_its_gradients_are_nan(keys, masked, gradients, may_run, monkeypatch):
    seen = []

    def attend(query, *_, **__):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return query

    monkeypatch.setattr("clearhead.engines.sdpa.fused.OWN_SDPA", attend)
    with FakeTensorMode():
        x = torch.empty(1, 2, keys, 64, device="cuda", dtype=torch.bfloat16, requires_grad=gradients)
        mask = torch.empty(keys, keys, device="cuda", dtype=torch.bool) if masked else None
        fused(x, x, x, 0.125, mask)
    assert seen == [may_run] and torch.backends.cuda.cudnn_sdp_enabled()
