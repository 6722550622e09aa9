"""Watching a model that runs in several threads, and one that hands its work to them."""

import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from beside import while_another_compiles

import clearhead as ch
from clearhead.models.interception import intercept

transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")

IDS = torch.randint(3, 100, (6, 9), generator=torch.Generator().manual_seed(0))
SMALL = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


class Direct(torch.nn.Module):
    """Calls SDPA itself, and takes its time, so that the threads meet."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x):
        x = self.inner(x)
        time.sleep(0.002)
        return F.scaled_dot_product_attention(x, x, x)


class Attending(torch.nn.Module):
    """Calls attention in a module inside it."""

    def __init__(self, attend, inside=True):
        super().__init__()
        self.attend, self.inner = attend, Attending(attend, False) if inside else None

    def forward(self, x):
        return self.inner(x) if self.inner else self.attend(x, x, x)


def run(work, count=6):
    """`work(i)` in threads of their own, all at once."""
    barrier, found = threading.Barrier(count), [None] * count

    def one(i):
        with torch.inference_mode():
            barrier.wait(10)
            found[i] = work(i)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_every_call_of_a_model_of_transformers_is_recorded():
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SMALL, num_hidden_layers=10)).eval()
    mask = torch.ones_like(IDS)
    mask[:, 7:] = 0
    inputs = [{"input_ids": IDS[i : i + 1], "attention_mask": mask[i : i + 1].clone()} for i in range(6)]
    with torch.inference_mode():
        plain = [model(**one)[0] for one in inputs]
    with ch.watch(model) as seen:
        found = run(lambda i: model(**inputs[i])[0])
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert len(seen.calls) == 60 and all(len(seen[name]) == 6 for name in seen.names)


def test_direct_calls_in_threads_are_recorded_under_their_module():
    torch.manual_seed(0)
    model = torch.nn.Sequential(Direct(), Direct())
    inputs = torch.randn(6, 1, 2, 5, 8)
    with torch.no_grad():
        plain = [model(x) for x in inputs]
        with ch.watch(model) as seen:
            found = run(lambda i: model(inputs[i]))
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert len(seen["0"]) == len(seen["1"]) == 6


def test_the_fast_path_stays_in_place_in_a_thread_and_under_two_watches():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    model = torch.nn.Sequential(layer)
    x = torch.randn(2, 5, 16)
    with torch.inference_mode():
        plain = model(x)
    with ch.watch(model) as outer, ch.watch(layer) as inner:
        (found,) = run(lambda i: model(x), 1)
    assert torch.equal(plain, found)
    for seen in (outer, inner):
        assert [call.backend for call in seen.calls] == ["_transformer_encoder_layer_fwd"]


class Pooled(torch.nn.Module):
    """Its forward hands attention to threads that run no module."""

    def __init__(self, own):
        super().__init__()
        self.own = own

    def forward(self, x):
        with ThreadPoolExecutor(2) as pool:
            done = list(pool.map(lambda one: F.scaled_dot_product_attention(one, one, one), x))
        if self.own:
            done[0] = F.scaled_dot_product_attention(x[0], x[0], x[0])
        return torch.stack(done)


def test_calls_that_no_module_can_be_found_for_are_counted():
    x = torch.randn(3, 1, 2, 5, 8)
    model, said = Pooled(own=True), "3 calls of scaled_dot_product_attention are not in the record"
    with pytest.warns(UserWarning, match=said) as warned, ch.watch(model) as seen:
        model(x)
    assert len(seen.calls) == 1 and warned[0].filename == __file__
    model = Pooled(own=False)
    with pytest.raises(ch.ClearheadError, match=rf"no attention call(.|\n)*{said}"), ch.watch(model):
        model(x)


@pytest.mark.parametrize("attend", [F.scaled_dot_product_attention, ch.attention])
def test_a_thread_that_runs_the_model_while_another_compiles(attend):
    model, x = Attending(attend), torch.randn(1, 2, 5, 8)
    plain = model(x)
    with ch.watch(model) as seen:
        found = while_another_compiles(lambda: model(x))
    assert torch.equal(plain, found) and [call.name for call in seen.calls] == ["inner"]


def test_a_watch_that_begins_or_ends_while_another_thread_compiles():
    """Tracing, PyTorch puts a function of its own in place of `nn.Module.__call__`, for all threads."""
    before = torch.nn.Module.__call__, torch.nn.Module._call_impl
    model, x, watch = Attending(ch.attention), torch.randn(1, 2, 5, 8), ExitStack()
    seen = while_another_compiles(lambda: watch.enter_context(ch.watch(model)))
    model(x)
    while_another_compiles(watch.close)
    assert len(seen.calls) == 1 and before == (torch.nn.Module.__call__, torch.nn.Module._call_impl)


def test_another_model_in_another_thread_is_not_counted():
    watched, other = Direct(), Direct()
    x = torch.randn(1, 2, 5, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ch.watch(watched) as seen:
            run(lambda i: (watched if i % 2 else other)(x))
    assert len(seen.calls) == 3


def side_by_side(module, work):
    """`work(i)` in two threads, which wait for each other at each call of the module."""
    barrier = threading.Barrier(2)

    def meet(*_):
        barrier.wait(10)

    meeting = module.register_forward_pre_hook(meet)
    try:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(work, range(2)))
    finally:
        meeting.remove()


def test_layers_that_share_a_module_are_counted_in_each_thread():
    torch.manual_seed(0)
    model = transformers.AlbertModel(transformers.AlbertConfig(**SMALL, embedding_size=16, num_hidden_layers=3)).eval()
    shared, edit = model.encoder.albert_layer_groups[0].albert_layers[0].attention, ch.edits.ScaleHeads(1, heads=[0, 2])

    def outputs(i):
        with torch.no_grad():
            return model(input_ids=IDS[i : i + 1])[0]

    with ch.edit(model, edit):
        plain = [outputs(i) for i in range(2)]
    with ch.edit(model, edit):
        found = side_by_side(shared, outputs)
    with ch.watch(model) as seen:
        side_by_side(shared, outputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    for run_of_model in range(2):
        assert [str(call.layer) for call in seen.calls if call.run == run_of_model] == ["L0", "L1", "L2"]


@pytest.mark.parametrize("generates", [True, False])
def test_encoders_that_several_threads_call_by_themselves(generates):
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    model = transformers.T5ForConditionalGeneration(config).eval()
    settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "decoder_start_token_id": 0}

    def outputs(i):
        with torch.no_grad():
            if not generates:
                return model.encoder(input_ids=IDS[i : i + 1])[0]
            found = model.generate(IDS[i : i + 1], **settings, output_scores=True, return_dict_in_generate=True)
            return torch.stack(found.scores)

    edit = ch.edits.ScaleHeads("encoder 0", heads=[0, 2])
    with ch.edit(model, edit):
        plain = [outputs(i) for i in range(2)]
    with ch.edit(model, edit):
        found = side_by_side(model.encoder.block[0], outputs)
    with ch.watch(model) as seen:
        side_by_side(model.encoder.block[0], outputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    encoders = [call for call in seen.calls if call.name.startswith("encoder")]
    assert sorted(str(call.layer) for call in encoders) == ["encoder 0", "encoder 0", "encoder 1", "encoder 1"]
    assert len({call.run for call in encoders}) == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_an_edited_model_in_several_threads(reentrant):
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SMALL, num_hidden_layers=2))
    for part in model.modules():  # in training, without dropout
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        part.dropout_prob = 0.0
    model.train().activation_checkpointing_enable({"use_reentrant": reentrant})
    vectors = torch.randn(2, 1, 9, 32)

    def gradient(i):
        x = vectors[i].clone().requires_grad_()
        model(inputs_embeds=x)[0].square().sum().backward()
        return x.grad

    edit = ch.edits.ScaleHeads(1, heads=[0, 2])
    with ch.edit(model, edit):
        plain = [gradient(i) for i in range(2)]
    with ch.edit(model, edit):
        found = side_by_side(model.encoder.layer[1], gradient)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


class Waiting(ch.Dot):
    """Dot products of a call that waits while it is checked."""

    def __init__(self):
        super().__init__()
        self.met, self.goes_on = threading.Event(), threading.Event()

    def check(self, query, key):
        self.met.set()
        self.goes_on.wait(10)
        super().check(query, key)


def test_a_watch_that_begins_while_another_thread_is_in_a_call(monkeypatch):
    score, x = Waiting(), torch.randn(1, 2, 5, 8)
    model = Attending(lambda *given: ch.attention(*given, score=score))
    entered = intercept.intercept_own

    def intercept_own(*given):
        thread.start()  # the model's modules are seen already, and clearhead's attention is not
        score.met.wait(10)
        return entered(*given)

    found = []
    thread = threading.Thread(target=lambda: found.append(model(x)))
    monkeypatch.setattr(intercept, "intercept_own", intercept_own)
    with ch.watch(model) as seen:
        score.goes_on.set()
        thread.join()
        model(x)
    assert torch.equal(found[0], ch.attention(x, x, x)) and len(seen.calls) == 1


@pytest.mark.parametrize("attend", [F.scaled_dot_product_attention, ch.attention])
@pytest.mark.parametrize("edited", [False, True])
def test_a_watch_that_ends_while_another_thread_is_in_the_model(attend, edited):
    """The modules that still run there are seen no more: their calls would be those of the wrong module."""
    begun, ended, found = threading.Event(), threading.Event(), []

    class Second(Attending):
        def forward(self, x):
            begun.set()
            ended.wait(10)
            return super().forward(x + 1)

    model, x = torch.nn.Sequential(Attending(attend), Second(attend)), torch.randn(1, 2, 5, 8)
    thread = threading.Thread(target=lambda: found.append(model(x)))
    manager = ch.edit(model, ch.edits.Ablate()) if edited else ch.watch(model)
    with manager as seen:
        thread.start()
        begun.wait(10)
    ended.set()
    thread.join()
    half = 1 + (torch.zeros_like(x) if edited else attend(x, x, x))
    assert torch.allclose(found[0], attend(half, half, half), atol=1e-6)
    assert edited or [str(call.layer) for call in seen.calls] == ["L0"]
