"""Gradients of what is computed from lazy attentions, against those of eager ones."""

import os
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import clearhead as ch

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import MODELS, OWN_EAGER, flat, inputs_of, own_attentions, pair


def run(name, **options):
    """The outputs of the lazy model and of the eager one, and both models."""
    fast, slow = pair(name, {**MODELS, **OWN_EAGER}[name])
    if name in OWN_EAGER:
        ch.models.run_on_clearhead(fast)
    for model in (fast, slow):
        model.train(options.get("checkpoints") is not None)
        if model.training:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # later versions have another name for it
                model.activation_checkpointing_enable({"use_reentrant": options["checkpoints"]})
    with ch.models.lazy_attentions(fast):
        lazy = fast(**inputs_of(name), output_attentions=True)
    return lazy, slow(**inputs_of(name), output_attentions=True), fast, slow


def check_gradients(fast, slow, least=0.1):
    """Within 2e-5 of the largest: some, such as a key's bias, are 0 but for the rounding of larger numbers."""
    pairs = [
        (name, *(torch.zeros_like(p) if p.grad is None else p.grad for p in (one, other)))
        for (name, one), other in zip(fast.named_parameters(), slow.parameters(), strict=True)
    ]
    largest = max(float(want.abs().max()) for _, _, want in pairs)
    assert largest > least, "no gradient to compare"
    for name, got, want in pairs:
        worst = float((got - want).abs().max())
        assert worst <= 2e-5 * largest, f"{name}: {worst} of {largest}"


def whole(output):
    return sum((a - a.mean().detach()).pow(2).sum() for a in flat(output)) + output[0].pow(2).mean()


def parts(output):
    found = 0.0
    for a in flat(output):
        found = found + (a[0, 1, 2] * torch.arange(a.shape[-1])).sum() + a[:, 2].pow(2).sum() + a[1][0][1:, :3].sum()
        found = found + (a @ torch.ones(2, a.shape[1], a.shape[-1], 3).cumsum(2)).pow(2).sum()
    return found


@pytest.mark.parametrize("loss", [whole, parts])
@pytest.mark.parametrize("name", ["Bert", "Llama", "T5", "Gemma3Text", "GptOss", "Gemma2"])
def test_every_parameter_has_its_gradient(name, loss):
    # T5's position bias and the sinks of GptOss are learned too
    lazy, eager, fast, slow = run(name)
    assert all(isinstance(a, ch.models.LazyAttention) and a.requires_grad and not a.is_leaf for a in flat(lazy))
    loss(lazy).backward()
    loss(eager).backward()
    check_gradients(fast, slow)


class Square(torch.autograd.Function):
    """Its operations are below PyTorch's functions."""

    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a.pow(2).sum()

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def below(attention):
    with torch._C.DisableTorchFunctionSubclass():
        return attention.select(1, 2).transpose(0, 2).pow(3).sum()


WAYS = {
    "a function": Square.apply,
    "below": below,
    "a checkpoint": lambda a: checkpoint(lambda t: t.pow(3).sum(), a, use_reentrant=False),
    "a reentrant checkpoint": lambda a: checkpoint(lambda t: t.pow(3).sum(), a, use_reentrant=True),
    "of a part": lambda a: Square.apply(a[:, 1]) + Square.apply(a[0]),
    "of float64": lambda a: a.double().pow(2).sum() + Square.apply(a.double()),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_that_do_not_ask_the_tensor(way):
    lazy, eager, fast, slow = run("Llama")
    WAYS[way](lazy.attentions[1]).backward()
    WAYS[way](eager.attentions[1]).backward()
    check_gradients(fast, slow)


@pytest.mark.parametrize("reentrant", [False, True])
def test_models_with_checkpoints(reentrant):
    lazy, eager, fast, slow = run("Llama", checkpoints=reentrant)
    whole(lazy).backward()
    whole(eager).backward()
    check_gradients(fast, slow)


@pytest.mark.parametrize("way", ["whole", "below"])
def test_second_derivatives(way):
    lazy, eager, fast, slow = run("Llama")
    for output, model in ((lazy, fast), (eager, slow)):
        loss = output.attentions[1].pow(3).sum() if way == "whole" else below(output.attentions[1])
        (grad,) = torch.autograd.grad(loss, model.layers[0].mlp.down_proj.weight, create_graph=True)
        grad.pow(2).sum().backward()
    check_gradients(fast, slow)


def test_no_grad_and_detach_cut_the_graph():
    lazy, _, fast, _ = run("Llama")
    attention = lazy.attentions[1]
    with torch.no_grad():
        assert not attention.mean().requires_grad and not attention[0].requires_grad
    assert not attention.detach().requires_grad and not attention.detach().sum().requires_grad
    assert not attention.data[0, 1].sum().requires_grad
    attention.pow(2).sum().backward()  # looked at without a graph before, it has one still
    assert fast.layers[1].self_attn.q_proj.weight.grad.abs().max() > 0


def test_a_copy_of_ones_own_may_be_a_leaf():
    attention = run("Llama")[0].attentions[0].detach()
    dense, lazy = attention.dense().requires_grad_(), attention.requires_grad_()
    for one in (dense, lazy):
        (one[:, 1].pow(2).sum() + one.mean(1).pow(3).sum() + one.clone().sum()).backward()
    torch.testing.assert_close(lazy.grad, dense.grad)
    assert lazy.grad.abs().max() > 0 and lazy.dense().requires_grad


@pytest.mark.parametrize(
    "ask",
    [
        lambda output: output.attentions[0].retain_grad(),
        lambda output: output.attentions[0].register_hook(print),
        lambda output: torch.autograd.grad(output[0].sum(), output.attentions[0]),
        lambda output: torch.autograd.grad([output[0].sum()], inputs=[output.attentions[0]]),
    ],
    ids=["retain_grad", "a hook", "autograd.grad", "by name"],
)
def test_a_gradient_of_the_output_by_the_weights_is_an_error(ask):
    with pytest.raises(ch.UnsupportedError, match=r"not computed from them(.|\n)*call\.weights\.gradients"):
        ask(run("Llama")[0])


@pytest.mark.parametrize("name", ["T5", "GptOss"])
def test_the_weights_stay_what_they_were_when_the_model_is_trained(name):
    lazy, _, fast, _ = run(name)
    before = [a.dense().detach() for a in flat(lazy)]
    lazy[0].sum().backward()
    torch.optim.SGD(fast.parameters(), 1.0).step()
    for one, want in zip(flat(lazy), before, strict=True):
        torch.testing.assert_close(one.detach().dense(), want, atol=3e-6, rtol=0)


def test_queries_that_were_written_to_are_an_error():
    fast, _ = pair("Bert", MODELS["Bert"])
    queries = []
    hook = lambda module, inputs, output: queries.append(output)
    fast.encoder.layer[0].attention.self.query.register_forward_hook(hook)
    with torch.no_grad(), ch.models.lazy_attentions(fast):
        attentions = own_attentions(fast(**inputs_of("Bert"), output_attentions=True))["attentions"]
    attentions[1].dense()
    queries[0].zero_()
    with pytest.raises(ch.ClearheadError, match=r"the query of this attention call(.|\n)*modified in place"):
        attentions[0].dense()
