"""statistics(…, fuse=True): the output from the pass of the statistics."""

import os

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead.base.torch_state.torch_private import OWN_SDPA

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import GROUPED, SIZES, T5, made  # noqa: E402

IDS = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))
LEFT = torch.tensor([[1] * 12, [0] * 4 + [1] * 8])
KEEP = [ch.reductions.Entropy(), ch.reductions.TopK(3), ch.reductions.Received(), ch.reductions.SinkShare()]
MODELS = {
    "Llama": (SIZES | GROUPED, {"input_ids": IDS}),
    "Bert": (SIZES, {"input_ids": IDS}),
    "Gemma3Text": (
        SIZES | GROUPED | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        {"input_ids": IDS},
    ),
    "T5": (T5, {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}),
}


class Counted(torch.overrides.TorchFunctionMode):
    """How often SDPA itself runs."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += func is OWN_SDPA
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_near_and_statistics_the_same(name, dtype):
    options, inputs = MODELS[name]
    model = made(name, **options).to(dtype)
    with torch.no_grad():
        plain = model(**inputs).last_hidden_state
        with ch.models.statistics(model, KEEP) as seen:
            model(**inputs)
        with Counted() as counted, ch.models.statistics(model, KEEP, fuse=True) as fused:
            output = model(**inputs).last_hidden_state
        with Counted() as plainly:
            model(**inputs)
    assert counted.calls == 0 < plainly.calls  # the backend did not run
    near = {"rtol": 0.0, "atol": 1e-5 if dtype == torch.float32 else 0.1}
    assert output.dtype == dtype
    torch.testing.assert_close(output, plain, **near)
    assert [call.name for call in fused.calls] == [call.name for call in seen.calls]
    for one, other in zip(fused.calls[:1], seen.calls[:1], strict=True):  # of the same query and key
        assert len(one.results) == len(KEEP)
        torch.testing.assert_close(one.results, other.results)
        torch.testing.assert_close(one.means, other.means)


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (3, 5, 4), (5, 4), (2, 2, 3, 5, 4)])
def test_direct_calls_of_any_shape(shape):
    class Direct(torch.nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    x, model = torch.randn(shape, generator=torch.Generator().manual_seed(0)), Direct()
    with torch.no_grad(), ch.models.statistics(model, KEEP, fuse=True):
        output = model(x)
    torch.testing.assert_close(output, model(x), rtol=0.0, atol=1e-6)


def test_queries_of_one_batch_for_keys_of_another():
    class Shared(torch.nn.Module):
        def forward(self, x, y):
            return F.scaled_dot_product_attention(x, y, y)

    x, y, model = torch.randn(1, 3, 5, 4), torch.randn(2, 3, 6, 4), Shared()
    with torch.no_grad(), ch.models.statistics(model, KEEP, fuse=True):
        output = model(x, y)
    torch.testing.assert_close(output, model(x, y), rtol=0.0, atol=1e-6)
    with ch.watch(model, values=True) as seen:
        output = model(x, y)
    assert torch.equal(output, seen[0].output)


def test_what_cannot_come_from_the_same_pass_stays_to_the_bit():
    model = made("Llama", **SIZES, **GROUPED)
    eager = made("Llama", **SIZES, **GROUPED, attn_implementation="eager")
    torch.manual_seed(0)
    torchs = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 5, 16)

    def run(context):
        with torch.no_grad(), context(model):
            padded = model(IDS, attention_mask=LEFT).last_hidden_state
        with context(model):
            followed = model(IDS).last_hidden_state
        with torch.no_grad(), context(eager):
            with_weights = eager(IDS, output_attentions=True)
        with torch.no_grad(), context(model), torch.autocast("cpu", torch.bfloat16):
            cast = model(IDS).last_hidden_state
        with context(torchs):
            own = torchs(x, x, x)[0]
        followed.sum().backward()
        return [padded, followed, with_weights.last_hidden_state, *with_weights.attentions, cast, own]

    plain = run(lambda model: torch.autograd.set_grad_enabled(torch.is_grad_enabled()))
    fused = run(lambda model: ch.models.statistics(model, KEEP, fuse=True))
    assert all(map(torch.equal, plain, fused))


def test_bad_input():
    model = torch.nn.MultiheadAttention(16, 4)
    for options in ({"fuse": True, "heads": 1}, {"fuse": 1}):
        with pytest.raises(ch.ClearheadError, match="statistics: fuse is"):
            ch.models.statistics(model, KEEP, **options)


def test_nothing_is_fused_where_something_else_looks_at_the_model():
    """Else an edit would be left out, and another watch would miss calls."""
    model = made("Llama", **SIZES, **GROUPED)
    scale = ch.edits.ScaleHeads(heads=[1, 3])
    with torch.no_grad():
        plain = model(IDS).last_hidden_state
        with ch.edit(model, scale):
            wanted = model(IDS).last_hidden_state
        with ch.edit(model, scale), ch.models.statistics(model, KEEP, fuse=True, layers=1):
            edited = model(IDS).last_hidden_state
        with ch.watch(model) as seen, ch.models.statistics(model, KEEP, fuse=True):
            assert torch.equal(model(IDS).last_hidden_state, plain)
        with ch.models.lazy_attentions(model), ch.models.statistics(model, KEEP, fuse=True):
            attentions = model(IDS, output_attentions=True).attentions
    assert torch.equal(edited, wanted)
    assert len(seen.calls) == len(attentions) == 2


def test_a_backend_of_ones_own_runs():
    from transformers import AttentionInterface, AttentionMaskInterface

    sdpa = AttentionInterface._global_mapping["sdpa"]

    def more(*args, **kwargs):
        output, weights = sdpa(*args, **kwargs)
        return output * 1.5, weights

    AttentionInterface.register("more", more)
    AttentionMaskInterface.register("more", AttentionMaskInterface._global_mapping["sdpa"])
    model = made("Llama", **SIZES, **GROUPED, attn_implementation="more")
    with torch.no_grad():
        plain = model(IDS).last_hidden_state
        with pytest.warns(UserWarning, match="times its rounding"), ch.models.statistics(model, KEEP, fuse=True):
            assert torch.equal(model(IDS).last_hidden_state, plain)
