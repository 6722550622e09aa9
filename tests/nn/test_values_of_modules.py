"""Modules that are made without values, converted or copied: afterwards they compute what they computed before."""

import copy
import inspect

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead import biases, scores
from clearhead.nn import (
    AdditiveAttention,
    DotProductAttention,
    LearnedPositionalEncoding,
    MultiHeadAttention,
    RotaryEmbedding,
    RotaryScaling,
    SinusoidalPositionalEncoding,
    TorchMultiheadAttention,
)

HEADS, L, E = 12, 5, 24  # of 12 heads some slopes of ALiBi are no powers of two


def given(*shape):
    """Values that are there under `torch.device("meta")` too."""
    return torch.linspace(0.3, 1.7, torch.Size(shape).numel(), device="cpu").reshape(shape).sin()


def learnt(*shape):
    return nn.Parameter(given(*shape))


MODULES = {
    "ALiBi": lambda: ch.ALiBi(HEADS),
    "RelativeBias": lambda: ch.RelativeBias(HEADS),
    "DenseBias": lambda: ch.DenseBias(given(1, HEADS, L, L)),
    "DenseBias, learnt": lambda: ch.DenseBias(learnt(1, HEADS, L, L)),
    "BiasFunction": lambda: ch.BiasFunction(lambda b, h, i, j: (h + i - j) / 7),
    "Sum": lambda: ch.ALiBi(HEADS) + ch.RelativeBias(HEADS),
    "Dot": lambda: ch.Dot(),
    "Cosine": lambda: ch.Cosine(),
    "Gaussian": lambda: ch.Gaussian(learnt(1)),
    "Bilinear": lambda: ch.Bilinear(E, E),
    "Additive": lambda: ch.Additive(E, E, 6),
    "ScoreFunction": lambda: scores.ScoreFunction(lambda q, k: q @ k.mT),
    "DotProductAttention": DotProductAttention,
    "AdditiveAttention": lambda: AdditiveAttention(8, query_dim=E, key_dim=E),
    "TorchMultiheadAttention": lambda: TorchMultiheadAttention(E, HEADS, batch_first=True),
    "TorchMultiheadAttention of three widths": lambda: TorchMultiheadAttention(
        E, HEADS, batch_first=True, kdim=E, vdim=E, bias=False
    ),
    "MultiHeadAttention": lambda: MultiHeadAttention(E, HEADS),
    "MultiHeadAttention with every option": lambda: MultiHeadAttention(
        E, HEADS, score=ch.Bilinear(2, 2), rotary=RotaryEmbedding(2), query_norm=nn.RMSNorm(2), key_norm=nn.RMSNorm(2),
        scale=given(HEADS), temperature=learnt(HEADS), sinks=True, score_bias=ch.ALiBi(HEADS), gate="headwise",
    ),
    "LearnedPositionalEncoding": lambda: LearnedPositionalEncoding(L, E),
    "SinusoidalPositionalEncoding": lambda: SinusoidalPositionalEncoding(E),
    "RotaryEmbedding": lambda: RotaryEmbedding(E, scaling=RotaryScaling.yarn(4, 2)),
}  # fmt: skip


def drawn(name, dtype=torch.float32):
    """A module whose parameters are random numbers, those that begin at 0 too."""
    torch.manual_seed(3)
    module = MODULES[name]().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.8, 0.2)
    return module.to(dtype)


def result(module, dtype=torch.float32):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2, L, E, generator=generator).to(dtype)
    if isinstance(module, scores.Score):
        return module(x, x)
    if isinstance(module, biases.Bias):
        x = x[:, None].expand(-1, HEADS, -1, -1)
        return module(x, x)
    one = "x" in inspect.signature(module.forward).parameters
    found = module(x) if one else module(x, x, x)
    return found[0] if isinstance(found, tuple) else found


def without_values(name):
    with torch.device("meta"):
        return MODULES[name]().eval()


@pytest.fixture(autouse=True)
def _memory_without_values_is_nan():
    """In its deterministic mode PyTorch writes NaN to memory that nothing was written to."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_every_public_module_is_here():
    spaces = (ch, ch.nn, biases, scores)
    kinds = [kind for space in spaces for kind in vars(space).values() if isinstance(kind, type)]
    public = {kind.__name__ for kind in kinds if issubclass(kind, nn.Module) and not inspect.isabstract(kind)}
    assert public == {name.split()[0].strip(",") for name in MODULES} - {"Sum"}


@pytest.mark.parametrize("name", MODULES)
def test_a_state_dict_fills_a_module_without_values(name):
    module = drawn(name)
    want, state = result(module), module.state_dict()
    emptied = without_values(name).to_empty(device="cpu")
    emptied.load_state_dict(state)
    assert torch.equal(result(emptied), want)
    taken = without_values(name)
    taken.load_state_dict(state, assign=True)
    assert torch.equal(result(taken), want)


@pytest.mark.parametrize("name", MODULES)
def test_fsdp_may_give_a_module_without_values_its_first_values(name):
    """It calls `to_empty` and `reset_parameters` of each module that has parameters or buffers."""
    whole = without_values(name)
    if "DenseBias" in name:
        return  # the state dict alone has what was given
    for module in whole.modules():
        if [*module.parameters(False), *module.buffers(False)]:
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()
    assert all(t.isfinite().all() for t in (*whole.parameters(), *whole.buffers()))
    assert result(whole).isfinite().all()
    values = {n: t for n, t in whole.named_parameters() if n in ("temperature", "bandwidth")}
    made = MODULES[name]()
    assert all(torch.equal(t, made.get_parameter(n)) for n, t in values.items())


@pytest.mark.parametrize("name", [name for name in MODULES if hasattr(MODULES[name](), "reset_parameters")])
def test_first_values_are_drawn_as_those_of_a_new_module(name):
    torch.manual_seed(0)
    old = drawn(name)
    largest = lambda module: [float(p.detach().abs().max()) for p in module.parameters()]
    again, fresh = [], []
    for _ in range(20):
        old.reset_parameters()
        again.append(largest(old))
        fresh.append(largest(MODULES[name]()))
    assert torch.allclose(torch.tensor(again).mean(0), torch.tensor(fresh).mean(0), rtol=0.15)


@pytest.mark.parametrize("name", MODULES)
def test_copies_and_conversions(name):
    module = drawn(name)
    want = result(module)
    assert torch.equal(result(copy.deepcopy(module)), want)
    wide = result(copy.deepcopy(module).double(), torch.float64)
    assert torch.allclose(wide.float(), want, rtol=1e-4, atol=1e-5)
    rounded = copy.deepcopy(module)
    rounded.load_state_dict({n: t.half().float() for n, t in module.state_dict().items()})
    assert torch.equal(result(module.half().float()), result(rounded))  # nothing but the state dict has lost digits


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (MultiHeadAttention, (E, HEADS)),
        (TorchMultiheadAttention, (E, HEADS)),
        (LearnedPositionalEncoding, (L, E)),
        (ch.RelativeBias, (HEADS,)),
        (ch.Bilinear, (E, E)),
        (ch.Additive, (E, E, 6)),
    ],
)
def test_skip_init_and_dtypes(kind, arguments):
    module = nn.utils.skip_init(kind, *arguments, device="cpu", dtype=torch.float64)
    assert all(p.dtype == torch.float64 and p.is_cpu for p in module.parameters())
    module.load_state_dict(kind(*arguments).state_dict())


def test_slopes_keep_their_digits():
    whole = ch.ALiBi(HEADS).slopes
    for change in ("half", "bfloat16", "float"):
        assert torch.equal(getattr(ch.ALiBi(HEADS), change)().slopes, whole)
    precise = ch.ALiBi(HEADS).double().slopes
    assert precise[8] == 2.0**-0.5 and torch.equal(precise.float(), whole)
    learning = ch.ALiBi(HEADS)
    learning.slopes.requires_grad_()
    assert learning.half().slopes.requires_grad and learning.slopes.is_leaf
    other = ch.ALiBi(HEADS)
    other.slopes.mul_(1.1)
    assert torch.equal(other.half().slopes, (whole * 1.1).half())
    registered = ch.ALiBi(HEADS)
    registered.slopes = nn.Parameter(whole)
    assert registered.half().slopes.dtype == torch.float16 and "slopes" in registered.state_dict()
    shared = ch.ALiBi(HEADS).share_memory()
    assert shared.slopes.is_shared()


def test_values_that_were_never_there_are_named():
    with torch.device("meta"):
        module = MultiHeadAttention(E, HEADS, temperature=nn.Parameter(torch.ones(HEADS)))
    module.to_empty(device="cpu")
    with pytest.raises(ch.ClearheadError, match="temperature, shape \\(12,\\), was given without values"):
        module.reset_parameters()
