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
