"""seen.rollout(): beside products of eager models' dense weights."""

import os

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead.models.loading import bundled, load
from clearhead.models.recordings import rollout as rolled

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import SIZES, made  # noqa: E402

IDS = torch.randint(3, 100, (2, 70), generator=torch.Generator().manual_seed(0))


def dense(attentions):
    rolled = torch.eye(attentions[0].shape[-1], dtype=attentions[0].dtype).expand(attentions[0].shape[0], -1, -1)
    for weights in attentions:
        mean = weights.mean(1)
        rolled = (mean + torch.eye(mean.shape[-1])) / (1 + mean.sum(-1, keepdim=True)) @ rolled
    return rolled


def llama(**more):
    return made("Llama", times=4, **SIZES | {"num_hidden_layers": 3}, num_key_value_heads=2, **more)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_grouped_causal_model(mode):
    model, eager = llama(), llama(attn_implementation="eager")
    with mode():
        with ch.watch(model) as seen:
            model(IDS)
        wanted = dense(eager(IDS, output_attentions=True).attentions)
        found = seen.rollout()
        assert found.shape == (2, 70, 70)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.sum(-1), torch.ones(2, 70))
        torch.testing.assert_close(seen.rollout([-1, 3]), wanted[:, [69, 3]], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(seen.rollout(slice(4, 9)), wanted[:, 4:9], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    model = llama().to(dtype)
    with torch.no_grad(), ch.watch(model) as seen:
        model(IDS)
    wanted = dense([call.weights.dense() for call in seen.calls])
    torch.testing.assert_close(seen.rollout([5, 69]), wanted[:, [5, 69]].to(seen.calls[0].weights.dtype))


def test_the_real_bert_with_padding():
    model, tokenizer = load(bundled())
    inputs = tokenizer(["The pump in Broad Street was closed.", "It was."], padding=True, return_tensors="pt")
    with torch.no_grad(), ch.watch(model) as seen:
        model(**inputs)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = dense(model(**inputs, output_attentions=True).attentions)
    words = inputs["attention_mask"].bool()
    torch.testing.assert_close(seen.rollout()[words], wanted[words], rtol=1e-4, atol=1e-6)


def test_sinks_take_their_share():
    class Sinking(torch.nn.Module):
        def forward(self, x):
            return x + ch.attention(x, x, x, mask=ch.Causal(), sinks=torch.tensor([0.5, -1.0]))

    x = torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    model = Sinking()
    with ch.watch(model) as seen:
        model(x)
    torch.testing.assert_close(seen.rollout(), dense([seen.calls[0].weights.dense()]))


@pytest.mark.parametrize("residual", [0, 0.2, 0.5, 1.0])
def test_the_share_of_the_residual_stream(residual):
    model = llama()
    with torch.no_grad(), ch.watch(model) as seen:
        model(IDS)
    wanted = torch.eye(70).expand(2, -1, -1)
    for call in seen.calls:
        wanted = ((1 - residual) * call.weights.dense().mean(1) + residual * torch.eye(70)) @ wanted
    torch.testing.assert_close(seen.rollout(residual=residual), wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(seen.rollout(residual=residual).sum(-1), torch.ones(2, 70))


def test_without_a_residual_stream_nothing_reaches_a_query_without_keys():
    mask = torch.ones(6, 6, dtype=torch.bool).tril(-1)  # the first query sees nothing

    class Own(torch.nn.Module):
        def forward(self, x):
            return ch.attention(x, x, x, mask=ch.DenseMask(mask))

    with ch.watch(model := Own()) as seen:
        model(torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(seen.rollout(residual=0), seen.calls[0].weights.dense().mean(1))
    torch.testing.assert_close(seen.rollout(), dense([seen.calls[0].weights.dense()]))


@pytest.mark.parametrize("block", [2**20, 500])
def test_weights_by_their_gradients(monkeypatch, block):
    """Beside the gradients that autograd finds of an eager model's own weights."""
    monkeypatch.setattr(rolled, "BLOCK", block)
    model, eager = llama(), llama(attn_implementation="eager")
    with ch.watch(model, gradients=True) as seen:
        model(IDS).last_hidden_state[:, -1].pow(3).sum().backward()
    run = eager(IDS, output_attentions=True)
    for weights in run.attentions:
        weights.retain_grad()
    run.last_hidden_state[:, -1].pow(3).sum().backward()
    wanted = torch.eye(70).expand(2, -1, -1)
    for weights in run.attentions:
        assert weights.grad.abs().max() > 0.01  # there is something to follow
        wanted = wanted + (weights * weights.grad).clamp(min=0).mean(1).detach() @ wanted
    torch.testing.assert_close(seen.rollout(gradients=True), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen.rollout([-1], gradients=True), wanted[:, [69]], rtol=1e-4, atol=1e-5)
    with pytest.raises(ch.ClearheadError, match="expected a share from 0 to 1, and none with gradients=True"):
        seen.rollout(residual=0.3, gradients=True)


def test_bad_input():
    class Both(torch.nn.Module):
        def forward(self, x, y):
            F.scaled_dot_product_attention(x, x, x)
            return F.scaled_dot_product_attention(x, y, y)

    x, y = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 9, 4)
    model = Both()
    with ch.watch(model) as seen:
        model(x, y)
    with pytest.raises(ch.ClearheadError, match="rollout takes the self-attention of one run"):
        seen.rollout()
    with ch.watch(model) as seen:
        model(x, x)
        model(x, x)
    with pytest.raises(ch.ClearheadError, match="of 2 runs"):
        seen.rollout()
    some = ch.models.Recording(seen.calls[:1])
    for wrong in (-0.1, 1.1, float("nan"), "a", None):
        with pytest.raises(ch.ClearheadError, match="rollout: residual is"):
            some.rollout(residual=wrong)
    with pytest.raises(ch.ClearheadError, match="rollout: gradients is 1"):
        some.rollout(gradients=1)
    with pytest.raises(ch.ClearheadError, match="watch with values=True, or gradients=True"):
        some.rollout(gradients=True)
    for wrong in (6, [-7], "a", [], slice(9, 9)):
        with pytest.raises(ch.ClearheadError, match="rollout: tokens is"):
            some.rollout(wrong)
    long = torch.zeros(1, 1, 9000, 1)
    with ch.watch(model) as seen:
        model(long, long)
    with pytest.raises(ch.ClearheadError, match="above 256 MiB"):
        ch.models.Recording(seen.calls[:1]).rollout()


class Windows(torch.nn.Module):
    """A layer that attends in windows of its positions, as `cut` makes them, or whole."""

    def __init__(self, cut):
        super().__init__()
        self.cut, self.attention = cut, torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        parts = self.cut(x)
        return x + self.attention(parts, parts, parts)[0].reshape(x.shape)


def rows(x):
    return x.reshape(-1, 4, 8)


CUTS = {
    "windows": (rows, (2, 16, 8)),
    "windows of a grid": (lambda x: rows(x.flatten(1, 2)), (2, 4, 4, 8)),
    "one window each": (rows, (2, 4, 8)),
    "whole": (lambda x: x, (3, 6, 8)),
    "as many sequences as positions": (lambda x: x, (4, 4, 8)),
}


@pytest.mark.parametrize("which", CUTS)
def test_windows_are_no_sequences(which, tmp_path):
    """A window of one layer and the next layer's hold other positions: their product is of nothing."""
    cut, shape = CUTS[which]
    torch.manual_seed(0)
    model = torch.nn.Sequential(Windows(cut), Windows(cut)).eval()
    with torch.no_grad(), ch.watch(model) as seen:
        model(torch.randn(shape))
    for found in (seen, ch.models.load_recording(seen.write(tmp_path / "seen.safetensors"))):
        if "windows" in which:
            with pytest.raises(ch.UnsupportedError, match="attends in 8 windows, cut from 2 sequences"):
                found.rollout()
        else:
            assert found.rollout().shape[0] == shape[0]


def test_positions_first_are_no_windows():
    """The layers of torch.nn put the positions before the sequences, in which a window's sizes may be found too."""
    for length, batch in ((4, 8), (8, 4), (2, 8), (6, 6)):
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train()
        with torch.no_grad(), ch.watch(model) as seen:
            model(torch.randn(length, batch, 8))
        assert seen.rollout().shape == (batch, length, length)


def vision(name):
    picture = {"image_size": 16, "patch_size": 2, "num_channels": 3}
    torch.manual_seed(0)
    if name == "Swin":
        sizes = {"embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4}
    else:
        sizes = {word: size for word, size in SIZES.items() if word != "vocab_size"}
    return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**picture, **sizes)).eval()


@pytest.mark.parametrize("name", ["Swin", "ViT", "DeiT"])
def test_vision_models(name):
    """Swin attends in four windows of a picture; the others over all patches."""
    model, pixels = vision(name), torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), ch.watch(model) as seen:
        model(pixel_values=pixels)
    if name == "Swin":
        for read in (seen.rollout, lambda: seen.view(image=pixels[0].clamp(0, 1))):
            with pytest.raises(ch.UnsupportedError, match="attends in 8 windows, cut from 2 sequences"):
                read()
        assert seen.view().write is not None  # without a picture
    else:
        assert seen.rollout(tokens=0).shape[0] == 2
        seen.view(image=pixels[0].clamp(0, 1))
