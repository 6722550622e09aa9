"""Real models of transformers, and direct calls: what is recorded equals the model's own eager attentions."""

import gc
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_by_name

import clearhead as ch
from clearhead.masks import Intervals
from clearhead.models.loading import bundled

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import SIZES  # noqa: E402

IDS = torch.randint(0, 100, (2, 9), generator=torch.Generator().manual_seed(0))
RIGHT = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
SMALL = {"vocab_size": 100}


def bert(implementation):
    return transformers.AutoModel.from_pretrained(bundled(), attn_implementation=implementation, local_files_only=True)


def llama(implementation):
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, attn_implementation=implementation)
    return transformers.LlamaModel(config)


def t5(implementation):
    config = transformers.T5Config(
        **SMALL, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, attn_implementation=implementation
    )
    return transformers.T5Model(config)


def bert_inputs():
    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled(), local_files_only=True)
    return dict(tokenizer(["The pump in Broad Street was closed.", "It was."], padding=True, return_tensors="pt"))


DECODER = {"decoder_input_ids": IDS[:, :5]}


def test_left_padding_records_what_each_backend_did():
    torch.manual_seed(0)
    inputs = {"input_ids": IDS, "attention_mask": RIGHT.flip(1)}
    for implementation, first_row in (("sdpa", 0.0), ("eager", 1.0)):
        model = llama(implementation).eval()
        with torch.no_grad(), ch.watch(model) as seen:
            model(**inputs)
        assert seen.calls[0].weights[1, 0, 0].sum().item() == pytest.approx(first_row)


def test_key_heads_stay_unrepeated_and_masks_are_shared_spans():
    model = llama("sdpa").eval()
    with torch.no_grad(), ch.watch(model) as seen:
        model(input_ids=IDS, attention_mask=RIGHT)
    first, second = seen.calls
    assert first.query.shape == (2, 4, 9, 8) and first.key.shape == (2, 2, 9, 8)
    assert isinstance(first.mask, Intervals) and first.mask is second.mask
    assert seen.names == ["layers.0.self_attn", "layers.1.self_attn"] and len(seen) == 2
    assert seen["layers.1.self_attn"] == [second]
    with pytest.raises(ch.ClearheadError, match=r"layers\.0\.self_attn"):
        seen["layer 9"]


def test_t5_tells_self_from_cross():
    model = t5("sdpa").eval()
    with torch.no_grad(), ch.watch(model) as seen:
        model(input_ids=IDS, **DECODER)
    kinds = {call.name.split(".")[-1]: call.kind for call in seen.calls}
    assert kinds == {"SelfAttention": "self", "EncDecAttention": "cross"}
    first, second = (call.problem.bias.dense for call in seen.calls[:2])
    assert first.data_ptr() == second.data_ptr()


class Direct(torch.nn.Module):
    """A block that calls SDPA itself, in the ways that people do."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Identity()

    def forward(self, x, how, **options):
        if how == "by name":
            return imported_by_name(x, x, x, **options)
        return F.scaled_dot_product_attention(query=x, key=x, value=x, **options)


@pytest.mark.parametrize("how", ["by name", "keywords"])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "finfo.min"])
def test_direct_calls(how, mask):
    x = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    keep = torch.ones(6, 6, dtype=torch.bool).tril(1)
    options = {
        "none": {},
        "causal": {"is_causal": True, "scale": 0.3},
        "bool": {"attn_mask": keep},
        "float": {"attn_mask": torch.randn(4, 6, 6).masked_fill(~keep, -torch.inf)},
        "finfo.min": {"attn_mask": torch.zeros(6, 6).masked_fill(~keep, torch.finfo(torch.float32).min)},
    }[mask]
    block = Direct()
    want = block(x, how, **options)
    with ch.watch(block) as seen:
        got = block(x, how, **options)
    assert torch.equal(got, want) and len(seen.calls) == 1
    call = seen.calls[0]
    assert call.name == "Direct" and call.kind == "self"
    torch.testing.assert_close(call.weights @ x, want)
    if mask in ("bool", "finfo.min"):
        assert isinstance(call.mask, Intervals) and call.problem.bias is None


def test_a_call_seen_by_both_sources_is_one_record():
    model = bert("sdpa").eval()
    with torch.no_grad(), ch.watch(model) as seen:
        model(**bert_inputs())
    assert len(seen.calls) == model.config.num_hidden_layers


def test_records_are_copies():
    block, x = Direct(), torch.randn(1, 1, 4, 8)
    with ch.watch(block) as seen, torch.inference_mode():
        block(x, "by name")
    before = seen.calls[0].weights.dense().clone()
    x.zero_()
    assert torch.equal(seen.calls[0].weights.dense(), before) and not seen.calls[0].query.requires_grad


def test_no_recognisable_call_is_an_error_that_says_so():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ch.ClearheadError, match="no attention call that clearhead recognises"), ch.watch(model):
        model(torch.zeros(1, 2))
    config = transformers.DebertaV2Config(
        **SMALL, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    deberta = transformers.DebertaV2Model(config).eval()
    with pytest.raises(ch.ClearheadError, match="backend is 'eager'"), ch.watch(deberta), torch.no_grad():
        deberta(input_ids=IDS)


def test_watching_leaves_nothing_behind():
    from transformers.modeling_utils import AttentionInterface

    original, block = AttentionInterface.get_interface, Direct()
    with pytest.raises(RuntimeError, match="inside"), ch.watch(block):
        block(torch.zeros(1, 1, 2, 2), "by name")
        raise RuntimeError("inside")
    assert AttentionInterface.get_interface is original
    assert not block._forward_pre_hooks and not block._forward_hooks
    gc.collect()
    block(torch.zeros(1, 1, 2, 2), "by name")


def test_another_models_calls_are_not_recorded():
    torch.manual_seed(0)
    watched, other = llama("sdpa").eval(), llama("sdpa").eval()
    with torch.no_grad(), ch.watch(watched) as seen:
        watched(input_ids=IDS)
        other(input_ids=IDS)
    assert len(seen.calls) == 2


def test_torchs_own_function_is_seen_below_a_wrapper_that_was_there_before_the_first_watch():
    """`clearhead.models` is imported where it is first used: the name in F may be another's by then."""
    code = """
import torch, torch.nn.functional as F, clearhead as ch
own = F.scaled_dot_product_attention
F.scaled_dot_product_attention = lambda *args, **kwargs: own(*args, **kwargs)
class Block(torch.nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)
block = Block()
with ch.watch(block) as seen:
    block(torch.rand(1, 4, 10, 8))
print(len(seen.calls))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
