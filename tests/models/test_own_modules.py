"""Modules people write themselves: SDPA called in their own ways, layers shared, checkpointed or compiled."""

import copy
import gc
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drawn import draw
from torch import nn
from torch.utils.checkpoint import checkpoint

import clearhead as ch


class CausalSelfAttention(nn.Module):
    """As in nanoGPT: one projection, then SDPA with the causal flag."""

    def __init__(self, width=16, heads=4, causal=True):
        super().__init__()
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.causal, self.options = heads, causal, {}

    def split(self, x):
        # (B, L, 3·E) to 3 of (B, H, L, E / H)
        return (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))

    def forward(self, x):
        q, k, v = self.split(x)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, **self.options)
        return self.project(y.transpose(1, 2).flatten(2))

    def own(self, x):
        q, k, _ = self.split(x)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        return scores.softmax(-1)


class Block(nn.Module):
    """As in timm's vision transformers, or nanoGPT: norms before, a residual around."""

    def __init__(self, causal):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(16), CausalSelfAttention(causal=causal)

    def forward(self, x):
        return x + self.attn(self.norm(x))


@pytest.mark.parametrize("causal", [True, False], ids=["nanoGPT", "timm"])
def test_blocks_with_a_fused_projection(causal):
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(causal), Block(causal)), draw(2, 7, 16)
    plain = model(x)
    with ch.watch(model) as seen:
        watched = model(x)
    assert torch.equal(plain, watched) and seen.names == ["0.attn", "1.attn"]
    for block, call in zip(model, seen.calls, strict=True):
        torch.testing.assert_close(call.weights.dense(), block.attn.own(block.norm(x)), atol=1e-5, rtol=0)
        x = block(x)


def test_a_layer_called_several_times_has_several_records():
    torch.manual_seed(0)
    block, x = Block(True), draw(2, 7, 16)
    model = nn.Sequential(block, block, block)
    with ch.watch(model) as seen:
        model(x)
    assert seen.names == ["0.attn"] and len(seen["0.attn"]) == 3
    for call in seen["0.attn"]:
        torch.testing.assert_close(call.weights.dense(), block.attn.own(block.norm(x)), atol=1e-5, rtol=0)
        x = block(x)


class Raw(nn.Module):
    def forward(self, *inputs, **options):
        return F.scaled_dot_product_attention(*inputs, **options)


SHAPES = {
    "two dimensions": ((5, 8), (6, 8), (5, 6)),
    "three": ((3, 5, 8), (3, 6, 8), (3, 5, 6)),
    "three, one mask": ((3, 5, 8), (3, 6, 8), (5, 6)),
    "four": ((2, 3, 5, 8), (2, 3, 6, 8), (2, 1, 5, 6)),
    "four, a mask a head": ((2, 3, 5, 8), (2, 3, 6, 8), (3, 5, 6)),
    "four, one column": ((2, 3, 5, 8), (2, 3, 6, 8), (2, 1, 5, 1)),
    "keys for all of a batch": ((2, 3, 5, 8), (1, 3, 6, 8), (5, 6)),
    "five": ((2, 2, 3, 5, 8), (2, 2, 3, 6, 8), (2, 2, 1, 5, 6)),
    "five, one mask": ((2, 2, 3, 5, 8), (1, 2, 3, 6, 8), (5, 6)),
}


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shapes", SHAPES)
def test_sdpa_of_any_shape(shapes, kind):
    query, key, mask = SHAPES[shapes]
    mask = draw(*mask, seed=2)
    mask = mask > -0.5 if kind == "bool" else mask
    q, k, v = draw(*query), draw(*key, seed=1), torch.eye(6).expand(*key[:-1], 6)
    model = Raw()
    want = model(q, k, v, attn_mask=mask)  # values of one in each place: the output is the weights
    with ch.watch(model) as seen:
        assert torch.equal(model(q, k, v, attn_mask=mask), want)
    (call,) = seen.calls
    assert call.query.ndim == 4
    torch.testing.assert_close(call.weights.dense().reshape(want.shape), want, atol=1e-5, rtol=0)
    assert seen.layers()[0].query.shape[-2:] == (5, 8)


def test_grouped_heads_and_scale():
    q, k, v = draw(2, 4, 5, 8), draw(2, 2, 6, 8, seed=1), torch.eye(6).expand(2, 2, 6, 6)
    options = {"enable_gqa": True, "scale": 0.7}
    with ch.watch(model := Raw()) as seen:
        want = model(q, k, v, **options)
    assert seen.calls[0].key.shape == (2, 2, 6, 8)
    torch.testing.assert_close(seen.calls[0].weights.dense(), want, atol=1e-5, rtol=0)


def test_autocast_of_two_dtypes():
    q, k = draw(2, 4, 5, 8), draw(2, 4, 6, 8, seed=1).bfloat16()
    with torch.autocast("cpu", torch.bfloat16), ch.watch(model := Raw()) as seen:
        model(q, k, k)
    torch.testing.assert_close(seen.calls[0].weights.dense(), (q @ k.float().mT / 8**0.5).softmax(-1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_ones_own_are_left_out():
    rows = torch.nested.nested_tensor([draw(3, 2, 8), draw(5, 2, 8)], layout=torch.jagged).transpose(1, 2)
    with pytest.warns(UserWarning, match="nested tensors"), ch.watch(model := Raw()):
        model(rows, rows, rows)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block(True)

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


@pytest.mark.filterwarnings("ignore:.*use_reentrant")
def test_gradient_checkpointing_does_not_record_a_call_again():
    transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=20, **sizes)).train()
    for reentrant in (False, True):
        llama.activation_checkpointing_enable({"use_reentrant": reentrant})
        with ch.watch(llama) as seen:
            llama(inputs_embeds=draw(1, 5, 32).requires_grad_())[0].sum().backward()
        assert len(seen.calls) == 2
    model = Checkpointed()
    with ch.watch(model) as seen:
        model(draw(2, 7, 16)).sum().backward()
    assert len(seen.calls) == 1


def test_a_mask_written_over_is_converted_again():
    model, x, mask = Raw(), draw(1, 1, 4, 8), torch.ones(4, 4, dtype=torch.bool)
    for inference in (False, True):
        with torch.inference_mode(inference), ch.watch(model) as seen:
            own = mask.clone()
            for size in (4, 3, 2):
                own[:, size:] = False
                model(x, x, x, attn_mask=own)
        assert [int((call.weights[0, 0, 0] > 0).sum()) for call in seen.calls] == [4, 3, 2]


def test_a_new_mask_at_the_place_of_an_old_one_is_converted():
    model, x, place = Raw(), draw(1, 1, 4, 8), np.ones((4, 4), dtype=bool)
    with ch.watch(model) as seen:
        for size in (4, 3, 2, 1):
            place[:, size:] = False
            model(x, x, x, attn_mask=torch.from_numpy(place))
    assert [int((call.weights[0, 0, 0] > 0).sum()) for call in seen.calls] == [4, 3, 2, 1]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_are_left_out():
    model = Block(True)
    with pytest.warns(UserWarning, match=r"inside a transform of torch\.func"), ch.watch(model):
        torch.func.vmap(model)(draw(3, 2, 7, 16))


def test_compiled_models_are_refused_with_what_to_do_instead():
    x = draw(2, 7, 16)
    compiled = torch.compile(Block(True), backend="eager")
    with pytest.raises(ch.UnsupportedError, match=r"the model is compiled(.|\n)*watch\(model\._orig_mod\)"):
        ch.watch(compiled).__enter__()
    with ch.watch(compiled._orig_mod) as seen:
        compiled._orig_mod(x)
    assert len(seen.calls) == 1
    inner = nn.Sequential(torch.compile(Block(True), backend="eager"))
    with pytest.raises(ch.UnsupportedError, match=r"Sequential\.0 is compiled"):
        ch.watch(inner).__enter__()
    in_place = nn.Sequential(Block(True))
    in_place[0].compile(backend="eager")
    with pytest.raises(ch.UnsupportedError, match=r"Sequential\.0 is compiled(.|\n)*copy\.deepcopy"):
        ch.watch(in_place).__enter__()
    with ch.watch(model := copy.deepcopy(in_place)) as seen:
        model(x)
    assert len(seen.calls) == 1
    forward = Block(True)
    forward.attn.forward = torch.compile(forward.attn.forward, backend="eager")
    with pytest.raises(ch.UnsupportedError, match=r"Block\.attn is compiled(.|\n)*del module\.forward"):
        ch.watch(forward).__enter__()


@pytest.mark.parametrize("before", [True, False])
def test_running_what_was_compiled_of_a_watched_model_is_recorded(before):
    class Root(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    model = Root()
    compiled, x = torch.compile(model, backend="eager"), draw(1, 1, 4, 8)
    if before:
        compiled(x)
    with ch.watch(model) as seen:
        assert torch.equal(compiled(x), model(x))
    assert [call.name for call in seen.calls] == ["Root", "Root"]


def state():
    """What watching touches."""
    from torch.overrides import _get_current_function_mode_stack

    hooks = torch.nn.modules.module
    return (
        nn.Module.__call__,
        nn.Module._call_impl,
        torch.overrides.has_torch_function,
        tuple(_get_current_function_mode_stack()),
        len(hooks._global_forward_hooks) + len(hooks._global_forward_pre_hooks),
    )


def test_nothing_is_left_behind_by_errors_wherever_they_come_from():
    before, model = state(), Block(True)
    model.attn.options = {"attn_mask": 3}  # SDPA refuses it, and so does the record
    with pytest.raises((TypeError, AttributeError, ch.ClearheadError)), ch.watch(model):
        model(draw(2, 7, 16))
    with pytest.raises(KeyboardInterrupt), ch.watch(model):
        raise KeyboardInterrupt
    with pytest.raises(ch.ClearheadError), ch.watch(model):
        pass
    assert state() == before and not model._forward_hooks and not model._forward_pre_hooks
    model.attn.options = {}
    with ch.watch(model) as seen:
        for wrong in (draw(2, 7, 15), draw(2, 7, 16)):  # a forward that fails leaves the names right
            try:
                model(wrong)
            except RuntimeError:
                continue
    assert seen.names == ["attn"] and state() == before


def test_watches_may_end_in_any_order():
    before, x = state(), draw(2, 7, 16)
    one, two = Block(True), Block(True)
    first, second = ch.watch(one), ch.watch(two)
    seen_one = first.__enter__()
    done, begun = threading.Event(), threading.Event()
    found = []

    def other():
        seen_two = second.__enter__()
        begun.set()
        done.wait(10)
        two(x), one(x)
        second.__exit__(None, None, None)
        found.append(seen_two)

    thread = threading.Thread(target=other)
    thread.start()
    assert begun.wait(10)
    one(x), two(x)
    first.__exit__(None, None, None)
    done.set()
    thread.join(10)
    # a watch sees its model in every thread: `two` ran in both while it was watched, `one` once before its watch ended
    assert len(seen_one.calls) == 1 and len(found[0].calls) == 2 and state() == before


def test_nested_watches_each_see_their_own_model():
    inner, x = Block(True), draw(2, 7, 16)
    model = nn.Sequential(inner, Block(False))
    with ch.watch(model) as whole, ch.watch(inner) as part:
        model(x)
    assert whole.names == ["0.attn", "1.attn"] and part.names == ["attn"]


def test_a_thousand_forwards_keep_nothing():
    model, x = nn.Sequential(Block(True), nn.TransformerEncoderLayer(16, 4, 16, batch_first=True)), draw(2, 4, 16)
    masked = Raw()

    def watch_once():
        with ch.watch(model) as seen:
            model(x)
        with ch.watch(masked) as other:
            masked(x, x, x, attn_mask=torch.ones(4, 4, dtype=torch.bool).tril())
        calls = [*seen.calls, *other.calls]
        return [weakref.ref(thing) for call in calls for thing in (call, call.query, call.key)]

    def tensors():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    watch_once()
    with ch.watch(model) as seen:
        model(x)
    seen.calls[0].weights.entropy()
    looked_at = weakref.ref(seen.calls[0].query)
    del seen
    assert looked_at() is None
    before = tensors()
    found = [reference for _ in range(500) for reference in watch_once()]  # two forwards each
    assert len(found) == 500 * 9
    assert not any(reference() for reference in found[:-9]), "a record outlives its Recording"
    assert tensors() <= before


@pytest.mark.parametrize("how", ["data", "NumPy", "a counted write"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_that_is_written_to_between_calls(dtype, how):
    """PyTorch counts no write through `.data`, and none to memory that NumPy shares."""
    lower = np.tril(np.ones((6, 6), dtype=bool))
    made = [m if dtype == torch.bool else np.where(m, 0, -np.inf).astype(np.float32) for m in (lower, lower.T)]
    array, other = made[0].copy(), made[1]

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.from_numpy(array))

        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, attn_mask=self.mask)

    model, x = Masked(), torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    with ch.watch(model, values=True) as seen:
        model(x)
        if how == "data":
            model.mask.data.copy_(torch.from_numpy(other))
        elif how == "NumPy":
            array[...] = other
        else:
            model.mask.copy_(torch.from_numpy(other))
        model(x)
    for call, allowed in zip(seen.calls, (lower, lower.T), strict=True):
        hidden = call.weights.dense()[..., torch.from_numpy(~allowed)]
        assert not hidden.any()
        torch.testing.assert_close(call.weights @ call.value, call.output, rtol=1e-4, atol=1e-6)
