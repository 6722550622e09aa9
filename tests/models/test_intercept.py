"""The way from a model's call of attention to the function of its backend, and what a new backend takes."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

import clearhead as ch
from clearhead.models.interception.functions import READERS
from clearhead.models.interception.intercepted_call import InterceptedCall
from clearhead.models.interception.place import BY_HEAD

PACKAGE, X = str(Path(ch.__file__).parent), torch.randn(1, 2, 5, 8)
MANAGERS = {
    "watch": lambda model: ch.watch(model, gradients=True),
    "statistics": lambda model: ch.models.statistics(model, [ch.reductions.Entropy()]),
    "edit": lambda model: ch.edit(model, ch.edits.ScaleHeads(heads=0)),
    "monitor": lambda model: ch.models.monitor(model, every=1),
    "lazy_attentions": ch.models.lazy_attentions,
}


def frames():
    """The functions of clearhead that run now, from the innermost to the `forward` of the model."""
    found, frame = [], sys._getframe(1)
    while frame.f_code.co_name != "forward":
        found += [frame.f_code.co_name] * frame.f_code.co_filename.startswith(PACKAGE)
        frame = frame.f_back
    return found


class Kernel(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "scaled_dot_product" in str(func):
            self.found = [*getattr(self, "found", []), frames()]
        return func(*args, **(kwargs or {}))


class Model(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, attend):
        super().__init__(PretrainedConfig())
        self.attend = attend

    def forward(self, *given):
        return self.attend(self, *given)


@pytest.mark.parametrize("name", MANAGERS)
def test_two_frames_to_the_function_of_a_backend(name):
    def backend(module, query, key, value, mask):
        found.append(frames())
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2), None

    found, functions = [], AttentionInterface._global_mapping
    functions["of this test"] = backend
    model = Model(lambda model, x: AttentionInterface().get_interface("of this test", None)(model, x, x, x, None))
    with MANAGERS[name](model.train()):
        model(X)
    del functions["of this test"]
    assert 1 <= len(found[0]) <= 2, found


@pytest.mark.parametrize("name", [*MANAGERS][:-1])
def test_two_frames_to_a_kernel_of_pytorch(name):
    model = Model(lambda _, x: F.scaled_dot_product_attention(x, x, x)).train()
    with MANAGERS[name](model), Kernel() as kernel:
        model(X)
    assert 1 <= len(kernel.found[0]) <= 2, kernel.found


@torch.library.custom_op("clearhead_tests::attention", mutates_args=())
def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, scale=scale)


def test_a_new_backend_is_one_function_and_one_row(monkeypatch):
    """The function that reads its arguments, and the row of the table that names it: nothing else knows it."""
    new = torch.ops.clearhead_tests.attention.default
    read = lambda _, q, k, v, scale: InterceptedCall(q, k, v, "new", place=BY_HEAD, scale=scale)
    monkeypatch.setitem(READERS, new, read)
    model = Model(lambda _, q, k, v: new(q, k, v, 0.7))
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    with ch.watch(model, values=True) as seen:
        output = model(q, k, v)
    assert seen[0].backend == "new" and torch.equal(seen[0].output, output)
    torch.testing.assert_close(seen[0].weights.dense(), torch.softmax(0.7 * q @ k.mT, -1))
    with ch.edit(model, ch.edits.ScaleHeads(factor=0.5, heads=1)):
        assert torch.equal(model(q, k, v)[:, 0], output[:, 0]) and not torch.equal(model(q, k, v), output)
