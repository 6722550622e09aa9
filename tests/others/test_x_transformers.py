"""What the guide *Moving from* says of x-transformers."""

import pytest
import torch

import clearhead as ch

pytestmark = [pytest.mark.others, pytest.mark.filterwarnings("ignore")]


def test_key_heads_that_are_shared_by_several_query_heads():
    from x_transformers import Attention

    torch.manual_seed(0)
    theirs = Attention(dim=64, heads=6, dim_head=16, causal=True, flash=True, kv_heads=2).eval()
    mine = ch.nn.MultiHeadAttention(64, 6, head_dim=16, bias=False, num_kv_heads=2)
    order = torch.arange(6).view(-1, 2).T.flatten()  # theirs: query head h reads key head h % 2
    with torch.no_grad():
        mine.W_q.weight.copy_(theirs.to_q.weight.unflatten(0, (6, 16))[order].flatten(0, 1))
        mine.W_o.weight.copy_(theirs.to_out.weight.unflatten(1, (6, 16))[:, order].flatten(1))
        mine.W_k.weight.copy_(theirs.to_k.weight)
        mine.W_v.weight.copy_(theirs.to_v.weight)
    x = torch.randn(2, 33, 64)
    expected = theirs(x)
    torch.testing.assert_close(mine(x, x, x, ch.Causal()), expected[0] if isinstance(expected, tuple) else expected)
