"""What makes the host wait, by public entry, on the fake device: python calls.py [CASE …] prints a line of JSON each.

Each case runs once for what is compiled and remembered, and once more, of which the counts are printed, with the places
in clearhead that read. Without arguments all cases run, and before them those that need no float64, on a device that
refuses it.
"""

import collections
import json
import sys
import traceback

import device as fake

DEVICE = fake.there()

import looks  # noqa: E402
import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import clearhead as ch  # noqa: E402
from clearhead.engines import proof  # noqa: E402
from clearhead.engines.flex import kernel  # noqa: E402
from clearhead.engines.triton import engine as engine_of_triton  # noqa: E402
from clearhead.engines.triton.engine import Triton  # noqa: E402
from clearhead.nn import (  # noqa: E402
    AdditiveAttention,
    DotProductAttention,
    KeyValueCache,
    MultiHeadAttention,
    TorchMultiheadAttention,
)

kernel.BACKEND = "aot_eager"  # no kernel of Triton's runs here
OBJECTIONS = Triton.objections


def kept_back(engine, problem):
    return ["its kernels are compiled for a GPU"]


Triton.objections = kept_back

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 160, 32


def drawn(*shape, grad=True):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator).cuda().requires_grad_(grad)


QUERY, KEY, VALUE = (drawn(BATCH, HEADS, LENGTH, WIDTH) for _ in range(3))
X = drawn(BATCH, LENGTH, HEADS * WIDTH)
LENGTHS = torch.tensor([LENGTH, LENGTH // 2], device="cuda")
KEEP = torch.arange(LENGTH, device="cuda") < LENGTHS[:, None]
IDS = (torch.arange(LENGTH, device="cuda") // 50).expand(BATCH, -1)
TRIL = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cuda").tril()
SINKS, FLOATS = drawn(HEADS), torch.zeros(LENGTH, LENGTH, device="cuda")

# Built once for a batch, and passed to each layer.
MASKS = {
    "causal": ch.Causal(),
    "window": ch.Causal() & ch.SlidingWindow(before=20),
    "first keys": ch.FirstKeys(2) | ch.SlidingWindow(before=5),
    "lengths": ch.Lengths(LENGTHS),
    "many lengths": ch.Lengths(LENGTHS[:, None].expand(-1, LENGTH)),
    "padding": ch.Padding(KEEP),
    "padding, causal": ch.Padding(KEEP) & ch.Causal(),
    "documents": ch.Documents(IDS) & ch.Causal(),
    "dense": ch.DenseMask(TRIL),
    "prefix": ch.PrefixLM(LENGTHS // 4),
    "rule": ch.Causal() & ch.MaskFunction(lambda batch, head, query, key: (query - key) % 7 < 5),
    "or": ch.Padding(KEEP) & (ch.SlidingWindow(before=20) | ch.PrefixLM(LENGTHS // 4)),
    "not": ~ch.Lengths(LENGTHS[:, None].expand(-1, LENGTH)),
}
DENSE_BIAS, ALIBI, RELATIVE = drawn(1, HEADS, LENGTH, LENGTH), ch.ALiBi(HEADS), ch.RelativeBias(HEADS).cuda()
ADDITIVE, GAUSSIAN = ch.Additive(WIDTH, WIDTH, 16).cuda(), ch.Gaussian()
MULTI_HEAD = MultiHeadAttention(HEADS * WIDTH, HEADS).cuda()
TORCHS = TorchMultiheadAttention(HEADS * WIDTH, HEADS, batch_first=True).cuda()
ADDITIVE_MODULE = AdditiveAttention(HEADS * WIDTH).cuda()
DOT_MODULE = DotProductAttention().cuda()


def forward(**options):
    with torch.no_grad():
        return ch.attention(QUERY, KEY, VALUE, **options)


def training(**options):
    output = ch.attention(QUERY, KEY, VALUE, **options)
    return torch.autograd.grad(output.sum(), (QUERY, KEY, VALUE))


def stepped(module, *inputs, **options):
    output = module(*inputs, **options)
    output = output[0] if isinstance(output, tuple) else output
    return torch.autograd.grad(output.sum(), inputs[0])


def decoding(**options):
    cache, steps = KeyValueCache(), X[:, :6].detach().split(1, dim=1)
    with torch.no_grad():
        return [MULTI_HEAD(x, x, x, ch.Causal(), cache=cache, **options) for x in steps]


def reduced(grad, *statistics, **options):
    with torch.set_grad_enabled(grad):
        found = ch.weights(QUERY, KEY, **options).reduce(*statistics)
        return torch.autograd.grad(found[0].sum(), QUERY) if grad else found


def partials():
    with torch.no_grad():
        given = {"mask": ch.Causal(), "align": "lower_right"}
        half = LENGTH // 2
        one = ch.partial(QUERY, KEY[:, :, :half], VALUE[:, :, :half], keys=(0, LENGTH), **given)
        return one.merge(ch.partial(QUERY, KEY[:, :, half:], VALUE[:, :, half:], keys=(half, LENGTH), **given)).finish()


CASES = {
    "attention, forward": forward,
    "attention, training": training,
    **{f"{name}, forward": lambda mask=mask: forward(mask=mask) for name, mask in MASKS.items()},
    **{f"{name}, training": lambda mask=mask: training(mask=mask) for name, mask in MASKS.items()},
    "raw bool mask": lambda: training(mask=TRIL),
    "float mask": lambda: training(mask=FLOATS),
    "learnt bias": lambda: training(bias=DENSE_BIAS),
    "ALiBi": lambda: training(bias=ALIBI, mask=ch.Causal()),
    "RelativeBias": lambda: training(bias=RELATIVE, mask=ch.Padding(KEEP)),
    "bias by a function": lambda: training(bias=ch.BiasFunction(lambda b, h, i, j: -(i - j).abs() / 2)),
    "softcap": lambda: training(score=ch.Dot(softcap=20.0)),
    "sinks": lambda: training(sinks=SINKS, mask=ch.Causal()),
    "dropout": lambda: training(dropout_p=0.1, mask=ch.Causal()),
    "align, a tensor": lambda: training(mask=ch.Causal(), align=torch.zeros_like(LENGTHS)),
    "grouped heads": lambda: ch.attention(QUERY, KEY[:, :2], VALUE[:, :2], mask=MASKS["padding"]),
    "Cosine": lambda: training(score=ch.Cosine(0.4), mask=MASKS["padding"]),
    "Additive": lambda: training(score=ADDITIVE, engine="tiled"),
    "Additive, causal": lambda: training(score=ADDITIVE, mask=ch.Causal(), engine="tiled"),
    "Additive, padding": lambda: training(score=ADDITIVE, mask=MASKS["padding"], engine="tiled"),
    "Gaussian": lambda: training(score=GAUSSIAN, engine="tiled"),
    "a score by tile()": lambda: training(score=lambda query, key: (query @ key.mT).sin()),
    "reduce": lambda: reduced(
        False,
        ch.reductions.Entropy(),
        ch.reductions.Received(),
        ch.reductions.TopK(5),
        ch.reductions.MaxScore(),
        ch.reductions.LogSumExp(),
    ),
    "reduce, causal": lambda: reduced(False, ch.reductions.Entropy(), ch.reductions.Received(), mask=ch.Causal()),
    "reduce, padding": lambda: reduced(False, ch.reductions.Entropy(), ch.reductions.Received(), mask=MASKS["padding"]),
    "reduce, training": lambda: reduced(True, ch.reductions.Entropy(), ch.reductions.Received(), mask=ch.Causal()),
    "masked_softmax": lambda: ch.masked_softmax(QUERY, MASKS["causal"], align="upper_left"),
    "partial": partials,
    "MultiHeadAttention": lambda: stepped(MULTI_HEAD, X, X, X),
    "MultiHeadAttention, padding": lambda: stepped(MULTI_HEAD, X, X, X, MASKS["padding, causal"]),
    "MultiHeadAttention, valid_lens": lambda: stepped(MULTI_HEAD, X, X, X, valid_lens=LENGTHS),
    "TorchMultiheadAttention": lambda: stepped(TORCHS, X, X, X, key_padding_mask=~KEEP, need_weights=False),
    "AdditiveAttention": lambda: stepped(ADDITIVE_MODULE, X, X, X, valid_lens=LENGTHS),
    "DotProductAttention": lambda: stepped(DOT_MODULE, X, X, X, mask=MASKS["padding"]),
    "decoding with a cache": decoding,
    "decoding, sequences of other lengths": lambda: decoding(new_lens=[1, 0]),
    "tiled, padding": lambda: training(mask=MASKS["padding"], engine="tiled"),
    "sdpa, padding": lambda: training(mask=MASKS["padding"], engine="sdpa"),
    "Lengths, built in the call": lambda: training(mask=ch.Lengths(LENGTHS.clone())),
    "Padding, built in the call": lambda: training(mask=ch.Padding(KEEP.clone())),
    "Padding of integers, built in the call": lambda: training(mask=ch.Padding(KEEP.long())),
    "Documents, built in the call": lambda: training(mask=ch.Documents(IDS.clone())),
}

CASES |= looks.cases(QUERY, KEY, VALUE, X)


# Without float64, on the engines that are of any device.
ANYWHERE = {
    f"{engine}: {name}": lambda options=options, engine=engine: training(**options, engine=engine)
    for engine in ("tiled", "sdpa")
    for name, options in {
        "attention": {},
        **{name: {"mask": mask} for name, mask in MASKS.items()},
        "float mask": {"mask": FLOATS},
        "scale": {"scale": 0.3},
        "Cosine": {"score": ch.Cosine(0.4)},
    }.items()
} | {
    name: lambda options=options: training(**options, engine="tiled")
    for name, options in {
        "learnt bias": {"bias": DENSE_BIAS},
        "ALiBi": {"bias": ALIBI, "mask": MASKS["causal"]},
        "RelativeBias": {"bias": RELATIVE},
        "BiasFunction": {"bias": ch.BiasFunction(lambda b, h, i, j: -(i - j).abs() / 2)},
        "softcap": {"score": ch.Dot(softcap=20.0)},
        "sinks": {"sinks": SINKS},
        "dropout": {"dropout_p": 0.1},
        "Additive": {"score": ADDITIVE},
        "Gaussian": {"score": GAUSSIAN},
        "a score by tile()": {"score": lambda query, key: (query @ key.mT).sin()},
        "align, a tensor": {"mask": MASKS["causal"], "align": torch.zeros_like(LENGTHS)},
    }.items()
}
BESIDE = (
    "reduce",
    "reduce, causal",
    "reduce, padding",
    "reduce, training",
    "masked_softmax",
    "partial",
    "Lengths, built",
)
BESIDE += (
    "MultiHeadAttention",
    "TorchMultiheadAttention",
    "AdditiveAttention",
    "decoding",
    "Padding, built",
    "Documents",
)
ANYWHERE |= {name: case for name, case in CASES.items() if name.startswith(BESIDE)}


def without_float64():
    """Which of the cases need it, and what they said."""
    DEVICE.refuse_float64()
    DEVICE.names(), DEVICE.names(True)
    failed = {}
    for name, case in ANYWHERE.items():
        try:
            case()
        except Exception as error:
            failed[name] = traceback.format_exc()[-600:] if "float64" in str(error) else repr(error)
    DEVICE.refuse_float64(False)
    found = {"tried": len(ANYWHERE), "failed": failed, "dtypes": DEVICE.names(True), "operations": DEVICE.names()}
    print(json.dumps({"case": "without float64", **found}), flush=True)


def unseen():
    """Which of the looks that make the host wait are not counted, and whether one that does not is counted."""
    x = torch.arange(6.0, device="cuda")
    looks = {
        "item": lambda: x.sum().item(),
        "bool": lambda: bool(x[0]),
        "tolist of one": lambda: x[1].tolist(),
        "a mask as an index": lambda: x[x > 2],
        "nonzero": lambda: x.nonzero(),
        "cpu": lambda: x.cpu(),
        "tolist": lambda: x.tolist(),
        "a tensor of a list": lambda: torch.tensor([1.0], device="cuda"),
        "equal": lambda: torch.equal(x, x),
        "masked_select": lambda: x.masked_select(x > 1),
        "unique": lambda: x.unique(),
        "repeat_interleave": lambda: torch.repeat_interleave(x, x.long()),
    }

    def counted(look):
        before = DEVICE.counts()
        look()
        return DEVICE.counts()[:3] != before[:3]

    found = [name for name, look in looks.items() if not counted(look)]
    none = lambda: ((x * 2).softmax(0) @ x).add_(torch.zeros(1).to("cuda", non_blocking=True)[0])
    print(json.dumps({"case": "unseen", "looks": found, "too many": counted(none)}), flush=True)


def plans():
    """The engine of each row of the table in docs/guides/devices.md by `plan`, and by shapes alone for some."""
    several = ch.MaskFunction(lambda batch, head, query, key: key < key.max() - 3)
    rule = ch.BiasFunction(lambda batch, head, i, j: -(i - j).abs() / 2)
    learnt = ch.BiasFunction(lambda batch, head, i, j: SINKS[head] * (i - j))
    calls = {
        "dot products without a mask": [{}],
        "dot products, one causal square": [{"mask": MASKS["causal"]}],
        "windows, lengths, padding": [
            {"mask": MASKS[name]} for name in ("window", "lengths", "padding", "documents", "prefix", "or", "not")
        ],
        "a `MaskFunction`, a `DenseMask`": [{"mask": MASKS["rule"]}, {"mask": MASKS["dense"]}],
        "a `MaskFunction` that needs": [{"mask": several}],
        "`ALiBi`, `RelativeBias`": [
            *({"bias": bias} for bias in (ALIBI, RELATIVE, DENSE_BIAS)),
            {"score": ch.Dot(softcap=20.0)},
            {"sinks": SINKS},
        ],
        "a `BiasFunction` |": [{"bias": rule}],
        "a `BiasFunction` that learns": [{"bias": learnt}],
        "dropout; additive and": [
            {"dropout_p": 0.1, "mask": MASKS["window"]},
            {"score": ADDITIVE},
            {"score": GAUSSIAN},
        ],
        "the same where Triton": [{"score": ADDITIVE, "mask": MASKS["rule"]}, {"score": lambda q, k: (q @ k.mT).sin()}],
    }
    proof.objections = lambda *about: []  # no kernel runs
    engine_of_triton.has_triton, Triton.objections = lambda: True, OBJECTIONS
    found = {
        row: sorted({ch.plan(QUERY, KEY, VALUE, **options).engine for options in each}) for row, each in calls.items()
    }
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty(t.shape, device="cuda", requires_grad=True) for t in (QUERY, KEY, VALUE)]
        alone = [name for name in calls if name.startswith(("dot products without", "windows", "dropout; additive"))]
        shapes = {name: sorted({ch.plan(*fakes, **options).engine for options in calls[name]}) for name in alone}
        assert ch.attention(*fakes, mask=MASKS["window"]).shape == VALUE.shape
    Triton.objections = kept_back
    return {"engines": found, "shapes alone": shapes}


def main(names):
    if not names:
        without_float64()
        unseen()
        print(json.dumps({"case": "plans", **plans()}), flush=True)
        names = list(CASES)
    for name in names:
        torch.manual_seed(0)
        case = CASES[name]
        case()
        DEVICE.places = collections.Counter()
        before = DEVICE.counts()
        case()
        found = fake.Counts(*(now - then for now, then in zip(DEVICE.counts(), before, strict=True)))
        print(json.dumps({"case": name, **found._asdict(), "places": DEVICE.places}), flush=True)
        DEVICE.places = None


if __name__ == "__main__":
    main(sys.argv[1:])
