"""Where an explanation of a recorded call could claim too much or too little of what made query, key, value, result."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from recomputed import check_script
from test_origin import SIDES, recorded, traced, words
from torch import nn

import clearhead as ch

WIDTH, HEADS, E = 12, 2, 6


class Plain(nn.Module):
    """Attention with a layer for each side; `between` changes query, key and value before they meet."""

    def __init__(self, between=None, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.between = between
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))

    def sides(self, x):
        return self.q(x), self.k(x), self.v(x)

    def forward(self, x):
        sides = tuple(t.unflatten(-1, (-1, E)).transpose(1, 2) for t in self.sides(x))
        if self.between:
            sides = self.between(*sides)
        return self.last(F.scaled_dot_product_attention(*sides).transpose(1, 2).flatten(2))

    def last(self, joined):
        return self.out(joined)


def x(batch=2, length=7):
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(1))


def explained(module, given=None, at=(0, slice(None), 3)):
    explanation = recorded(module, x() if given is None else given)[0].explain(at)
    check_script(explanation)
    return explanation


def has_result(explanation):
    return "result" in [step.name for step in explanation.steps]


# numbers of very different sizes


def test_a_small_head_beside_a_large_one():
    explanation = explained(Plain(lambda q, k, v: (torch.stack([q[:, 0] * 1e6, q[:, 1] + 0.5], 1), k, v)))
    assert traced(explanation) == SIDES - {"query"}


def test_a_small_position_beside_a_large_one():
    def changed(q, k, v):
        k = k.clone()
        k[:, :, 3] += 1
        return q, k, v

    given = x()
    given[:, 0] *= 1e6
    assert traced(explained(Plain(changed), given)) == SIDES - {"key"}


def test_sums_whose_terms_cancel():
    module = Plain()
    with torch.no_grad():
        for layer in module.q, module.k, module.v:
            layer.weight -= layer.weight.mean(1, keepdim=True)
    call = recorded(module, x() + 1e4)[0]
    assert traced(call.explain((0, 1, 3))) == SIDES
    module.between = lambda q, k, v: (q + 0.1, k, v)
    assert traced(recorded(module, x() + 1e4)[0].explain((0, 1, 3))) == SIDES - {"query"}


# several layers that give the same


def test_layers_with_equal_weights():
    module = Plain()
    module.k.load_state_dict(module.q.state_dict())
    said = words(explained(module))
    assert "Its layer k would give the same" in said
    assert "layer v" in said and "Its layer v" not in said


def test_a_factor_that_may_be_a_norm():
    explanation = explained(Plain(lambda q, k, v: (F.normalize(q, dim=-1), k, v)), x(1, 1), (0, 1, 0))
    assert "a scale of the model's, or a norm of vectors that are equally long" in words(explanation)


# changes since


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("change", [lambda w: w.mul_(2), lambda w: w.mul_(1 + 1e-5), lambda w: w.add_(1e-6)])
def test_weights_that_changed_since_by_a_factor_or_little(change, bias):
    module = Plain(bias=bias)
    call = recorded(module, x())[0]
    with torch.no_grad():
        change(module.q.weight)
    explanation = call.explain((0, 1, 3))
    assert traced(explanation) == SIDES - {"query"}
    assert "or its weights or its input were changed since" in words(explanation)
    assert has_result(explanation)
    with torch.no_grad():
        change(module.out.weight)
    assert not has_result(call.explain((0, 1, 3)))


# the last projection


class Other(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x) + 1


@pytest.mark.parametrize("way", ["hook", "class"])
def test_a_last_layer_that_is_more_than_its_weights(way):
    module = Plain()
    if way == "hook":
        module.out.register_forward_hook(lambda _, __, result: result + 5)
    else:
        module.out = Other(WIDTH, WIDTH)
    call = recorded(module, x())[0]
    explanation = call.explain((0, slice(None), 3))
    check_script(explanation)
    assert has_result(explanation)  # as it runs
    more = {"hook": (1, module.out.bias + 5), "class": (2, 2 * module.out.bias + 1)}[way]
    torch.testing.assert_close(call.output_projection.weight, more[0] * module.out.weight.detach())
    torch.testing.assert_close(call.output_projection.bias, more[1].detach())


def test_a_last_layer_that_is_not_linear():
    module = Plain()
    module.out.register_forward_hook(lambda _, __, result: result.tanh())
    call = recorded(module, x())[0]
    assert not has_result(explanation := call.explain((0, slice(None), 3)))
    assert "Its result is not that of its weights and its bias" in words(explanation)
    with pytest.raises(ch.UnsupportedError, match="out, a Linear, gives no linear function of its input"):
        _ = call.output_projection


def test_a_last_layer_after_dropout():
    class Dropping(Plain):
        def forward(self, x):
            q, k, v = (t.unflatten(-1, (-1, E)).transpose(1, 2) for t in self.sides(x))
            return self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).transpose(1, 2).flatten(2))

    explanation = explained(Dropping())
    assert has_result(explanation)
    assert "That is more than rounding: the model drops weights" in words(explanation)


# layers of other kinds: a watched model runs as it does by itself


class Conv1D(nn.Module):
    """Of the name of GPT-2's layer, and another one."""

    def __init__(self, shape=None):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        if shape is not None:
            self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return self.inner(x)


class HeadNorm(nn.LayerNorm):
    """A norm of each head, with weights of its own."""

    def __init__(self):
        super().__init__(E)
        self.weight = nn.Parameter(torch.rand(HEADS, E))
        self.bias = nn.Parameter(torch.rand(HEADS, E))

    def forward(self, x):
        return F.layer_norm(x, (E,)) * self.weight + self.bias


class OddRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = "none", "auto"

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * torch.arange(1.0, 1.0 + E)


@pytest.mark.parametrize(
    "layer",
    [Conv1D, lambda: Conv1D((WIDTH, WIDTH, 1)), lambda: Conv1D((WIDTH, WIDTH)), lambda: Other(WIDTH, WIDTH)],
    ids=["no weight", "three axes", "not its weight", "a subclass"],
)
def test_layers_that_compute_something_else_than_their_weight_says(layer):
    module = Plain()
    module.q = layer()
    assert traced(explained(module)) == SIDES


@pytest.mark.parametrize("norm", [HeadNorm, OddRMSNorm, lambda: nn.LayerNorm((HEADS, E))])
def test_norms_of_other_shapes(norm):
    module = Plain(lambda q, k, v: (module.norm(q.transpose(1, 2)).transpose(1, 2), k, v))
    module.norm = norm()
    assert traced(explained(module)) == {"key", "value"}


def test_a_layer_that_makes_its_weight_when_it_first_runs():
    module = Plain()
    module.q = nn.LazyLinear(WIDTH)
    assert traced(explained(module)) == SIDES


def test_layers_called_by_keyword():
    class ByKeyword(Plain):
        def sides(self, x):
            return self.q(input=x), self.k(input=x), self.v(input=x)

        def last(self, joined):
            return self.out(input=joined)

    explanation = explained(ByKeyword())
    assert traced(explanation) == SIDES
    assert has_result(explanation)


def test_a_weight_that_is_computed_is_not_computed_once_more():
    plain, watched = Plain(), Plain()
    for module in plain, watched:
        torch.manual_seed(0)
        nn.utils.parametrizations.spectral_norm(module.q)  # a step of an iteration each time that it is read
    with torch.no_grad():
        expected = [plain(x()) for _ in range(2)]
    for each in expected:
        with torch.no_grad(), ch.watch(watched, values=True) as seen:
            assert torch.equal(watched(x()), each)
        assert traced(seen[0].explain((0, 1, 3))) == SIDES  # read in eval mode, in which no step is taken


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_old_weight_norm():
    module = Plain()
    nn.utils.weight_norm(module.q)
    assert traced(explained(module)) == SIDES
    with torch.no_grad():
        module.q.weight_g.mul_(2)
    call = recorded(module, x())[0]  # its weight is made anew as the layer is called
    assert traced(call.explain((0, 1, 3))) == SIDES


# other arrangements that models have


def test_one_layer_for_key_and_value():
    class Both(Plain):
        def __init__(self):
            super().__init__()
            self.kv = nn.Linear(WIDTH, 2 * WIDTH)

        def sides(self, x):
            return self.q(x), *self.kv(x).chunk(2, -1)

    assert traced(explained(Both())) == SIDES


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("repeat", ["interleaved", "tiled"])
@pytest.mark.parametrize("norm", [False, True])
def test_key_heads_that_are_repeated_before_attention(fused, repeat, norm):
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.q, self.k, self.v = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.all, self.norm = nn.Linear(WIDTH, 24 + 2 * WIDTH), nn.RMSNorm(E, eps=1e-5)
            nn.init.normal_(self.norm.weight)

        def forward(self, x):
            q, k, v = self.all(x).split([24, WIDTH, WIDTH], -1) if fused else (self.q(x), self.k(x), self.v(x))
            q, k, v = (t.unflatten(-1, (-1, E)).transpose(1, 2) for t in (q, k, v))
            k = self.norm(k) if norm else k
            k, v = (t.repeat_interleave(2, 1) if repeat == "interleaved" else t.repeat(1, 2, 1, 1) for t in (k, v))
            return F.scaled_dot_product_attention(q, k, v)

    missing = {"key"} if norm and repeat == "tiled" else set()
    explanation = recorded(Grouped(), x())[0].explain((0, slice(1, 3), 3))
    assert traced(explanation) == SIDES - missing
    check_script(explanation)


def test_positions_before_sequences():
    class Swapped(Plain):
        def forward(self, x):
            q, k, v = (t.unflatten(-1, (-1, E)).permute(1, 2, 0, 3) for t in self.sides(x))
            return self.last(F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2))

    explanation = explained(Swapped(), x(7, 2))
    assert traced(explanation) == SIDES
    assert has_result(explanation)


class Turned(Plain):
    def forward(self, x, position_embeddings):
        cos, sin = position_embeddings
        self.between = lambda q, k, v: (self.turned(q, cos, sin), self.turned(k, cos, sin), v)
        return super().forward(x)

    def turned(self, x, cos, sin):
        first, last = x.split([x.shape[2] - cos.shape[-2], cos.shape[-2]], 2)
        partners = torch.cat([-last[..., E // 2 :], last[..., : E // 2]], -1)
        turned = torch.cat([first, last * cos + partners * sin], 2)
        return self.norm(turned) if hasattr(self, "norm") else turned


def angles(length):
    each = torch.arange(1, length + 1).view(-1, 1) * torch.tensor([1.0, 0.3, 0.1, 1.0, 0.3, 0.1])
    return each.cos(), each.sin()


def test_a_rotation_of_the_last_positions_alone():
    call = recorded(Turned(), x(), position_embeddings=angles(5))[0]  # as the patches of a picture, after its class
    for query in 0, 3:
        explanation = call.explain((0, slice(None), query))
        assert traced(explanation) == SIDES
        assert torch.equal(explanation["key_cos"][0, 0, :2], torch.ones(2, E))
        check_script(explanation)


def test_a_norm_of_what_was_turned():
    module = Turned()
    module.norm = nn.RMSNorm(E, eps=1e-5)
    nn.init.normal_(module.norm.weight)
    explanation = recorded(module, x(), position_embeddings=angles(7))[0].explain((0, slice(None), 3))
    assert traced(explanation) == SIDES
    names = [step.name for step in explanation.steps]
    assert names.index("key_cos") < names.index("norm_key")
    check_script(explanation)


# layers inside modules of the module


class Wrapped(nn.Module):
    """A linear layer beside an adapter of low rank, as in LoRA."""

    def __init__(self, layer, learnt):
        super().__init__()
        self.base_layer = layer
        self.down = nn.ModuleDict({"default": nn.Linear(WIDTH, 2, bias=False)})
        self.up = nn.ModuleDict({"default": nn.Linear(2, WIDTH, bias=False)})
        if not learnt:
            nn.init.zeros_(self.up["default"].weight)

    def forward(self, x):
        return self.base_layer(x) + 2 * self.up["default"](self.down["default"](x))


@pytest.mark.parametrize("learnt", [False, True])
def test_adapters_around_layers(learnt):
    module = Plain()
    module.q, module.out = Wrapped(module.q, learnt), Wrapped(module.out, learnt)
    explanation = explained(module)
    assert traced(explanation) == SIDES
    assert has_result(explanation)
    assert "The module's layer out" in words(explanation)


def test_layers_in_sequences():
    module = Plain()
    module.k = nn.Sequential(nn.LayerNorm(WIDTH), module.k)
    explanation = explained(module)
    assert traced(explanation) == SIDES
    assert "layer k.1 makes" in words(explanation)


def test_what_runs_elsewhere_is_not_kept():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.rest = Plain(), nn.Sequential(nn.Linear(WIDTH, 50), nn.Linear(50, WIDTH))

        def forward(self, x):
            return self.rest(self.attention(x))

    seen = recorded(nn.Sequential(Block(), Block()), x())
    assert [one.name for one in seen[0].origin.ran] == ["q", "k", "v", "out"]
    kept = weakref.ref(seen[0].origin.ran[0].x)
    del seen
    gc.collect()
    assert kept() is None


class Rotary(nn.Module):
    def forward(self, x):
        return angles(x.shape[1])


class TurnedInside(Turned):
    """Its cosines and sines are made by a module of it."""

    def __init__(self):
        super().__init__()
        self.rotary = Rotary()

    def forward(self, x):
        return super().forward(x, self.rotary(x))


class Complex(Plain):
    def forward(self, x, position_embeddings):
        def turned(t):
            pairs = torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * position_embeddings).flatten(-2)

        self.between = lambda q, k, v: (turned(q), turned(k), v)
        return super().forward(x)


def test_rotations_that_are_given_in_other_ways():
    cos, sin = (t[:, :3] for t in angles(7))
    for call in recorded(TurnedInside(), x())[0], recorded(Complex(), x(), position_embeddings=cos + 1j * sin)[0]:
        explanation = call.explain((0, slice(None), 3))
        assert traced(explanation) == SIDES
        assert "key_cos" in [step.name for step in explanation.steps]
        check_script(explanation)


def test_no_graph_is_kept_and_a_copy_is_its_own():
    module = Plain()
    with ch.watch(module, values=True) as seen:
        module(x().requires_grad_())
    tensors = [t for one in seen[0].origin.ran for _, t, *_ in one.versions._seen]
    assert tensors and not any(t.requires_grad for t in tensors)
    again = copy.deepcopy(seen[0])
    with torch.no_grad():
        module.q.weight.add_(1)
    assert traced(again.explain((0, 1, 3))) == SIDES
    assert traced(seen[0].explain((0, 1, 3))) == SIDES - {"query"}


@pytest.mark.parametrize("layer", ["in", "out", "both"])
@pytest.mark.parametrize("kind", ["linear", "torch", "clearhead"])
def test_layers_whose_parameters_are_freed_after_they_ran(kind, layer):
    """As fully_shard frees them: a step would read memory that is no longer there."""
    torch.manual_seed(0)

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x):
            parts = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            return self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))

    make = {
        "linear": Own,
        "torch": lambda: nn.MultiheadAttention(32, 4, batch_first=True),
        "clearhead": lambda: ch.nn.MultiHeadAttention(32, 4),
    }
    model, x = make[kind](), torch.randn(2, 6, 32)
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        model(x) if kind == "linear" else model(x, x, x)
    wanted = seen[0].explain((0, 1, 3, 2))["weights"]
    for name, parameter in model.named_parameters():
        last = name.startswith(("out", "W_o"))
        if layer == "both" or last == (layer == "out"):
            parameter.untyped_storage().resize_(0)
    explained = seen[0].explain((0, 1, 3, 2))
    assert torch.equal(explained["weights"], wanted) and "step by step" in str(explained)
