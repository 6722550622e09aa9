"""Attention that a module computes in its own code, beside attention that is seen: nobody is silent about it."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import clearhead as ch

aten = torch.ops.aten
SOFTMAX = {
    "F.softmax": lambda s: F.softmax(s, -1),
    "torch.softmax": lambda s: torch.softmax(s, -1),
    "a method": lambda s: s.softmax(-1),
    "a module": nn.Softmax(-1),
    "torch.special": lambda s: torch.special.softmax(s, -1),
    "torch._softmax": lambda s: torch._softmax(s, -1, False),
    "an operation": lambda s: aten._softmax(s, -1, False),
    "its overload": lambda s: aten.softmax.int(s, -1),
    "a safe one": lambda s: aten._safe_softmax.default(s, -1),
}
FUSED = {
    "flash": lambda x: aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[0],
    "math": lambda x: aten._scaled_dot_product_attention_math.default(x, x, x)[0],
}
FLEX = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
X = torch.randn(1, 2, 6, 16, generator=torch.Generator().manual_seed(0))


class OwnAttention(nn.Module):
    def __init__(self, softmax):
        super().__init__()
        self.softmax = softmax

    def forward(self, x):
        return self.softmax(x @ x.mT / 4) @ x


class Head(OwnAttention):
    pass


class Fused(OwnAttention):
    def forward(self, x):
        return self.softmax(x)


class Seen(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class Model(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, x):
        for part in self.parts.values():
            x = part(x)
        return x


def watched(model):
    with ch.watch(model):
        model(X)


def reduced(model):
    with ch.models.statistics(model, [ch.reductions.Entropy()]):
        model(X)


def edited(model):
    with ch.edit(model, ch.edits.ScaleHeads(factor=0.5)):
        model(X)


def monitored(model):
    with ch.models.monitor(model.train(), every=1) as seen:
        for _ in range(3):
            model(X)
    seen.table()


LOOKS = {"in the record": (watched, reduced), "changed": (edited,), "monitored": (monitored,)}


@pytest.mark.parametrize("how", SOFTMAX)
def test_every_softmax_is_seen(how):
    with pytest.warns(UserWarning, match=r"'parts.a' \(OwnAttention\) is not in the record"):
        watched(Model(a=OwnAttention(SOFTMAX[how]), b=Seen()))


@pytest.mark.parametrize("how", FUSED)
def test_a_fused_kernel_that_a_module_calls_itself(how):
    with pytest.warns(UserWarning, match=r"'parts.a' \(Fused\) is not in the record"):
        watched(Model(a=Fused(FUSED[how]), b=Seen()))


@pytest.mark.parametrize("name", ["attn", "self_attn", "mha", "multihead"])
def test_a_module_that_is_named_for_attention(name):
    with pytest.warns(UserWarning, match=rf"'parts.{name}' \(Head\) is not in the record"):
        watched(Model(**{name: Head(SOFTMAX["F.softmax"])}, b=Seen()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watched(Model(gate=Head(SOFTMAX["F.softmax"]), b=Seen()))


@pytest.mark.parametrize("missing", LOOKS)
def test_whoever_looks_says_so_once(missing):
    for look in LOOKS[missing]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            look(Model(a=OwnAttention(SOFTMAX["F.softmax"]), b=Seen()))
        assert [f"is not {missing}: " in str(one.message) for one in told] == [True], told
        assert told[0].filename == __file__


@FLEX
def test_flex_attention_that_a_module_calls_itself():
    model = Model(a=Fused(lambda x: flex_attention(x, x, x)), b=Seen())
    wanted = model(X)
    for looks in LOOKS.values():
        for look in looks:
            look(model)
    with ch.watch(model) as seen:
        assert torch.equal(model(X), wanted)
    assert seen.names == ["parts.a", "parts.b"]


def test_named_layers_leave_nothing_out():
    model = Model(a=OwnAttention(SOFTMAX["F.softmax"]), b=Seen()).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ch.watch(model, layers="parts.b"):
            model(X)
        with ch.edit(model, ch.edits.ScaleHeads(layers="parts.b", factor=0.5)):
            model(X)
        with ch.models.monitor(model, every=1, layers="parts.b") as seen:
            model(X)
        seen.table()


def test_the_operation_under_scaled_dot_product_attention_is_recorded():
    class Operation(nn.Module):
        def forward(self, x):
            return aten.scaled_dot_product_attention.default(x, x, x, is_causal=True, scale=0.5)

    model = Operation()
    with ch.watch(model, values=True) as seen:
        output = model(X)
    wanted = (X @ X.mT / 2).masked_fill(~torch.ones(6, 6).tril().bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(seen[0].weights.dense(), wanted)
    assert torch.equal(seen[0].output, output)
