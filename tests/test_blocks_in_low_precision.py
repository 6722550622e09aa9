"""In a low precision, gradients to which many blocks add have the error of one rounding, not of one a block."""

import pytest
import torch

import clearhead as ch
from clearhead.problem import regions


class Waves(ch.extend.Score):
    def __init__(self):
        super().__init__()
        self.height = torch.nn.Parameter(torch.tensor(0.7))

    def tile(self, query, key):
        return self.height * (query @ key.mT).sin()


def gradients(kind, dtype, engine, blocks, monkeypatch):
    monkeypatch.setattr(regions, "BUDGET", blocks)
    monkeypatch.setattr(regions, "LOOK", blocks)
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(1, 2, 300, 8).bfloat16().to(dtype).requires_grad_() for _ in range(4))
    score = Waves().bfloat16().to(dtype)
    options = {
        "tile": {"score": score},
        "statistics": {"score": score},
        "bias": {"bias": ch.BiasFunction(lambda b, h, i, j: (i - j).abs() * 0.01)},
        "twice": {},
    }[kind]
    learnt = [
        query,
        key,
        *(score.parameters() if "score" in options else ()),
        *([] if kind == "statistics" else [value]),
    ]
    if kind == "statistics":
        found = ch.weights(query, key, engine=engine, **options).reduce(
            ch.reductions.Entropy(), ch.reductions.MaxScore()
        )
        return torch.autograd.grad(sum((x * grad.detach()[..., 0]).sum() for x in found), learnt)
    output = ch.attention(query, key, value, engine=engine, **options)
    if kind != "twice":
        return torch.autograd.grad(output, learnt, grad.detach())
    first = torch.autograd.grad(output, learnt, grad.detach(), create_graph=True)
    return torch.autograd.grad(sum(x.double().square().sum() for x in first), learnt)


@pytest.mark.parametrize("kind", ["tile", "statistics", "bias", "twice"])
def test_gradients_are_rounded_once(kind, monkeypatch):
    truth = gradients(kind, torch.float64, "reference", 2**21, monkeypatch)
    found = gradients(kind, torch.bfloat16, "tiled", 2000, monkeypatch)
    for one, exact in zip(found, truth, strict=True):
        assert float((one.double() - exact).abs().max()) <= 2**-7 * float(exact.abs().max())
