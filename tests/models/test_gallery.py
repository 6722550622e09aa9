"""Ten public bugs of attention, rebuilt on random weights: all are found, and none in the same models without them."""

import os
import warnings

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import SIZES, made  # noqa: E402

IDS = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(1))
WORDS = torch.tensor([[1] * 12, [1] * 7 + [0] * 5])
PADDED = torch.tensor([[1] * 9 + [0] * 3, [1] * 7 + [0] * 5])


def small(kind, **more):
    return made(kind, **SIZES, **more)


def llama():
    return small("Llama", num_key_value_heads=2)


def documents(wrong):
    """Two documents in one row, told apart by positions that begin again; with a cache, transformers joins them."""
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    inputs = {"input_ids": IDS[:1], "position_ids": positions, "use_cache": wrong}
    return llama(), inputs, ch.Causal() & ch.Documents.from_lengths([5, 7])


def window(wrong):
    """A window of 4, which the configuration has lost."""
    model = small("Mistral", num_key_value_heads=2, sliding_window=4)
    model.config.sliding_window = None if wrong else 4
    return model, {"input_ids": IDS}, ch.Causal() & ch.SlidingWindow(before=3)


def encoder(wrong):
    """BERT whose configuration says that it is a decoder."""
    return small("Bert", is_decoder=wrong), {"input_ids": IDS}, None


def padding(wrong):
    """A padded batch without its attention mask."""
    mask = {} if wrong else {"attention_mask": WORDS}
    return small("Bert"), {"input_ids": IDS} | mask, ch.Padding(WORDS)


class Chunks(torch.nn.Module):
    """Llama on 8 tokens, then on 4 more with their cache and a mask of the caller's own, (1, 1, 4, 12)."""

    def __init__(self, first):
        super().__init__()
        self.model, self.first = llama(), first

    def forward(self, input_ids):
        cache = self.model(input_ids[:, :8], use_cache=True).past_key_values
        mask = torch.ones(1, 1, 4, 12, dtype=torch.bool).tril(self.first)
        return self.model(input_ids[:, 8:], attention_mask=mask, past_key_values=cache, use_cache=True)


def cache(wrong):
    """The first new token is taken for the 10th, and it is the 9th."""
    return Chunks(first=9 if wrong else 8), {"input_ids": IDS}, ch.Causal()


class Decoder(torch.nn.Module):
    """The last 3 queries of a longer text, by a direct call."""

    def __init__(self, is_causal):
        super().__init__()
        self.is_causal = is_causal

    def forward(self, x):
        query, length = x[:, :, -3:], x.shape[2]
        keep = None if self.is_causal else torch.ones(3, length, dtype=torch.bool).tril(length - 3)
        return F.scaled_dot_product_attention(query, x, x, attn_mask=keep, is_causal=self.is_causal)


def alignment(wrong):
    """is_causal=True puts the first of the queries at key 0."""
    return Decoder(is_causal=wrong), torch.rand(2, 4, 12, 8, generator=torch.Generator().manual_seed(0)), ch.Causal()


class Encoder(torch.nn.Module):
    """PyTorch's encoder, whose padding mask says True for what may not be seen."""

    def __init__(self, wrong):
        super().__init__()
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        self.mask = PADDED == int(wrong)

    def forward(self, x):
        return self.encoder(x, src_key_padding_mask=self.mask)


def polarity(wrong):
    """1 for a word, as tokenizers have it, where True means padding."""
    return Encoder(wrong), torch.rand(2, 12, 16, generator=torch.Generator().manual_seed(0)), ch.Padding(PADDED)


def border(wrong):
    """Two rows of a packed batch made one. The second begins with the rest of a text, whose positions go on from 5,
    and the first ends with position 4: one document to transformers, until the positions begin again there."""
    rest = torch.arange(3) + 5 if wrong else torch.arange(3)
    positions = torch.cat([torch.arange(7), torch.arange(5), rest, torch.arange(9)])
    inputs = {"input_ids": IDS.reshape(1, -1), "position_ids": positions[None], "use_cache": False}
    return llama(), inputs, ch.Causal() & ch.Documents.from_lengths([7, 5, 3, 9])


# the bug, the mean share of the softmax that is leaked in some layer, the share that is hidden, and words of the cause
MASKS = {
    "packed documents with a cache": (documents, "use_cache=False"),
    "a window lost": (window, "sliding window"),
    "a causal encoder": (encoder, "is_decoder"),
    "padding without a mask": (padding, "attention_mask"),
    "a cache off by one": (cache, "off by one"),
    "upper left for lower right": (alignment, "upper left"),
    "polarity": (polarity, "opposite meaning"),  # by the model's own mask the hidden keys are padding
    "documents across a border": (border, "position"),
}


def audit_run(model, inputs, mask):
    """The given test of a run."""
    with torch.no_grad(), ch.watch(model) as seen:
        model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return ch.audit(seen, mask).tests[0]


@pytest.mark.parametrize("bug", MASKS)
def test_a_wrong_mask_is_found_and_a_right_one_is_not(bug):
    make, cause = MASKS[bug]
    model, inputs, mask = make(wrong=False)
    assert audit_run(model, inputs, mask).holds
    model, inputs, mask = make(wrong=True)
    test = audit_run(model, inputs, mask)
    assert not test.holds
    assert any(cause in finding.text for finding in test.findings), test


def gemma2():
    more = {"num_key_value_heads": 2, "head_dim": 8, "attn_logit_softcapping": 2.0, "initializer_range": 0.2}
    return small("Gemma2", sliding_window=4, **more)


@pytest.fixture
def backend():
    """A backend to be made wrong, registered for the time of a test."""
    functions, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
    name = "clearhead_gallery"

    def register(function):
        functions.register(name, function)
        masks.register(name, masks._global_mapping["eager"])
        return name

    yield register
    functions._global_mapping.pop(name, None)
    masks._global_mapping.pop(name, None)


def eager(module, query, key, value, mask, scaling=None, softcap=None, **more):
    """Gemma 2's attention."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    scores = scores if softcap is None else (scores / softcap).tanh() * softcap
    scores = scores if mask is None else scores + mask
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def in_layer(number, **wrong):
    """The same with other arguments in one layer."""

    def attention(module, query, key, value, mask, **more):
        changed = {name: change(more[name]) for name, change in wrong.items()} if module.layer_idx == number else {}
        return eager(module, query, key, value, mask, **more | changed)

    return attention


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    "wrong",
    [{"softcap": lambda softcap: None}, {"scaling": lambda scaling: scaling * 1.01}],
    ids=["softcap dropped", "a wrong scale"],
)
def test_what_a_backend_leaves_out_is_found_in_its_layer(backend, layer, wrong):
    model = gemma2()
    for function, holds in ((eager, True), (in_layer(layer, **wrong), False)):
        model.set_attn_implementation(backend(function))
        with warnings.catch_warnings(), torch.no_grad(), ch.watch(model, values=True, layers=layer) as seen:
            warnings.simplefilter("ignore")  # of the wrong function
            model(IDS)
        test = ch.audit(seen, ch.Causal() & ch.SlidingWindow(before=3) if layer == 0 else ch.Causal()).tests[1]
        assert test.holds == holds, test
    assert test.findings[0].module == f"layers.{layer}.self_attn"
