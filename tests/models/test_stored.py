"""A recording in a file: the same weights again, and no code."""

import os

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")

IDS = torch.randint(0, 100, (2, 9), generator=torch.Generator().manual_seed(0))
LEFT = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
SMALL = {"vocab_size": 100, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {"hidden_size": 32, "intermediate_size": 64}


def gpt_oss():
    config = transformers.GptOssConfig(
        **SMALL,
        **WIDE,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=2,
        sliding_window=4,
        attn_implementation="eager",
    )
    return transformers.GptOssModel(config)


def t5():
    config = transformers.T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return transformers.T5Model(config)


class Blocks(torch.nn.Module):
    """A mask of scattered pairs, a float mask, and clearhead's own masks of several intervals."""

    def forward(self, x):
        keep = (torch.arange(81).view(9, 9) * 7 % 5 > 1) | torch.eye(9, dtype=torch.bool)
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=keep)
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=keep.float().cumsum(1))
        x = ch.attention(x, x, x, mask=ch.Causal() & (ch.SlidingWindow(before=2) | ch.Lengths([2])), bias=ch.ALiBi(2))
        return ch.attention(x, x, x, mask=ch.MaskFunction(lambda b, h, i, j: (i + j) % 3 > 0), scale=0.3)


MODELS = {
    "llama": (lambda: transformers.LlamaModel(transformers.LlamaConfig(**SMALL, **WIDE)), {"input_ids": IDS}),
    "llama, left padding": (
        lambda: transformers.LlamaModel(transformers.LlamaConfig(**SMALL, **WIDE, attn_implementation="eager")),
        {"input_ids": IDS, "attention_mask": LEFT},
    ),
    "gpt-oss": (gpt_oss, {"input_ids": IDS, "attention_mask": LEFT}),
    "t5": (t5, {"input_ids": IDS, "attention_mask": LEFT.flip(1), "decoder_input_ids": IDS[:, :5]}),
    "blocks": (Blocks, {"x": torch.randn(2, 2, 9, 4, generator=torch.Generator().manual_seed(0))}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_recording_has_the_same_weights(name, tmp_path):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad(), ch.watch(model) as seen:
        model(**inputs)
        model(**inputs)
    path = seen.write(tmp_path / "seen.safetensors")
    again = ch.models.load_recording(str(path))
    assert [repr(call) for call in again.calls] == [repr(call) for call in seen.calls] and len(again.runs) == 2
    for old, new in zip(seen.calls, again.calls, strict=True):
        assert torch.equal(old.weights.dense(), new.weights.dense())
        assert torch.equal(old.query, new.query) and torch.equal(old.key, new.key)
        for a, b in zip(
            *(
                c.weights.reduce(ch.reductions.Entropy(), ch.reductions.Received(), ch.reductions.SinkShare())
                for c in (old, new)
            ),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert again.table()[3].keys() == seen.table()[3].keys()


def test_masks_are_stored_once(tmp_path):
    block, x = Blocks(), torch.randn(1, 2, 9, 4)

    class Many(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.keep = torch.rand(300, 300) > 0.5

        def forward(self, x):
            for _ in range(4):
                x = F.scaled_dot_product_attention(x, x, x, attn_mask=self.keep)
            return x

    with ch.watch(model := Many()) as seen:
        model(torch.randn(1, 1, 300, 4))
    size = seen.write(tmp_path / "many").stat().st_size
    assert 300 * 300 < size < 2 * 300 * 300
    with ch.watch(block) as seen:
        block(x)
    assert len(ch.models.load_recording(seen.write(tmp_path / "four")).calls) == 4


def test_the_report_of_a_loaded_recording_is_the_same(tmp_path):
    model = transformers.LlamaModel(transformers.LlamaConfig(**SMALL, **WIDE)).eval()
    with torch.no_grad(), ch.watch(model) as seen:
        model(IDS)
    again = ch.models.load_recording(seen.write(tmp_path / "seen"))
    pages = [which.view().write(tmp_path / f"{i}.html").read_text() for i, which in enumerate((seen, again))]
    assert pages[0] == pages[1]


def test_what_is_no_recording_is_an_error(tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "text").write_text("attention")
    save_file({"a": torch.zeros(2)}, tmp_path / "other")
    for name, message in (
        ("text", "cannot read"),
        ("none", "cannot read"),
        ("other", "is no recording"),
        ("", "cannot"),
    ):
        with pytest.raises(ch.ClearheadError, match=message):
            ch.models.load_recording(tmp_path / name)
    with ch.watch(block := Blocks()) as seen:
        block(torch.randn(1, 2, 9, 4))
    with pytest.raises(ch.ClearheadError, match="cannot write"):
        seen.write(tmp_path / "no folder" / "seen")


def test_other_scores_are_refused(tmp_path):
    class Near(torch.nn.Module):
        def forward(self, x):
            return ch.attention(x, x, x, score=ch.Gaussian(1.0))

    with ch.watch(model := Near()) as seen:
        model(torch.randn(1, 5, 4))
    with pytest.raises(ch.UnsupportedError, match="Near scores by Gaussian"):
        seen.write(tmp_path / "seen")
