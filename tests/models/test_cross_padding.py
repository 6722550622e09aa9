"""Cross attention that sees the padding of its source is found, however the mask was lost."""

import os

import pytest
import torch

import clearhead as ch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import T5, made  # noqa: E402

PADDED = {
    "right": [[1] * 9, [1] * 5 + [0] * 4],
    "left": [[1] * 9, [0] * 3 + [1] * 6],
    "holes": [[1] * 9, [1, 1, 0, 1, 1, 0, 0, 1, 1]],
}
BART = {"vocab_size": 100, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 40}


def without(model, how):
    """Lose the mask: where the decoder is called, or where each of its cross attentions is."""

    def lost(module, args, kwargs):
        names = ("encoder_attention_mask",) if how == "decoder" else ("attention_mask", "mask")
        for name in names:
            if isinstance(kwargs.get(name), torch.Tensor):
                every = torch.full_like(kwargs[name], kwargs[name].dtype == torch.bool)  # one that hides nothing
                kwargs[name] = every if how == "zeros" else None
        return args, kwargs

    for name, module in model.named_modules():
        cross = name.endswith(("EncDecAttention", "encoder_attn"))
        if name == "decoder" if how == "decoder" else cross:
            module.register_forward_pre_hook(lost, with_kwargs=True)


@pytest.mark.parametrize("how", ["decoder", "cross attention", "zeros"])
@pytest.mark.parametrize("padded", PADDED)
@pytest.mark.parametrize("name", ["T5", "Bart"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_it_is_found(name, padded, how, implementation):
    model, mask = made(name, **{"T5": T5 | {"dropout_rate": 0.0}, "Bart": BART}[name]), torch.tensor(PADDED[padded])
    model.set_attn_implementation("eager" if implementation == "eager" else model.config._attn_implementation)
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :4]}
    expected = {"*EncDecAttention" if name == "T5" else "*encoder_attn": None}
    with torch.no_grad():
        with ch.watch(model) as sound:
            model(**inputs)
        assert ch.audit(sound, expected).ok
        without(model, how)
        with ch.watch(model) as seen:
            model(**inputs)
    found = ch.audit(seen, expected)
    assert not found.ok and "of the softmax goes to" in str(found)
    assert any(finding.name == "padding attended" for finding in seen.diagnose())
    assert not any(finding.name == "padding attended" for finding in sound.diagnose())
    for call in seen.calls:
        if call.kind == "cross":
            assert torch.equal(call.padding.keys, mask.bool())
