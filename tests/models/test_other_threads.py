"""Functions that run a model themselves look at the calls of their own thread: another may run the model meanwhile."""

import contextlib
import string
import threading

import pytest
import torch

import clearhead as ch

transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")

IDS, OTHERS = torch.tensor([[3, 1, 4, 1, 5, 9]]), torch.tensor([[2, 7, 1, 8, 2, 8, 1, 8], [1, 6, 1, 8, 0, 3, 3, 9]])
INPUTS, METRIC = {"input_ids": IDS}, ch.models.logit_difference(token=7, against=3)


def llama():
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config).eval()


def in_a_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(60)
    assert found, "the other thread failed"
    return found[0]


@contextlib.contextmanager
def beside(model, ids):
    """Each time this thread comes to the second layer, another one runs the whole model, whose logits stay the same."""
    own, wanted, met = threading.get_ident(), model(ids).logits.detach(), []

    def other(module, args):
        if threading.get_ident() == own:
            found = in_a_thread(lambda: model(ids).logits.detach())
            met.append(torch.equal(found, wanted))

    handle = model.model.layers[1].register_forward_pre_hook(other)
    try:
        yield
    finally:
        handle.remove()
    assert met and all(met)


def letters(texts, **options):
    return {"input_ids": [[string.printable.index(c) for c in text] for text in texts]}


def surveyed(model):
    keep = ["first", "weighted transformed norm"]
    return list(ch.models.survey(model, ["a pump", "water and water"], letters, keep=keep).table())


def attributed(model):
    found = ch.models.logit_attribution(model, INPUTS, 7)
    return {**found.others, "heads": found.values}


def ablated(layer, head):
    return ch.edits.Ablate(layer, head)


RUNS = {
    "survey": surveyed,
    "sweep": lambda model: list(ch.models.sweep(model, ablated, INPUTS, METRIC)),
    "several cells at once": lambda model: list(ch.models.sweep(model, ablated, INPUTS, METRIC, batch=4)),
    "attribution_patching": lambda model: list(ch.models.attribution_patching(model, ablated, INPUTS, METRIC, exact=1)),
    "logit_attribution": attributed,
    "audit": lambda model: ch.audit(model, INPUTS, ch.Causal()),
    "circuits": lambda model: ch.models.circuits(model, INPUTS).qk(1, 2).dense(),
}


@pytest.mark.parametrize("name", RUNS)
def test_calls_that_another_thread_makes_meanwhile_are_left_alone(name):
    model = llama()
    alone = RUNS[name](model)
    with beside(model, OTHERS):
        found = RUNS[name](model)
    assert str(found) == str(alone)  # as text, in which NaN is NaN


def test_an_audit_is_of_its_own_run():
    model = llama()
    with beside(model, OTHERS):
        ch.audit(model, INPUTS, lambda call: {IDS.shape[1]: ch.Causal()}[call.shape[3]])


class Handing(torch.nn.Module):
    """A model that hands its second block to another thread."""

    def __init__(self):
        super().__init__()
        self.first, self.second = ch.nn.DotProductAttention(), ch.nn.DotProductAttention()

    def forward(self, x):
        x = self.first(x, x, x)
        return in_a_thread(lambda: self.second(x, x, x))


def test_modules_that_a_model_hands_to_another_thread_are_told_of():
    model, x = Handing(), torch.rand(1, 1, 4, 8)
    with pytest.warns(UserWarning, match="the calls of 'second' are left out: other threads made them"):
        ch.audit(model, x[0], None, level="outputs")
    with ch.watch(model) as seen:  # a watch is of every thread
        model(x)
    assert seen.names == ["first", "second"]
