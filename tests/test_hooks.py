"""Hooks of scores and biases, which the library reads and does not call: pruning, weight norm, spectral norm, own."""

import copy
import warnings

import pytest
import torch
import torch.nn.utils as utils
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import prune

import clearhead as ch
from clearhead.base.errors import UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
WAYS = {
    "weight_norm": utils.weight_norm,
    "spectral_norm": utils.spectral_norm,
    "prune": lambda module, name: prune.l1_unstructured(module, name, 0.5),
    "parametrization": utils.parametrizations.weight_norm,
}


class ByHand(nn.Module):
    """The same attention as a plain module, whose forward PyTorch calls."""

    def __init__(self, name, weight, scores):
        super().__init__()
        self.name, self.scores = name, scores
        setattr(self, name, nn.Parameter(weight.detach().clone()))

    def forward(self, query, key, value):
        return torch.softmax(self.scores(getattr(self, self.name), query, key), -1) @ value


class Own(ch.extend.Score):
    """A score by tile() alone."""

    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(torch.randn(4, 6))

    def tile(self, query, key):
        return query @ self.W @ key.mT


def bilinear(weight, query, key):
    return query @ weight @ key.mT


def additive(weight, query, key):
    torch.manual_seed(3)
    other = ch.Additive(4, 6, 5)
    return torch.tanh((query @ weight.T)[..., :, None, :] + (key @ other.W_k.T.detach())[..., None, :, :]) @ other.w_v


def relative(weight, query, key):
    apart = torch.arange(key.shape[-2]) - torch.arange(query.shape[-2])[:, None]
    return weight[ch.RelativeBias(1).bucket(apart)].movedim(-1, 0) + query @ query.new_ones(4, 6) @ key.mT / 9


def additive_score():
    torch.manual_seed(3)
    return ch.Additive(4, 6, 5)


PARTS = {  # name of the weight, the options of attention with the module that has it, the module, the scores by hand
    "bilinear": lambda s=None: ("W", {"score": (s := ch.Bilinear(4, 6))}, s, bilinear),
    "own": lambda s=None: ("W", {"score": (s := Own())}, s, bilinear),
    "changed": lambda s=None: ("W", {"score": (s := ch.Bilinear(4, 6).then(lambda x, *at: x))}, s, bilinear),
    "additive": lambda s=None: ("W_q", {"score": (s := additive_score())}, s, additive),
    "relative": lambda b=None: (
        "weight",
        {
            "bias": (b := ch.RelativeBias(3)) + ch.DenseBias(torch.zeros(5, 7)),
            "score": ch.Bilinear.from_weights(torch.ones(4, 6) / 9),
            "align": "upper_left",
        },
        b,
        relative,
    ),
}


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, *shape, generator=generator) for shape in ((5, 4), (7, 6), (7, 2))]


def pair(part, way):
    """attention() with a module that a way of PyTorch's has changed, and the same by hand."""
    torch.manual_seed(1)
    name, options, module, scores = PARTS[part]()
    plain = ByHand(name, getattr(module, name), scores)
    for each in (module, plain):
        torch.manual_seed(2)  # spectral norm draws vectors
        WAYS[way](each, name)
    return module, options, plain


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", PARTS)
def test_two_steps_of_training_are_those_of_a_module_that_is_called(part, way):
    module, options, plain = pair(part, way)
    names = dict(plain.named_parameters())
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in names)  # the other weights of a score stay as they are
    both = [torch.optim.SGD([p for p in each.parameters() if p.requires_grad], 0.05) for each in (module, plain)]
    outputs = []
    for _ in range(2):
        # two calls before the backward pass: the second one's hooks leave what the first one reads
        ours = [ch.attention(*inputs(), **options) for _ in range(2)]
        theirs = [plain(*inputs()) for _ in range(2)]
        for found, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for optimizer, found in zip(both, (ours, theirs), strict=True):
            optimizer.zero_grad()
            (found[0].square().sum() + found[1].sum()).backward()
        for name, other in names.items():
            parameter = dict(module.named_parameters())[name]
            assert parameter.grad.any()
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-3, atol=1e-4)
        for optimizer in both:
            optimizer.step()
        outputs.append(ours[0].detach())
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3


@pytest.mark.parametrize("way", ["weight_norm", "prune"])
@pytest.mark.parametrize("part", ["bilinear", "relative"])
def test_every_tool_sees_the_weight_of_now(part, way):
    module, options, plain = pair(part, way)
    with torch.no_grad():
        for each in (module, plain):
            for parameter in each.parameters():
                parameter.mul_(1.5)
    query, key, value = inputs()
    expected = plain(query, key, value).detach()
    alone = {name: given for name, given in options.items() if name != "engine"}
    assert ch.plan(query, key, value, **options).engine  # it needs no gradient, and fails for nothing stale
    torch.testing.assert_close(ch.weights(query, key, **alone).dense() @ value, expected)
    torch.testing.assert_close(ch.partial(query, key, value, **alone).finish(), expected)
    torch.testing.assert_close(ch.attention(query, key, value, engine="reference", **alone), expected)
    found = ch.explain(query, key, value, **alone)
    torch.testing.assert_close(found["output"].reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)


def test_in_low_precision_and_after_a_conversion():
    module, options, plain = pair("own", "weight_norm")
    query, key, value = (t.bfloat16() for t in inputs())
    module.bfloat16()  # PyTorch converts weight_g and weight_v alone, and the hook makes the weight anew
    plain.bfloat16().float()
    found = ch.attention(query, key, value, **options)
    expected = plain(query.float(), key.float(), value.float())
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(
        options["score"](query, key), bilinear(plain.W, query.float(), key.float()), rtol=2e-2, atol=2e-2
    )


def test_spectral_norm_takes_one_step_a_call():
    torch.manual_seed(0)
    ours, theirs = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)
    theirs.load_state_dict(ours.state_dict())
    score = ch.Bilinear.from_weights(ours.weight.detach().clone())
    for module, name in ((score, "W"), (theirs, "weight")):
        torch.manual_seed(2)
        utils.spectral_norm(module, name)
    for _ in range(3):
        ch.attention(*inputs(), score=score)
        theirs(torch.ones(6))
    assert torch.equal(score.W_u, theirs.weight_u)


def test_a_module_with_hooked_parts():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    module = ch.nn.MultiHeadAttention(
        8, 2, score=ch.Bilinear(4, 4), score_bias=ch.RelativeBias(2), record_gradients=True
    )
    plain = copy.deepcopy(module)
    utils.weight_norm(module.score, "W")
    prune.l1_unstructured(module.score_bias, "weight", 0.25)
    with torch.no_grad():
        module.score.W_g.mul_(2)
        module.score_bias.weight_orig.add_(1)
        plain.score.W.mul_(2)
        plain.score_bias.weight.copy_((plain.score_bias.weight + 1) * module.score_bias.weight_mask)
    torch.testing.assert_close(module(x, x, x), plain(x, x, x))
    mine, theirs = module.attention_weights, plain.attention_weights
    for _ in range(2):  # a look does not run the hooks, which would put other tensors in place
        torch.testing.assert_close(mine.dense(), theirs.dense())
    mine.dense().square().sum().backward()
    theirs.dense().square().sum().backward()
    along = (module.score.W_v.grad * module.score.W_v).sum()  # a length does not change the weight
    assert abs(along) < 1e-5 and module.score.W_g.grad.any()
    masked = plain.score_bias.weight.grad * module.score_bias.weight_mask
    torch.testing.assert_close(module.score_bias.weight_orig.grad, masked)
    with torch.no_grad():
        module(x, x, x)
        again = copy.deepcopy(module)  # PyTorch copies a weight that a hook has made without a graph
    torch.testing.assert_close(again(x, x, x), plain(x, x, x))
    with ch.watch(module) as seen:
        module(x, x, x)
    torch.testing.assert_close(seen[0].weights.dense(), theirs.dense())


def test_the_inputs_of_a_hook_and_what_it_may_not_do():
    score, bias = ch.Bilinear(4, 6), ch.ALiBi(3)
    seen = []
    score.register_forward_pre_hook(lambda module, args: seen.append([tuple(t.shape) for t in args]))
    score.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    bias.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    ch.attention(*inputs(), score=score, bias=bias, align="upper_left")
    assert seen == [[(2, 3, 5, 4), (2, 3, 7, 6)], {}, (2, 3, 5, 7)]
    handle = score.register_forward_pre_hook(lambda module, args: (args[0] * 2, args[1]))
    with pytest.raises(UnsupportedError, match="hook of Bilinear gave other inputs"):
        ch.attention(*inputs(), score=score)
    handle.remove()
    for register in (score.register_forward_hook, score.register_full_backward_hook):
        handle = register(lambda *given: None)
        with pytest.warns(
            UserWarning, match="Bilinear has a forward hook or a backward hook, which is not run"
        ) as told:
            ch.attention(*inputs(), score=score)
        assert [one.filename for one in told] == [__file__]
        handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ch.attention(*inputs(), score=score)


def test_a_hook_that_sets_an_adapted_weight():
    """An adapter of low rank that a hook adds to the weight before each call."""
    torch.manual_seed(0)
    score = ch.Bilinear(4, 6)
    base = score.W.detach().clone()
    del score.W
    score.A, score.B = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 6))
    score.W = base
    score.register_forward_pre_hook(lambda module, args: setattr(module, "W", base + module.A @ module.B))
    query, key, value = inputs()
    expected = torch.softmax(bilinear(base + score.A @ score.B, query, key), -1) @ value
    found = ch.attention(query, key, value, score=score)
    torch.testing.assert_close(found, expected)
    parts = [score.A, score.B]
    for one, other in zip(
        torch.autograd.grad(found.sum(), parts), torch.autograd.grad(expected.sum(), parts), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("reentrant", [True, False])
def test_hooks_under_a_checkpoint(reentrant):
    module, options, plain = pair("bilinear", "weight_norm")
    query, key, value = inputs()
    again = torch.utils.checkpoint.checkpoint(
        lambda *given: ch.attention(*given, **options), query.requires_grad_(), key, value, use_reentrant=reentrant
    )
    again.sum().backward()
    plain(query, key, value).sum().backward()
    torch.testing.assert_close(module.W_v.grad, plain.W_v.grad, rtol=1e-3, atol=1e-5)


def test_hooks_in_compiled_code():
    module, options, plain = pair("bilinear", "weight_norm")
    compiled = torch.compile(lambda *given: ch.attention(*given, **options), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(*inputs()), plain(*inputs()))
        with torch.no_grad():
            for each in (module, plain):
                each.W_g.mul_(1.5)
    found, expected = compiled(*inputs()), plain(*inputs())
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(module.W_v.grad, plain.W_v.grad, rtol=1e-3, atol=1e-5)
