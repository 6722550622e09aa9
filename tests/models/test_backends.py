"""Backends that take their masks in other forms than a matrix, or none, and those that cannot be recorded."""

import os
import random

import pytest
import torch

import clearhead as ch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")

from small_models import IDS, RIGHT, SIZES  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask  # noqa: E402

FAKE = "flash_for_tests"  # the mask of FlashAttention, without its kernels


def attention(module, query, key, value, attention_mask, scaling, sliding_window=None, **options):
    """What FlashAttention computes: the last query at the last key, padding taken out, packed documents apart."""
    filled = key.shape[2] if attention_mask is None else attention_mask.shape[1]
    key, value = (t[:, :, :filled].repeat_interleave(module.num_key_value_groups, 1) for t in (key, value))
    place = torch.arange(filled)
    own = place[-query.shape[2] :, None]
    keep = place <= own
    if sliding_window is not None:
        keep = keep & (place > own - sliding_window)
    if attention_mask is not None:
        keep = keep & attention_mask[:, None, None].bool()
    elif (document := packed(query, options)) is not None:
        keep = keep & (document[:, None] == document)
    scores = (query @ key.mT * scaling).masked_fill(~keep, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0) @ value).transpose(1, 2), None


def packed(query, options):
    """The document of each token, as FlashAttention is told of them; None where there is one."""
    starts, positions = options.get("cu_seq_lens_q"), options.get("position_ids")
    if starts is not None:
        return torch.searchsorted(starts, torch.arange(query.shape[2]), right=True)
    if positions is not None and query.shape[0] == 1 and (positions.diff() != 1).any():
        return (positions[0] == 0).cumsum(0)
    return None


@pytest.fixture
def flash(monkeypatch):
    functions = transformers.modeling_utils.AttentionInterface._global_mapping
    monkeypatch.setitem(functions, FAKE, attention)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, FAKE, flash_attention_mask)


def models(implementation, window=4):
    config = {
        **SIZES,
        "num_key_value_heads": 2,
        "sliding_window": window,
        "pad_token_id": 0,
        "eos_token_id": None,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    slow = transformers.MistralForCausalLM(transformers.MistralConfig(**config, attn_implementation="eager")).eval()
    fast = transformers.MistralForCausalLM(transformers.MistralConfig(**config)).eval()
    fast.load_state_dict(slow.state_dict())
    fast.config._attn_implementation = implementation
    return fast, slow


@pytest.mark.parametrize("mask", [None, RIGHT, RIGHT.flip(1)], ids=["no padding", "right", "left"])
def test_the_masks_of_flash_attention(flash, mask):
    fast, slow = models(FAKE)
    inputs = {"input_ids": IDS, "attention_mask": mask}
    with torch.no_grad():
        plain = fast(**inputs).logits
        with ch.watch(fast) as seen:
            watched = fast(**inputs).logits
        own = slow(**inputs, output_attentions=True)
    assert torch.equal(plain, watched) and {call.backend for call in seen.calls} == {FAKE}
    tokens = (torch.ones_like(IDS) if mask is None else mask).bool()
    torch.testing.assert_close(plain[tokens], own.logits[tokens], atol=1e-4, rtol=0)
    for call, weights in zip(seen.calls, own.attentions, strict=True):
        rows = tokens[:, None].expand(weights.shape[:3])
        recorded = call.weights.dense()
        torch.testing.assert_close(recorded[rows], weights[rows], atol=1e-5, rtol=0)
        assert mask is None or (recorded[~rows] == 0).all()


OWN = "own_for_tests"


@pytest.mark.parametrize("reads", [True, False], ids=["reads the keywords", "reads none"])
def test_a_function_without_a_mask_is_refused_where_keywords_alone_tell_it(monkeypatch, reads):
    """It may hide the keys that keywords describe, or not: its weights are known where it gets a mask or needs none."""
    kept = []

    def own(module, query, key, value, attention_mask, scaling, sliding_window=None, **options):
        key, value = (t.repeat_interleave(module.num_key_value_groups, 1) for t in (key, value))
        place = torch.arange(key.shape[2])
        keep = place <= place[:, None]
        if reads and sliding_window is not None:
            keep = keep & (place > place[:, None] - sliding_window)
        scores = (query @ key.mT * scaling).masked_fill(~keep, -torch.inf)
        kept.append((scores if attention_mask is None else scores + attention_mask).softmax(-1))
        return (kept[-1] @ value).transpose(1, 2), None

    monkeypatch.setitem(transformers.modeling_utils.AttentionInterface._global_mapping, OWN, own)

    def watched(model, **inputs):
        kept.clear()
        with torch.no_grad(), ch.watch(model) as seen:
            model(use_cache=False, **inputs)
        if not seen.calls:
            return None
        return max(float((call.weights.dense() - w).abs().max()) for call, w in zip(seen.calls, kept, strict=True))

    windowed, plain = models(OWN, 4)[0], models(OWN, None)[0]
    with pytest.warns(UserWarning, match="'own_for_tests' with sliding_window=4 and no mask"):
        assert watched(windowed, input_ids=IDS) is None
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with pytest.warns(UserWarning, match="position_ids that begin again and no mask"):
        assert watched(plain, input_ids=IDS[:1], position_ids=packed) is None
    assert watched(windowed, input_ids=IDS[:, :4]) < 1e-6  # the window hides nothing
    assert watched(plain, input_ids=IDS) < 1e-6
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, OWN, transformers.masking_utils.eager_mask)
    assert watched(windowed, input_ids=IDS) < 1e-6
    assert watched(plain, input_ids=IDS[:1], position_ids=packed) < 1e-6


@pytest.mark.parametrize("window", [4, None])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_flash_attention_with_a_cache(flash, cache, window):
    fast, slow = models(FAKE, window)
    options = {"attention_mask": RIGHT.flip(1), "max_new_tokens": 3, "do_sample": False}
    options |= {"return_dict_in_generate": True, "cache_implementation": cache}
    with ch.watch(fast) as seen:
        got = fast.generate(IDS, **options)
    own = slow.generate(IDS, output_attentions=True, **options)
    assert torch.equal(got.sequences, own.sequences)
    weights = [layer for step in own.attentions for layer in step]
    for call, want in zip(seen.calls, weights, strict=True):
        recorded = call.weights.dense()
        sees, keys = recorded.sum(-1) > 0, recorded.shape[-1]
        real = RIGHT.flip(1).bool() if call.query.shape[2] == 9 else torch.ones(2, 1, dtype=torch.bool)
        assert torch.equal(sees, real[:, None].expand(sees.shape))
        assert (want[sees][:, keys:] == 0).all()
        torch.testing.assert_close(recorded[sees], want[sees][:, :keys], atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [4, None])
def test_flash_attention_on_what_comes_after_a_first_part(flash, window):
    fast, slow = models(FAKE, window)
    inputs = {"input_ids": IDS[:, 5:], "past_key_values": None}
    with torch.no_grad(), ch.watch(fast) as seen:
        fast(**{**inputs, "past_key_values": fast(input_ids=IDS[:, :5]).past_key_values})
        past = slow(input_ids=IDS[:, :5]).past_key_values
        own = slow(**{**inputs, "past_key_values": past}, output_attentions=True).attentions
    for call, weights in zip(seen.calls[2:], own, strict=True):
        recorded = call.weights.dense()
        assert recorded.shape[2] == 4
        torch.testing.assert_close(recorded, weights[..., -recorded.shape[-1] :], atol=1e-5, rtol=0)


PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
STARTS = torch.tensor([0, 4, 9], dtype=torch.int32)
VARLEN = {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, "max_length_q": 5, "max_length_k": 5}


@pytest.mark.parametrize(
    ("told", "window"), [("positions", 3), ("positions", None), ("starts", 3), ("starts", None), ("other name", None)]
)
def test_packed_sequences_are_recorded_as_documents(flash, monkeypatch, told, window):
    functions = transformers.modeling_utils.AttentionInterface._global_mapping
    monkeypatch.setitem(functions, "varlen_for_tests", attention)  # no mask is made for a name that is not registered
    fast, slow = models("varlen_for_tests" if told == "other name" else FAKE, window)
    inputs = {"input_ids": IDS[:1], "position_ids": PACKED} | ({} if told == "positions" else VARLEN)
    with torch.no_grad():
        plain = fast(**inputs).logits
        with ch.watch(fast) as seen:
            watched = fast(**inputs).logits
        own = slow(input_ids=IDS[:1], position_ids=PACKED, use_cache=False, output_attentions=True)
    assert torch.equal(plain, watched)
    torch.testing.assert_close(plain, own.logits, atol=1e-4, rtol=0)
    for call, weights in zip(seen.calls, own.attentions, strict=True):
        assert "Documents" in repr(call.mask)
        torch.testing.assert_close(call.weights.dense(), weights, atol=1e-5, rtol=0)
        assert call.weights[0, 0, 4, :4].sum() == 0


def test_sdpa_and_eager_leave_starts_unread_and_their_records_too():
    fast, slow = models("sdpa", None)
    with torch.no_grad():
        want = slow(input_ids=IDS[:1], output_attentions=True).attentions
        for model in (fast, slow):
            with ch.watch(model) as seen:
                model(input_ids=IDS[:1], **VARLEN)
            for call, weights in zip(seen.calls, want, strict=True):
                torch.testing.assert_close(call.weights.dense(), weights, atol=1e-5, rtol=0)


def test_run_on_clearhead_keeps_packed_documents_apart():
    fast, slow = models("sdpa", None)
    ch.models.run_on_clearhead(fast)
    with torch.no_grad():
        got = fast(input_ids=IDS[:1], position_ids=PACKED, **VARLEN).logits  # with a cache: its mask holds no documents
        want = slow(input_ids=IDS[:1], position_ids=PACKED, use_cache=False).logits
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


WRONG = {
    "too short": ({"cu_seq_lens_q": STARTS[:2]}, "fill the whole sequence"),
    "other keys": (
        {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": torch.tensor([0, 5, 9])},
        "the same for queries and keys",
    ),
    "two rows": ({"cu_seq_lens_q": torch.tensor([0, 4, 18]), "rows": 2}, "none of them in two"),
}


@pytest.mark.parametrize("name", WRONG)
def test_documents_that_cannot_be_read_are_refused(name):
    options, said = WRONG[name]
    fast, _ = models("sdpa", None)
    ids = IDS[: options.get("rows", 1)]
    given = {**VARLEN, **options, "cu_seq_lens_k": options.get("cu_seq_lens_k"), "rows": None}
    with pytest.raises(ch.UnsupportedError, match=said), torch.no_grad():
        ch.models.run_on_clearhead(fast)(input_ids=ids, **given)


def test_positions_that_begin_again_with_a_cache_are_refused(flash):
    fast, _ = models(FAKE, None)
    with torch.no_grad():
        past = fast(input_ids=IDS[:1, :4]).past_key_values
        with pytest.raises(ch.UnsupportedError, match="packed into one"), ch.edit(fast, ch.edits.ScaleHeads(heads=0)):
            fast(input_ids=IDS[:1, 4:], position_ids=torch.tensor([[4, 5, 0, 1, 2]]), past_key_values=past)


class Bare(torch.nn.Module):
    """A layer that asks transformers for its backend, and passes no mask."""

    is_causal = True
    training = False

    def __init__(self, backend):
        super().__init__()
        self.backend = backend

    def forward(self, x, mask=None, **options):
        functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
        attend = functions.get_interface(self.backend, None)
        return attend(self, x, x, x, mask, scaling=0.5, **options)[0]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("given", ["nothing", "not causal", "float", "bool"])
def test_what_each_backend_does_without_a_mask_and_with_one(backend, given, monkeypatch):
    x = torch.randn(2, 4, 6, 16, generator=torch.Generator().manual_seed(0))
    keep = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril(1)
    mask = {"float": torch.zeros(2, 1, 6, 6).masked_fill(~keep, -torch.inf), "bool": keep}.get(given)
    options = {"is_causal": False} if given == "not causal" else {}
    from transformers.integrations import flex_attention as flex

    # the same function, not compiled: that takes half a minute
    monkeypatch.setattr(flex, "compile_friendly_flex_attention", lambda *a, training, **k: flex.flex_attention(*a, **k))
    layer = Bare(backend)
    with torch.no_grad():
        plain = layer(x, mask, **options)
        with ch.watch(layer) as seen:
            assert torch.equal(layer(x, mask, **options), plain)
    (call,) = seen.calls
    torch.testing.assert_close((call.weights @ x).transpose(1, 2), plain, atol=1e-5, rtol=0)
    if given == "nothing":
        assert (call.mask is None) == (backend == "flex_attention")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("seed", range(24))
def test_a_keyword_that_a_backend_drops_is_not_recorded(seed, monkeypatch):
    """Which these are depends on the version; the weights times the values are what the backend gave in each."""
    from transformers.integrations import flex_attention as flex

    monkeypatch.setattr(flex, "compile_friendly_flex_attention", lambda *a, training, **k: flex.flex_attention(*a, **k))
    dice, g = random.Random(seed), torch.Generator().manual_seed(seed)
    x = torch.randn(2, 4, 6, 16, generator=g)
    drawn = {
        "softcap": 1.0,
        "s_aux": torch.randn(4, generator=g),
        "position_bias": torch.randn(2, 4, 6, 6, generator=g),
    }
    drawn = {word: drawn[word] for word in dice.sample(sorted(drawn), dice.randint(1, 2))}
    mask = dice.choice([None, torch.ones(2, 1, 6, 6, dtype=torch.bool).tril(dice.randint(0, 3))])
    layer = Bare(("sdpa", "flex_attention")[seed % 2])
    try:
        plain = layer(x, mask, **drawn)
    except ValueError as refused:  # in words of transformers' own
        assert any(word in str(refused) for word in ("softcap", "Attention sinks"))
        return
    with torch.no_grad(), ch.watch(layer) as seen:
        layer(x, mask, **drawn)
    (call,) = seen.calls
    torch.testing.assert_close((call.weights @ x).transpose(1, 2), plain, atol=1e-5, rtol=0)


def test_lazy_weights_are_without_what_sdpa_drops():
    fast, _ = models("sdpa")
    layer, hidden = fast.model.layers[0].self_attn, torch.randn(1, 9, 32)
    given = {"position_embeddings": fast.model.rotary_emb(hidden, torch.arange(9)[None]), "attention_mask": None}
    with torch.no_grad(), ch.models.lazy_attentions(fast):
        _, want = layer(hidden, **given, output_attentions=True)
        _, found = layer(
            hidden, **given, output_attentions=True, s_aux=torch.full((layer.config.num_attention_heads,), 2.0)
        )
    torch.testing.assert_close(found + 0, want + 0)


@pytest.mark.parametrize("open_one", [ch.watch, ch.models.lazy_attentions, ch.models.monitor])
def test_a_version_without_the_interface_is_refused_in_words(open_one, monkeypatch):
    """As an older version, whose models look up their functions by themselves."""
    fast, _ = models("sdpa")
    monkeypatch.delattr(transformers.modeling_utils.AttentionInterface, "get_interface")
    said = rf"transformers {transformers.__version__}(.|\n)*get_interface(.|\n)*5\.23"
    with pytest.raises(ch.UnsupportedError, match=said), open_one(fast):
        fast(IDS)


def test_what_is_no_tensor_is_refused(monkeypatch):
    monkeypatch.setitem(transformers.modeling_utils.AttentionInterface._global_mapping, FAKE, attention)
    fast, _ = models(FAKE)
    layer = fast.model.layers[0].self_attn
    hidden = torch.zeros(1, 9, 32)
    rotary = fast.model.rotary_emb(hidden, torch.arange(9)[None])
    said = r"layers\.0\.self_attn gave the backend(.|\n)*of type list(.|\n)*attn_implementation='sdpa'"
    with pytest.raises(ch.UnsupportedError, match=said), ch.edit(fast, ch.edits.ScaleHeads(heads=0)):
        layer(hidden, position_embeddings=rotary, attention_mask=[1] * 9)
