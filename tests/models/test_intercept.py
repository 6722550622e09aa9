"""The way from a model's call of attention to the function of its backend, and what a new backend takes."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import clearhead as ch
from clearhead.models.tap.functions import READERS
from clearhead.models.tap.intercepted_call import InterceptedCall
from clearhead.models.tap.place import BY_HEAD

PACKAGE = str(Path(ch.__file__).parent)
ENTROPY = [ch.reductions.Entropy()]
MANAGERS = {
    "watch": ch.watch,
    "watch outputs": lambda model: ch.watch(model, values=True, gradients=True),
    "statistics": lambda model: ch.models.statistics(model, ENTROPY),
    "edit": lambda model: ch.edit(model, ch.edits.ScaleHeads(factor=0.5, heads=0)),
    "monitor": lambda model: ch.models.monitor(model, every=1),
}


def frames(folder=PACKAGE):
    """The functions of clearhead that run now, from the innermost to the model's `forward` in this file."""
    found, frame = [], sys._getframe(1)
    while frame is not None and not (frame.f_code.co_filename == __file__ and frame.f_code.co_name == "forward"):
        if frame.f_code.co_filename.startswith(folder):
            found.append(frame.f_code.co_name)
        frame = frame.f_back
    assert frame is not None, "not called by the model"
    return found


class Kernel(TorchDispatchMode):
    """Notes the functions of clearhead that run when the kernel of PyTorch's attention begins."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "scaled_dot_product" in str(func):
            self.found.append(frames())
        return func(*args, **(kwargs or {}))


class Attending(torch.nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, *given, **more):
        return self.attend(*given, **more)


def sdpa(x):
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def inside_module(x):
    x = x.flatten(0, 1)
    return F.multi_head_attention_forward(
        x, x, x, 8, 2, torch.ones(24, 8), None, None, None, False, 0.0, torch.eye(8), None, need_weights=False
    )[0]


@pytest.mark.parametrize("attend", [sdpa, inside_module])
@pytest.mark.parametrize("name", MANAGERS)
def test_two_frames_to_a_kernel_of_pytorch(name, attend):
    model, x = Attending(attend).train(), torch.randn(1, 2, 5, 8, requires_grad=True)
    with MANAGERS[name](model), Kernel() as kernel:
        model(x)
    assert 1 <= len(kernel.found[0]) <= 2, kernel.found


@pytest.mark.parametrize("name", [*MANAGERS, "lazy_attentions"])
def test_two_frames_to_a_backend_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    found = []

    class Model(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def forward(self, x, **keywords):
            function = transformers.AttentionInterface().get_interface("of_this_test", None)
            return function(self, x, x, x, None, **keywords)[0]

    def backend(module, query, key, value, mask, **keywords):
        found.append(frames())
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2), None

    transformers.AttentionInterface.register("of_this_test", backend)
    try:
        manager = {**MANAGERS, "lazy_attentions": ch.models.lazy_attentions}[name]
        model = Model(transformers.PretrainedConfig()).train()
        with manager(model):
            model(torch.randn(1, 2, 5, 8))
    finally:
        transformers.AttentionInterface._global_mapping.pop("of_this_test")
    assert 1 <= len(found[0]) <= 2, found


@pytest.mark.parametrize("name", MANAGERS)
def test_two_frames_of_the_models_package_to_an_engine(name, monkeypatch):
    from clearhead.engines.tiled.engine import Tiled

    found, forward = [], Tiled.forward

    def noting(*given):
        found.append(frames(f"{PACKAGE}/models"))
        return forward(*given)

    monkeypatch.setattr(Tiled, "forward", noting)
    model, x = Attending(lambda x: ch.attention(x, x, x, engine="tiled")).train(), torch.randn(1, 2, 5, 8)
    with MANAGERS[name](model):
        model(x)
    first = next(one for one in found if one)
    assert 1 <= len(first) - (name == "monitor") <= 2, found  # a monitor looks at compiled code one frame further out


@torch.library.custom_op("clearhead_tests::attention", mutates_args=())
def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, scale=scale)


def read(handler, query, key, value, scale):
    return InterceptedCall(query, key, value, "new", place=BY_HEAD, scale=scale)


def test_a_new_backend_is_one_function_and_one_row(monkeypatch):
    """The file with the function that reads its arguments, and the table that names it: nothing else knows it."""
    monkeypatch.setitem(READERS, torch.ops.clearhead_tests.attention.default, read)
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    model = Attending(lambda q, k, v: torch.ops.clearhead_tests.attention.default(q, k, v, 0.7))
    with ch.watch(model, values=True) as seen:
        output = model(q, k, v)
    assert seen[0].backend == "new" and torch.equal(seen[0].output, output)
    torch.testing.assert_close(seen[0].weights.dense(), torch.softmax(0.7 * q @ k.mT, -1))
    with ch.models.statistics(model, ENTROPY) as reduced, ch.edit(model, ch.edits.ScaleHeads(factor=0.5, heads=1)):
        edited = model(q, k, v)
    assert reduced[0].backend == "new" and torch.equal(edited[:, 0], output[:, 0])
    torch.testing.assert_close(edited[:, 1], output[:, 1] / 2)
