"""Tensors whose memory was freed: each use of one is an error in words, and no process ends."""

import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from clearhead.base.tracing import freed

BEGIN = """
import tempfile, torch, clearhead as ch
def free(t, size=0):
    t.untyped_storage().resize_(size)
    return t
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)
def run(text):
    names = globals() | {"x": torch.rand(1, 8, 20, 16), "q": free(torch.rand(1, 8, 20, 16))}
    names["whole"] = torch.rand(3, 1, 8, 20, 16)
    names["parts"] = list(names["whole"])
    names["keep"] = torch.rand(20, 20) > 0.5
    names["recorded"] = recorded = Model()
    with ch.watch(recorded, values=True) as seen:
        recorded(names["x"])
    names["seen"] = seen
    exec(text, names)
"""
# what dies, or gives other memory's numbers, where it is not refused
CASES = [
    "ch.attention(q, x, x)",
    "ch.attention(x, x, q, mask=ch.Causal())",
    "free(whole); ch.attention(*parts)",
    "free(whole); ch.attention(x, x, parts[2], engine='tiled')",
    "ch.partial(x, q, x)",
    "ch.plan(q, x, x)",
    "ch.weights(q, x)[0, 0, 0]",
    "ch.weights(x, q).entropy()",
    "y = x.clone(); w = ch.weights(y, y); w.dense(); free(y); w.dense()",
    "y = x.clone(); w = ch.weights(y, y); w.dense(); free(y, 100); w.dense()",
    "ch.diagnose(x, q, x)",
    "ch.explain(x, x, q)",
    "ch.masked_softmax(q)",
    "ch.attention(x, x, x, mask=free(keep))",
    "ch.attention(x, x, x, mask=free(keep, 100))",
    "m = ch.DenseMask(keep); ch.attention(x, x, x, mask=m); free(keep); ch.attention(x, x, x, mask=m)",
    "m = ch.DenseMask(keep); free(keep); m.dense(20, 20)",
    "m = ch.Lengths([3]); free(m.valid_lens); ch.attention(x, x, x, mask=m)",
    "m = ch.Padding(keep[:1]); free(m.keep); ch.attention(x, x, x, mask=m)",
    "m = ch.Documents(torch.arange(20)[None] // 9); free(m.ids); ch.attention(x, x, x, mask=m)",
    "ch.attention(x, x, x, mask=ch.Causal(), align=free(torch.tensor([3])))",
    "b = ch.ALiBi(8); free(b.slopes); ch.attention(x, x, x, bias=b)",
    "b = ch.RelativeBias(8); free(b.weight.data); ch.attention(x, x, x, bias=b)",
    "s = ch.Additive(16, 16, 8); free(s.W_q.data); ch.attention(x, x, x, score=s)",
    "ch.attention(x, x, x, sinks=free(torch.rand(8)))",
    "t = torch.rand(20); m = ch.MaskFunction(lambda b, h, i, j: t[j] > 0.5); ch.attention(x, x, x, mask=m); free(t); "
    "ch.attention(x, x, x, mask=m)",
    "one = ch.edits.ForceMask(keep); free(keep)\nwith ch.edit(recorded, one): recorded(x)",
    "one = ch.edits.AddBias(x[0, 0]); free(one.bias)\nwith ch.edit(recorded, one): recorded(x)",
    "free(seen.calls[0].query); seen.calls[0].weights.dense()",
    "free(seen.calls[0].query); seen.write(tempfile.mktemp('.safetensors'))",
]


def ended(cases):
    """How each of these cases ends, in one process: it is told before each case, so a death is told too."""
    lines = "\n".join(
        f"print('at', {i}, flush=True)\ntry:\n    run({text!r})\n    print('silent', flush=True)\n"
        "except Exception as e:\n    print(type(e).__name__, 'no memory' in str(e), flush=True)"
        for i, text in enumerate(cases)
    )
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BEGIN) + lines],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return done.stdout.splitlines(), done.returncode, done.stderr[-800:]


def test_each_use_is_an_error_in_words():
    lines, code, error = ended(CASES)
    wrong = [f"{CASES[int(a.split()[1])]}: {b}" for a, b in zip(lines[::2], lines[1::2], strict=False)
             if b != "ClearheadError True"]  # fmt: skip
    assert code == 0, f"the process ended in {CASES[int(lines[-1].split()[1])]}: {error}"
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("number", range(20))
def test_random_views_are_told_from_freed_ones(number):
    """A view is refused exactly where its last number lies beyond what the storage holds."""
    rng = random.Random(number)
    whole = torch.zeros(6, 7, 8)
    view = whole.transpose(*rng.sample(range(3), 2))[rng.randrange(3) :, :: rng.choice([1, 2])]
    view = view[:, :1].expand(-1, 4, -1) if rng.random() < 0.3 else view
    last = view.storage_offset() + sum(s * (n - 1) for s, n in zip(view.stride(), view.shape, strict=True))
    for held in (0, 4 * last, 4 * last + 4, 4 * last + 40):
        whole.untyped_storage().resize_(held)
        assert freed(view) == (held <= 4 * last), (view.shape, view.stride(), held)
