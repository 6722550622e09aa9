"""A call is cross attention where its keys are another sequence than its queries, whatever the arguments are named."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clearhead as ch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import IDS, SIZES, made  # noqa: E402

LENGTHS = [(9, 4), (4, 9), (1, 9)]
WIDTH, HEADS = 16, 2


class Core(nn.Module):
    """Attention without weights, of heads that the module around it has made."""

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Projecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.core = Core()

    def heads(self, x, y):
        rows = zip((self.q, self.k, self.v), (x, y, y), strict=True)
        return [layer(t).unflatten(-1, (HEADS, -1)).transpose(-3, -2) for layer, t in rows]


class Pair(Projecting):
    def forward(self, x, y):
        return F.scaled_dot_product_attention(*self.heads(x, y)).transpose(1, 2).flatten(2)


class KeyFirst(Projecting):
    def forward(self, y, x=None):
        return F.scaled_dot_product_attention(*self.heads(x, y)).transpose(1, 2).flatten(2)


class InnerCore(Projecting):
    def forward(self, x, y):
        return self.core(*self.heads(x, y)).transpose(1, 2).flatten(2)


class InFront(Projecting):
    """(L, B, E)."""

    def forward(self, x, y):
        q, k, v = self.heads(x.transpose(0, 1), y.transpose(0, 1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).transpose(0, 1)


class Points(Projecting):
    """As SAM's: (B, prompts, L, E)."""

    def forward(self, query, key, value):
        q, k, v = (t.flatten(0, 1) for t in self.heads(query, key))
        return F.scaled_dot_product_attention(q, k, v)


class Pooling(Projecting):
    """Learned queries."""

    def __init__(self, queries):
        super().__init__()
        self.learned = nn.Parameter(torch.randn(queries, WIDTH))

    def forward(self, y):
        x = self.learned.expand(len(y), -1, -1)
        return F.scaled_dot_product_attention(*self.heads(x, y)).transpose(1, 2).flatten(2)


class HeadsAsBatch(Projecting):
    """(B · H, L, E), as modules call attention that were written for torch.bmm."""

    def forward(self, x, y):
        q, k, v = (t.flatten(0, 1) for t in self.heads(x, y))
        return F.scaled_dot_product_attention(q, k, v)


class Clearhead(Projecting):
    def forward(self, x, y):
        return ch.attention(*self.heads(x, y)).transpose(1, 2).flatten(2)


def cross(name, queries, keys):
    """A module and its inputs."""
    x, y = torch.randn(2, queries, WIDTH), torch.randn(2, keys, WIDTH)
    given = {
        "by position": (Pair(), (x, y)),
        "the keys first": (KeyFirst(), (y, x)),
        "a core of its own": (InnerCore(), (x, y)),
        "sequence first": (InFront(), (x.transpose(0, 1), y.transpose(0, 1))),
        "prompts": (Points(), (x[:, None], y[:, None], y[:, None])),
        "learned queries": (Pooling(queries), (y,)),
        "heads as batch": (HeadsAsBatch(), (x, y)),
        "clearhead": (Clearhead(), (x, y)),
        "nn.MultiheadAttention": (nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), (x, y, y)),
    }
    return given[name]


CROSS = [
    "by position",
    "the keys first",
    "a core of its own",
    "sequence first",
    "prompts",
    "learned queries",
    "heads as batch",
    "clearhead",
    "nn.MultiheadAttention",
]


class Model(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs):
        return self.inner(*inputs)


@pytest.mark.parametrize("queries, keys", LENGTHS)
@pytest.mark.parametrize("name", CROSS)
def test_another_sequence_is_cross(name, queries, keys):
    torch.manual_seed(0)
    inner, inputs = cross(name, queries, keys)
    model = Model(inner).eval()
    with torch.no_grad():
        with ch.watch(model) as seen:
            model(*inputs)
        with ch.watch(model) as forced, ch.edit(model, ch.edits.ForceMask(ch.Causal())):
            model(*inputs)
        with ch.watch(model) as cut, ch.edit(model, ch.edits.Knockout(queries=0, keys=0)):
            model(*inputs)
    (call,) = seen
    assert call.kind == "cross"
    assert (forced[0].weights[0, 0, 0] > 0).nonzero().flatten().tolist() == [0]
    changed = (cut[0].weights.dense() - call.weights.dense()).abs().amax((0, 1, 3)) > 1e-6
    assert changed.nonzero().flatten().tolist() == [0]
    assert not {"previous", "itself", "distance"} & set(seen.table()[0])


class Cached(Projecting):
    """Self attention with a cache that no argument names: keys in a tuple, in the module, or in one static tensor."""

    def __init__(self, how, core):
        super().__init__()
        self.how, self.by_core, self.past = how, core, None

    def forward(self, x, past=None, positions=None):
        q, k, v = self.heads(x, x)
        past = self.past if self.how == "inside" else past
        if self.how == "static":
            k, v = past = tuple(t.index_copy(2, positions, new) for t, new in zip(past, (k, v), strict=True))
            mask = torch.arange(k.shape[2]) <= positions[:, None]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask), past
        if past is not None:
            k, v = (torch.cat([old, new], 2) for old, new in zip(past, (k, v), strict=True))
        self.past = k, v
        attend = self.core if self.by_core else F.scaled_dot_product_attention
        return attend(q, k, v), (k, v)


@pytest.mark.parametrize("core", [False, True])
@pytest.mark.parametrize("how", ["outside", "inside", "static"])
def test_beside_a_cache_of_any_name_it_is_self(how, core):
    torch.manual_seed(0)
    model, x = Model(Cached(how, core)).eval(), torch.randn(2, 7, WIDTH)
    past = (torch.zeros(2, HEADS, 9, WIDTH // HEADS),) * 2 if how == "static" else None
    with torch.no_grad(), ch.watch(model) as seen:
        for start, stop in ((0, 2), (2, 3), (3, 6), (6, 7)):
            _, past = model(x[:, start:stop], past, torch.arange(start, stop))
    assert [call.kind for call in seen] == ["self"] * 4
    assert seen[-1].shape[3] == (9 if how == "static" else 7)


@pytest.mark.parametrize("tokens", range(1, 9))
def test_a_step_of_a_model_with_a_cache_is_self(tokens):
    """Whatever sizes of the model the number of keys happens to be equal to."""
    model = made("Llama", "ForCausalLM", **SIZES)
    cache = transformers.DynamicCache()
    with torch.no_grad(), ch.watch(model) as seen:
        model(input_ids=IDS[:, :tokens], past_key_values=cache)
        model(input_ids=IDS[:, tokens : tokens + 1], past_key_values=cache)
    assert {call.kind for call in seen} == {"self"}


SAM = {
    "vision_config": {"hidden_size": 32, "mlp_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"image_size": 64, "patch_size": 16, "window_size": 2, "global_attn_indexes": [1], "output_channels": 16}
    | {"num_pos_feats": 8},
    "prompt_encoder_config": {"hidden_size": 16, "image_size": 64, "patch_size": 16, "mask_input_channels": 4},
    "mask_decoder_config": {"hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"iou_head_hidden_dim": 16},
}


def test_sam():
    torch.manual_seed(0)
    model = transformers.SamModel(transformers.SamConfig(**SAM)).eval()
    with torch.no_grad(), ch.watch(model) as seen:
        model(pixel_values=torch.randn(1, 3, 64, 64), input_points=torch.tensor([[[[4.0, 5.0]]]]))
    for call in seen:
        assert call.kind == ("self" if "self_attn" in call.name or "vision" in call.name else "cross"), call.name
