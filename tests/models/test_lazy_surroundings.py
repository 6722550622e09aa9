"""Lazy attentions where the caller's surroundings differ, and what is refused."""

import copy
import os
import threading

import pytest
import torch

import clearhead as ch
from clearhead.models.lazy_matrices.lazy_attention import DENSE

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import IDS, MODELS, SMALL, pair  # noqa: E402


def marks(module):
    return {name for name in module.__dict__ if name.startswith("_clearhead_")}


@pytest.fixture(scope="module")
def models():
    return pair("Llama", MODELS["Llama"])


def attentions(model, ids=IDS, **options):
    with torch.no_grad(), ch.models.lazy_attentions(model, **options):
        return model(ids, output_attentions=True).attentions


def check(lazy, slow, ids=IDS, atol=3e-6):
    with torch.no_grad():
        eager = slow(ids, output_attentions=True).attentions
    for one, want in zip(lazy, eager, strict=True):
        assert isinstance(one, ch.models.LazyAttention) and one.dtype == want.dtype
        torch.testing.assert_close(one.dense(), want, atol=atol, rtol=0)


def test_inference_mode(models):
    fast, slow = models
    with torch.inference_mode():
        lazy = attentions(fast)
    check(lazy, slow)
    assert (lazy[0] * torch.ones(1, requires_grad=True)).requires_grad
    with torch.inference_mode():
        check(lazy, slow)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(models, dtype):
    fast, slow = (copy.deepcopy(model).to(dtype) for model in models)
    lazy = attentions(fast)
    check(lazy, slow, atol=2e-2 if dtype is torch.bfloat16 else 3e-6)
    value = torch.ones(2, 4, 9, 3, dtype=dtype)
    assert (lazy[0] @ value).dtype == dtype and lazy[0].mean(1).dtype == dtype


def test_autocast(models):
    fast, slow = models
    with torch.autocast("cpu", torch.bfloat16):
        lazy = attentions(fast)
        check(lazy, slow, atol=3e-2)
        assert (lazy[0] @ torch.ones(2, 4, 9, 3)).dtype == torch.bfloat16  # as a dense one


@pytest.mark.parametrize("surroundings", ["dtype", "device", "function mode"])
def test_defaults_of_the_caller_change_nothing(models, surroundings):
    fast, slow = models
    if surroundings == "dtype":
        torch.set_default_dtype(torch.float64)
        try:
            lazy = attentions(fast)
            row, zeros = lazy[0][0, 3, 5], torch.zeros_like(lazy[0])
        finally:
            torch.set_default_dtype(torch.float32)
    else:
        with torch.device("meta") if surroundings == "device" else torch.overrides.BaseTorchFunctionMode():
            lazy = attentions(fast)
            row, zeros = lazy[0][0, 3, 5], torch.zeros_like(lazy[0])
    assert row.dtype == zeros.dtype == torch.float32 and str(row.device) == str(zeros.device) == "cpu"
    check(lazy, slow)


def test_copies_and_replicas_of_the_model(models):
    fast, slow = models
    with ch.models.lazy_attentions(fast), torch.no_grad():
        twin = copy.deepcopy(fast)
        lazy = twin(IDS, output_attentions=True).attentions
        replica = fast.layers[0].self_attn._replicate_for_data_parallel()
        assert marks(replica) == marks(fast.layers[0].self_attn) != set()
        parallel = torch.nn.DataParallel(fast)(IDS, output_attentions=True).attentions
    check(lazy, slow)
    check(parallel, slow)
    other, _ = pair("Bert", MODELS["Bert"])
    with ch.models.lazy_attentions(other), torch.no_grad():
        assert twin(IDS, output_attentions=True).attentions == ()  # that copy belonged to another `with`
    assert not any(map(marks, fast.modules()))


def test_threads(models):
    fast, slow = models
    texts = [torch.randint(3, 100, (2, length), generator=torch.Generator().manual_seed(0)) for length in range(5, 11)]
    outputs = {}

    def run(i):
        with torch.no_grad():
            outputs[i] = fast(texts[i], output_attentions=i % 2 == 0).attentions

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(texts))]
    with ch.models.lazy_attentions(fast):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for i, ids in enumerate(texts):
        if i % 2:
            assert outputs[i] is None
        else:
            check(outputs[i], slow, ids)


@pytest.mark.parametrize("first", ["lazy", "watch"])
def test_beside_a_watch(models, first):
    fast, slow = models
    with torch.no_grad():
        plain = fast(IDS)[0]
        if first == "lazy":
            with ch.models.lazy_attentions(fast), ch.watch(fast) as seen:
                output = fast(IDS, output_attentions=True)
        else:
            with ch.watch(fast) as seen, ch.models.lazy_attentions(fast):
                output = fast(IDS, output_attentions=True)
    assert torch.equal(output[0], plain) and len(seen.calls) == 2
    check(output.attentions, slow)
    for call, one in zip(seen.calls, output.attentions, strict=True):
        assert call.backend == "sdpa" and call.mask.title() == "Causal()"
        torch.testing.assert_close(call.weights.dense(), one.dense(), atol=0, rtol=0)


def test_watches_around_eager_ones_know_that_they_are_eager(models):
    _, slow = models
    with torch.no_grad(), ch.watch(slow) as seen, ch.models.lazy_attentions(slow), ch.watch(slow) as again:
        own = slow(IDS, output_attentions=True).attentions
    assert type(own[0]) is torch.Tensor
    assert seen.calls[0].backend == again.calls[0].backend == "eager"


def test_an_exception_leaves_nothing(models):
    fast, _ = models
    before = transformers.AttentionInterface.get_interface
    with pytest.raises(KeyError), ch.models.lazy_attentions(fast):
        raise KeyError
    assert transformers.AttentionInterface.get_interface is before
    assert not any(map(marks, fast.modules()))


def test_compiled_consumers(models):
    fast, slow = models
    got = torch.compile(lambda attention: attention.mean(1), backend="eager")(attentions(fast)[0])
    with torch.no_grad():
        torch.testing.assert_close(got, slow(IDS, output_attentions=True).attentions[0].mean(1), atol=3e-6, rtol=0)


# ------------------------------------------------------------------------------------------------ the bytes


def test_one_budget_for_all(models):
    fast, _ = models
    one = 2 * 4 * 9 * 9 * 4
    lazy = attentions(fast, max_bytes=DENSE.standing + 2 * one - 1)
    with pytest.raises(ch.ClearheadError, match=r"\(2, 4, 9, 9\)(.|\n)*stand already(.|\n)*attention\[0, 0, -1\]"):
        torch.stack(lazy)
    standing = DENSE.standing
    held = lazy[0].dense().squeeze()[0]  # a view holds the memory of all
    assert DENSE.standing == standing + one
    with pytest.raises(ch.ClearheadError, match="above max_bytes"):
        lazy[1].mean(1)
    assert lazy[1][0, 3].shape == (9, 9) and lazy[1].weights.entropy().shape == (2, 4, 9)
    assert (lazy[1] @ torch.ones(2, 4, 9, 2)).shape == (2, 4, 9, 2)
    del held
    assert lazy[1].mean(1).shape == (2, 9, 9) and DENSE.standing == standing


def test_a_failure_gives_its_bytes_back(models):
    lazy = attentions(models[0])[0]
    standing = DENSE.standing
    with pytest.raises(IndexError):
        lazy[0, 0, 99]
    assert DENSE.standing == standing


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "write",
    [
        lambda a: a.__setitem__((0, 0), 0),
        lambda a: a.mul_(2),
        lambda a: a.__iadd__(1),
        lambda a: torch.relu_(a),
        lambda a: torch.nn.init.zeros_(a),
        lambda a: torch._foreach_mul_([a], 2),
        lambda a: torch.add(a, 1, out=a),
        lambda a: torch.max(a, 1, out=(torch.empty(0), a)),
        lambda a: setattr(a, "data", torch.ones(1)),
        lambda a: a.share_memory_(),
        lambda a: a[0].zero_(),
    ],
)
@pytest.mark.parametrize("way", ["asked", "below"])
def test_writes_are_refused(models, write, way):
    lazy = attentions(models[0])[0]
    before = lazy.dense()
    if way == "asked":
        with pytest.raises(ch.UnsupportedError, match="read-only"):
            write(lazy)
    else:
        with torch._C.DisableTorchFunctionSubclass(), pytest.raises((ch.UnsupportedError, RuntimeError)):
            lazy.mul_(2)
    assert torch.equal(lazy.dense(), before)


def test_what_it_cannot_be_made_of():
    with pytest.raises(ch.ClearheadError, match="made by a model inside"):
        ch.models.LazyAttention(torch.ones(2, 2))
    with pytest.raises(ch.ClearheadError, match="got a int"):
        ch.models.lazy_attentions(3)
    with pytest.raises(ch.ClearheadError, match="holds no model"):
        ch.models.lazy_attentions(torch.nn.Linear(2, 2))
    model = transformers.DebertaV2Model(transformers.DebertaV2Config(**SMALL))
    with pytest.raises(ch.ClearheadError, match=r"DebertaV2Model holds no model(.|\n)*ch\.watch"):
        ch.models.lazy_attentions(model)


@pytest.mark.parametrize("most", [-1, 1.5, "1 GB", True])
def test_wrong_max_bytes(models, most):
    with pytest.raises(ch.ClearheadError, match="max_bytes"):
        ch.models.lazy_attentions(models[0], max_bytes=most)


def test_compiled_models(models):
    compiled = torch.compile(models[0], backend="eager")
    with pytest.raises(ch.UnsupportedError, match=r"lazy_attentions\(model\._orig_mod\)"):
        ch.models.lazy_attentions(compiled)


def test_dropout_in_training():
    model, _ = pair("Bert", MODELS["Bert"])
    model.train()
    with ch.models.lazy_attentions(model):
        assert model(IDS).attentions is None
        with pytest.warns(UserWarning, match=r"with dropout 0\.1(.|\n)*model\.eval\(\)"):
            assert not any(one is not None for one in model(IDS, output_attentions=True).attentions or ())
    model.config.attention_probs_dropout_prob = 0.0
    for layer in model.encoder.layer:
        layer.attention.self.dropout.p = 0.0
    with ch.models.lazy_attentions(model):
        assert isinstance(model(IDS, output_attentions=True).attentions[0], ch.models.LazyAttention)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_and_tensors_without_values(models):
    fast, _ = models
    ask = lambda ids: fast(ids[None], output_attentions=True).last_hidden_state
    with ch.models.lazy_attentions(fast), torch.no_grad(), pytest.warns(UserWarning, match=r"torch\.func"):
        torch.func.vmap(ask)(IDS)
    meta = copy.deepcopy(fast).to("meta")
    with ch.models.lazy_attentions(meta), pytest.warns(UserWarning, match="no values"):
        assert not any(one is not None for one in meta(IDS.to("meta"), output_attentions=True).attentions or ())
