"""monitor(): what it says of a model that trains, in eager and in compiled code; that it changes nothing."""

import copy
import gc
import io
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from clearhead.models.loading import bundled

os.environ["HF_HUB_OFFLINE"] = "1"
# PyTorch's compiler asks for it wherever it pauses at a tensor that has a history, and hides the warning by itself
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import GROUPED, IDS, SIZES, T5, made  # noqa: E402

LEFT = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
COLUMNS = ["step", "layer", "module", "head", "entropy", "max_logit", "sink_share"]


def llama(**more):
    return made("Llama", **SIZES | {"num_key_value_heads": 2} | more).train()


def bert():
    return transformers.AutoModel.from_pretrained(bundled(), local_files_only=True).train()


def t5():
    return made("T5", **T5 | {"num_layers": 1}).train()


def gpt_oss():
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2}
    return made("GptOss", **SIZES, **GROUPED, **experts, sliding_window=4).train()


class Direct(nn.Module):
    """No transformers: SDPA called directly, a module of torch's, one of clearhead's."""

    def __init__(self):
        super().__init__()
        self.linear, self.torchs = nn.Linear(16, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.own, self.layer = ch.nn.MultiHeadAttention(16, 4), nn.TransformerEncoderLayer(16, 2, batch_first=True)

    def forward(self, x):
        x = F.scaled_dot_product_attention(self.linear(x)[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]
        return self.layer(self.own(*[self.torchs(x, x, x)[0]] * 3))


def direct():
    torch.manual_seed(0)
    return Direct().train()


MODELS = {
    "llama": (llama, {"input_ids": IDS, "attention_mask": LEFT}),
    "llama, eager": (lambda: llama(attn_implementation="eager"), {"input_ids": IDS, "attention_mask": LEFT}),
    "bert": (bert, {"input_ids": IDS, "attention_mask": LEFT.flip(1)}),
    "t5": (t5, {"input_ids": IDS, "attention_mask": LEFT.flip(1), "decoder_input_ids": IDS[:, :5]}),
    "sinks": (gpt_oss, {"input_ids": IDS}),
    "no transformers": (direct, {"x": torch.ones(2, 5, 16).cumsum(1).sin()}),
}


def gradients(model, inputs, run=None, autocast=False):
    """The gradients of one step, whose dropout is that of a seed."""
    torch.manual_seed(1)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, autocast):
        output = (model if run is None else run)(**inputs)
    output = output if isinstance(output, torch.Tensor) else output[0]
    output.float().square().sum().backward()
    return [output.detach()] + [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def close(one, other, tolerance=1e-5):
    assert [list(row.values())[:3] for row in one] == [list(row.values())[:3] for row in other]
    for a, b in zip(one, other, strict=True):
        assert [a[c] for c in COLUMNS[4:]] == pytest.approx([b[c] for c in COLUMNS[4:]], abs=tolerance, nan_ok=True)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_bit_identical(name, autocast):
    make, inputs = MODELS[name]
    model = make()
    plain = gradients(model, inputs, autocast=autocast)
    with ch.models.monitor(model, every=2) as seen:
        for _ in range(3):
            assert same(plain, gradients(model, inputs, autocast=autocast))
    assert same(plain, gradients(model, inputs, autocast=autocast))
    assert sorted({row["step"] for row in seen.table()}) == [0, 2] and seen.steps == 3
    assert all(list(row) == COLUMNS for row in seen.table())


def by_hand(weights, scores, mask, sinks=None):
    """(H, 3) from dense weights (B, H, L, L) of the keys; mask (B, L), 1 for a word."""
    real = mask.bool()[:, None, :].expand(weights.shape[:3])
    keys = weights / weights.sum(-1, keepdim=True)
    entropy = -torch.special.xlogy(keys, keys).sum(-1)
    first = mask.argmax(1)
    share = torch.stack([w[..., f] for w, f in zip(weights, first, strict=True)]) + 1 - weights.sum(-1)
    largest = scores.amax(-1).masked_fill(~real, -torch.inf).amax((0, 2))
    mean = [x.masked_fill(~real, 0).sum((0, 2)) / real.sum((0, 2)) for x in (entropy, share)]
    return torch.stack([mean[0], largest, mean[1]], -1)


@pytest.mark.parametrize("name", ["llama", "bert", "sinks"])
def test_numbers_are_those_of_eager_attention(name):
    make, inputs = MODELS[name]
    model = make()
    for module in model.modules():  # eager weights in training are those after dropout
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    with ch.models.monitor(model) as seen:
        model(**inputs)
    with torch.no_grad(), ch.watch(model) as recording:
        model(**inputs)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        dense = model(**inputs, output_attentions=True).attentions
    mask = inputs.get("attention_mask", torch.ones_like(IDS))
    rows = seen.table()
    for number, (weights, call) in enumerate(zip(dense, recording.calls, strict=True)):
        heads = weights.shape[1]
        scores = call.weights.scores().masked_fill(call.weights.dense() == 0, -torch.inf)
        want = by_hand(weights.double(), scores, mask)
        got = torch.tensor([[row[c] for c in COLUMNS[4:]] for row in rows[number * heads : (number + 1) * heads]])
        torch.testing.assert_close(got.double(), want.double(), atol=1e-5, rtol=1e-5)
    assert {row["module"] for row in rows} == {call.name for call in recording.calls}


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_not_seen_again(reentrant):
    inputs = MODELS["llama"][1]
    plain = gradients(llama(), inputs)
    model = llama()
    with ch.models.monitor(model, every=1) as seen:
        gradients(model, inputs)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    with ch.models.monitor(model, every=1) as again:
        assert same(plain, gradients(model, inputs))
    close(seen.table(), again.table(), 0)
    assert again.steps == 1


@pytest.mark.parametrize(
    ("name", "how"), [("llama", "torch.compile"), ("llama", "model.compile"), ("llama, eager", "layers")]
)
def test_compiled_code_says_the_same(name, how):
    make, inputs = MODELS[name]
    rows = []
    for compiled in (False, True):
        model = make()
        with ch.models.monitor(model, every=2) as seen:
            run = model
            if compiled and how == "torch.compile":
                run = torch.compile(model, backend="aot_eager", fullgraph=True)
            elif compiled:
                for module in [model] if how == "model.compile" else model.layers:
                    module.compile(backend="eager", fullgraph=True)
            got = [gradients(model, inputs, run) for _ in range(3)]
        rows.append(seen.table())
        if compiled:  # without the monitor's part: it is compiled anew
            assert all(same(got[0], other) for other in (*got, gradients(model, inputs, run)))
    close(*rows)


def test_inductor(inductor_cache):
    """Attention alone of a model: projections, and rotations that are joined with what is beside them."""
    whole, x = llama(), torch.ones(2, 9, 32).cumsum(1).sin()
    rotations = whole.rotary_emb(x, torch.arange(9)[None])
    inputs = {"hidden_states": x, "position_embeddings": rotations, "attention_mask": None}
    make = lambda: copy.deepcopy(whole.layers[0].self_attn)
    with ch.models.monitor(model := make(), every=2) as eager:
        for _ in range(3):
            model(**inputs)
    with ch.models.monitor(model := make(), every=2) as seen:
        run = torch.compile(model, fullgraph=True)
        got = [gradients(model, inputs, run) for _ in range(3)]
    plain = gradients(model, inputs, run)  # compiled anew, without it
    assert all(same(plain, other) for other in got)
    close(seen.table(), eager.table())


def frames(run):
    """How many frames of clearhead's, and of its operation's, are entered."""
    found = []

    def note(frame, event, _):
        if event == "call" and f"{os.sep}clearhead{os.sep}" in frame.f_code.co_filename:
            found.append(frame.f_code.co_qualname)

    gc.collect()
    gc.disable()  # what it would finish now is of other calls
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_when_it_is_removed_no_frame_of_clearheads_is_entered(compiled):
    make, inputs = MODELS["llama"]
    model = make()
    with ch.models.monitor(model, every=2) as seen:
        run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        run(**inputs)  # the compiler's frames are not looked at
        between, on = frames(lambda: run(**inputs)), frames(lambda: run(**inputs))
        assert len(on) > 100 > len(between) > 1
    if not compiled:
        assert len(between) < 15, between  # those of two hooks, and of a function for each layer
    seen.remove()  # again
    gradients(model, inputs, run)  # compiled anew
    assert frames(lambda: gradients(model, inputs, run)) == []
    assert not any("clearhead" in name for module in model.modules() for name in vars(module))
    assert seen.steps == 3 and {row["step"] for row in seen.table()} == {0, 2}


NUMBERS = "entropy", "max_logit", "sink_share"


@pytest.mark.parametrize("seed", range(3))
def test_compiled_code_writes_masks_over_each_other(seed):
    """A compiler may keep the masks of all layers in one buffer, and counts no writes to it."""

    class Reusing(torch.fx.Interpreter):
        buffer = None

        def call_function(self, target, args, kwargs):
            if "observe" in str(target) and args[2] is not None:
                mask = args[2]
                if self.buffer is None:
                    Reusing.buffer = torch.empty_like(mask, memory_format=torch.contiguous_format)
                self.buffer.data.copy_(mask)
                args = (*args[:2], self.buffer, *args[3:])
            return super().call_function(target, args, kwargs)

    generator = np.random.default_rng(seed)
    kinds = ["sliding_attention", "full_attention"]
    kinds = [*generator.permutation(kinds), *generator.choice(kinds, size=int(generator.integers(1, 3)))]
    options = {"head_dim": 8, "layer_types": [str(kind) for kind in kinds], "sliding_window": 3}
    torch.manual_seed(seed)
    model = transformers.Gemma3TextModel(
        transformers.Gemma3TextConfig(
            vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=len(kinds), num_attention_heads=4,
            num_key_value_heads=2, **options,
        )
    ).train()  # fmt: skip
    words = torch.tensor([[1] * 12, [0] * 3 + [1] * 9])  # so that full attention has a mask too
    inputs = {"input_ids": torch.randint(3, 100, (2, 12)), "attention_mask": words}
    tables = []
    for compiled in (False, True):
        torch.compiler.reset()
        with ch.models.monitor(model, every=1) as seen:
            run = torch.compile(model, backend=lambda graph, _: Reusing(graph).run) if compiled else model
            run(**inputs)
        tables.append(seen.table())
    for mine, other in zip(*tables, strict=True):
        assert [mine[name] for name in NUMBERS] == pytest.approx([other[name] for name in NUMBERS], rel=1e-5)
    torch.compiler.reset()


def test_a_model_that_is_compiled_already_is_an_error():
    inputs = MODELS["llama"][1]
    with pytest.raises(ch.UnsupportedError, match="is compiled"):
        ch.models.monitor(torch.compile(llama()))
    model = llama()
    model.layers[0].compile(backend="eager")
    with pytest.raises(ch.UnsupportedError, match="is compiled"):
        ch.models.monitor(model)
    run = torch.compile(model := llama(), backend="eager")
    run(**inputs)
    for other in (model, llama()):  # the compiler would take the same code for it
        with pytest.raises(ch.UnsupportedError, match=r"compiled already(.|\n)*torch.compiler.reset"):
            ch.models.monitor(other)
    torch.compiler.reset()
    with ch.models.monitor(model) as seen:
        run(**inputs)
    assert len(seen.table()) == 8


def test_compiled_code_without_the_interface_is_told_of():
    model = nn.TransformerEncoderLayer(16, 2, batch_first=True).train()
    with ch.models.monitor(model):
        run = torch.compile(model, backend="eager")
        with pytest.warns(UserWarning, match="In compiled code the calls of transformers"):
            run(torch.ones(2, 5, 16))


class Own(nn.Module):
    """Modules of clearhead's, each called twice or inside a checkpoint."""

    def __init__(self, make, again=False, cross=False, **given):
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(2))
        self.again, self.cross, self.given = again, cross, given

    def forward(self, x):
        keys = x.flip(1) if self.cross else x
        for block in [*self.blocks, *self.blocks] if self.again else self.blocks:
            run = lambda x, block=block: block(x, keys if self.cross else x, keys if self.cross else x, **self.given)
            x = x + checkpoint(run, x, use_reentrant=False)
        return x


def heads(**options):
    return lambda: ch.nn.MultiHeadAttention(16, 4, **options)


KEEP = torch.ones(2, 7, 7, dtype=torch.bool).tril(2)
OWN = {
    "causal": (heads(), {"mask": ch.Causal()}),
    "called twice": (heads(num_kv_heads=2), {"mask": ch.SlidingWindow(before=2), "again": True}),
    "cross": (heads(score_bias=ch.ALiBi(4)), {"valid_lens": torch.tensor([3, 7]), "cross": True}),
    "additive": (heads(score=ch.Additive(4, 4, hidden_dim=8)), {"mask": ch.DenseMask(KEEP[:, None])}),
    "Gaussian": (heads(score=ch.Gaussian(bandwidth=2.0)), {"mask": ch.Causal() & ch.FirstKeys(3)}),
    "cosine": (heads(score=ch.Cosine()), {"mask": ch.MaskFunction(lambda b, h, i, j: (i + j) % 3 != 1)}),
    "sinks": (heads(sinks=True), {"mask": ch.Padding(KEEP[:, 2])}),
    "one head": (ch.nn.DotProductAttention, {"mask": torch.ones(7, 7).tril().log()}),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", OWN)
def test_modules_of_clearheads_are_seen_in_compiled_code(name, backend):
    make, given = OWN[name]
    x = torch.ones(2, 7, 16).cumsum(1).sin().cumsum(2).cos().requires_grad_()
    built = Own(make, **given).train()
    with ch.models.monitor(model := copy.deepcopy(built), every=2) as eager:
        for _ in range(3):
            model(x).square().sum().backward()
    with ch.models.monitor(model := copy.deepcopy(built), every=2) as seen:
        run = torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(3):
            run(x).square().sum().backward()
    torch.compiler.reset()
    assert {row["step"] for row in seen.table()} == {0, 2}
    close(seen.table(), eager.table())


def graphs(model, x):
    """The operations of the graphs that the compiler makes."""
    found = []

    def backend(graph, _):
        graphs = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]  # one of each checkpoint
        found.extend(str(node.target) for part in graphs for node in part.graph.nodes)
        return graph.forward

    torch.compile(model, backend=backend, fullgraph=True)(x)
    return found


def test_compiled_code_of_clearheads_modules_has_no_operation_without_a_monitor():
    model, x = Own(heads(), mask=ch.Causal()), torch.ones(2, 7, 16)
    torch.compiler.reset()
    with ch.models.monitor(model.train()):
        assert any("observe" in target for target in graphs(model, x))
    assert not any("observe" in target for target in graphs(model, x))
    torch.compiler.reset()


def test_two_models_in_two_threads_are_seen_in_compiled_code():
    models = [Own(heads(), mask=ch.Causal()).train() for _ in "ab"]
    inputs = [torch.rand(2, 7, 16, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    with ExitStack() as stack:
        compiled = [stack.enter_context(ch.models.monitor(model, every=1)) for model in models]
        runs = [torch.compile(model, backend="eager", fullgraph=True) for model in models]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda run, x: [run(x) for _ in range(3)], runs, inputs))
    torch.compiler.reset()
    for model, x, seen in zip(models, inputs, compiled, strict=True):
        with ch.models.monitor(model, every=1) as eager:
            for _ in range(3):
                model(x)
        close(seen.table(), eager.table())


def test_compiled_parts_of_a_model_beside_eager_ones():
    model = nn.Sequential(*[Own(heads(), mask=ch.Causal()) for _ in range(2)]).train()
    x = torch.ones(2, 7, 16).cumsum(1).sin()
    with ch.models.monitor(model, every=1) as eager:
        model(x)
    with ch.models.monitor(model, every=1) as seen:
        model[1].compile(backend="eager", fullgraph=True)
        model(x)
        model(x)
    torch.compiler.reset()
    close(seen.table()[:16], eager.table())
    assert len(seen.table()) == 32


class Called(nn.Module):
    """A module of clearhead's that can be seen, and a call that cannot."""

    def __init__(self, call):
        super().__init__()
        self.seen, self.other, self.call = ch.nn.MultiHeadAttention(16, 4), ch.nn.DotProductAttention(), call

    def forward(self, x):
        return self.seen(x, x, x) + self.call(self.other, x)


UNREAD = {
    "ch.attention": (lambda _, x: ch.attention(x, x, x), "the attention of 'Called' is not monitored.*DotProductAtt"),
    "a function": (
        lambda other, x: torch.vmap(lambda x: other(x, x, x))(x[:, None])[:, 0],
        "the attention of 'other' is not.*transform of torch.func",
    ),
}


@pytest.mark.parametrize("name", UNREAD)
def test_calls_of_clearheads_that_compiled_code_does_not_show_are_told_of(name):
    call, message = UNREAD[name]
    model, x = Called(call).train(), torch.ones(2, 7, 16).cumsum(1).sin()
    plain = model(x)
    with pytest.warns(UserWarning, match=message) as told:  # noqa: SIM117
        with ch.models.monitor(model, every=1) as seen:
            run = torch.compile(model, backend="eager", fullgraph=True)
            for _ in range(2):
                torch.testing.assert_close(run(x), plain)
    torch.compiler.reset()
    assert len(told) == 1 and {row["module"] for row in seen.table()} == {"seen"} and len(seen.table()) == 8


def test_a_compiled_function_that_calls_the_model():
    model, inputs = llama(), MODELS["llama"][1]
    with ch.models.monitor(model, every=1) as seen:
        step = torch.compile(lambda: model(**inputs).last_hidden_state.sum(), backend="eager")
        step().backward()
        step().backward()
    torch.compiler.reset()
    with ch.models.monitor(model, every=1) as eager:
        model(**inputs)
        model(**inputs)
    close(seen.table(), eager.table())


def test_steps_are_calls_in_training_mode():
    model, told = llama(), []
    with ch.models.monitor(model, every=2, callback=lambda step, rows: told.append((step, rows))) as seen:
        for training in (True, False, True, False, False, True, True):
            model.train(training)
            model(IDS)
    assert seen.steps == 4 and [step for step, _ in told] == [0, 2]
    assert [row for _, rows in told for row in rows] == seen.table() and len(seen.table()) == 2 * 2 * 4
    model.eval()
    with pytest.raises(ch.ClearheadError, match=r"model.train\(\)"), ch.models.monitor(model):
        model(IDS)


def test_tensorboard():
    class Writer:
        def __init__(self):
            self.got = {}

        def add_scalar(self, tag, value, step):
            self.got[tag, step] = value

    with ch.models.monitor(model := llama(), every=1, callback=(writer := Writer())) as seen:
        model(IDS)
        model(IDS)
    assert len(writer.got) == 2 * 2 * 4 * 3
    for row in seen.table():
        for column in COLUMNS[4:]:
            assert writer.got[f"{column}/{row['module']}/{row['head']}", row["step"]] == row[column]


@pytest.mark.parametrize(
    ("layers", "compiled"), [(1, False), (1, True), ("layers.1.*", False), (["layers.1.self_attn"], False)]
)
def test_layers(layers, compiled):
    model = llama()
    with ch.models.monitor(model, layers=layers) as seen:
        (torch.compile(model, backend="eager", fullgraph=True) if compiled else model)(IDS)
    assert {row["module"] for row in seen.table()} == {"layers.1.self_attn"}


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": 2.5}, {"callback": 3}, {"layers": 1.5}])
def test_wrong_arguments_leave_the_model_as_it_was(wrong):
    model = llama()
    with pytest.raises(ch.ClearheadError):
        ch.models.monitor(model, **wrong)
    assert not model._forward_hooks and not model._forward_pre_hooks
    with pytest.raises(ch.ClearheadError, match=r"torch.nn.Module"):
        ch.models.monitor(3)


def test_no_attention_and_no_such_layer():
    model = nn.Linear(3, 3).train()
    with pytest.warns(UserWarning, match="made no attention call") as told, ch.models.monitor(model, every=1) as seen:
        model(model(torch.ones(2, 3)))
    assert len(told) == 1 and seen.steps == 2 and not seen.table()
    with (
        pytest.raises(ch.ClearheadError, match="no call was made by a layer 7"),
        ch.models.monitor(model := llama(), layers=7),
    ):
        model(IDS)


def test_a_pass_that_fails_is_left_out():
    model = llama()

    class Stop(BaseException):
        pass

    plain = gradients(model, {"input_ids": IDS})
    for error in (ValueError, Stop):  # PyTorch runs hooks after an Exception alone
        with ch.models.monitor(model, every=1) as seen:
            hook = model.layers[1].register_forward_pre_hook(lambda *_, error=error: (_ for _ in ()).throw(error("x")))
            with pytest.raises(error):
                model(IDS)
            hook.remove()
            assert same(plain, gradients(model, {"input_ids": IDS}))
        assert {row["step"] for row in seen.table()} == {1} and len(seen.table()) == 8
        assert frames(lambda: model(IDS)) == []


def test_an_error_of_the_callback_comes_through_and_leaves_nothing():
    model = llama()

    def fail(step, rows):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), ch.models.monitor(model, callback=fail):
        model(IDS)
    assert frames(lambda: model(IDS)) == []


def test_copies_and_files_of_a_monitored_model():
    model = llama()
    before = list(model.state_dict())
    with ch.models.monitor(model, every=1) as seen:
        model(IDS)
        other, file = copy.deepcopy(model), io.BytesIO()
        assert len(frames(lambda: other(IDS))) < 8
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        loaded(IDS)
        assert list(model.state_dict()) == before
    assert seen.steps == 1


def test_threads_have_steps_of_their_own():
    model, inputs = llama(), [IDS[:, :length] for length in (4, 5, 6, 7, 8, 9)] * 2
    want = {}
    for ids in inputs[:6]:
        with ch.models.monitor(model) as one:
            model(ids)
        want[ids.shape[1]] = one.table()
    barrier, taken = threading.Barrier(6), {}

    def run(ids):
        barrier.wait(30)
        model(ids).last_hidden_state.sum().backward()

    def note(step, rows):
        taken[step] = rows

    with ch.models.monitor(model, every=2, callback=note) as seen, ThreadPoolExecutor(6) as pool:
        list(pool.map(run, inputs))
    assert seen.steps == 12 and sorted(taken) == [0, 2, 4, 6, 8, 10]
    for rows in taken.values():
        numbers = [[row["entropy"] for row in rows]] * 6
        fits = [
            got == pytest.approx([row["entropy"] for row in one], abs=1e-6)
            for got, one in zip(numbers, want.values(), strict=True)
        ]
        assert sum(fits) == 1  # of one pass alone


def test_a_watch_inside_and_two_monitors():
    model = llama()
    with ch.models.monitor(model, every=1) as seen, ch.models.monitor(model, every=2) as other:
        with ch.watch(model) as recording:
            model(IDS)
        model(IDS)
    assert len(recording.calls) == 2 and len(seen.table()) == 16 and seen.table()[:8] == other.table()


def test_a_module_that_several_layers_share():
    model = made("Albert", **SIZES | {"num_hidden_layers": 3}, embedding_size=16).train()
    with ch.models.monitor(model) as seen:
        model(IDS)
    with torch.no_grad(), ch.watch(model.eval()) as recording:
        model(IDS)
    assert len(recording.calls) == 3 and len(seen.table()) == 4
    weights = [call.weights for call in recording.calls]
    entropy = torch.stack([w.entropy().mean((0, 2)) for w in weights]).mean(0)
    largest = torch.stack([w.reduce(ch.reductions.MaxScore()).amax((0, 2)) for w in weights]).amax(0)
    got = torch.tensor([[row["entropy"], row["max_logit"]] for row in seen.table()])
    torch.testing.assert_close(got, torch.stack([entropy, largest], -1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 2, 0, 4)])
def test_an_empty_batch_has_rows_without_numbers(shape):
    model = ch.nn.DotProductAttention().train()
    with ch.models.monitor(model, every=1) as seen:
        for x in (torch.zeros(shape), torch.ones(1, 2, 3, 4)):
            model(x, x, x)
    empty, full = (seen.table()[i::2] for i in (0, 2))
    assert np.isnan(empty[0]["entropy"]) and empty[0]["max_logit"] == -np.inf
    assert full[0]["max_logit"] == 2.0


def test_the_first_key_of_a_document_and_a_row_of_nothing():
    class Block(nn.Module):
        def forward(self, x, mask):
            return F.scaled_dot_product_attention(x, x, x, mask)

    keep = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    with ch.models.monitor(block := Block().train(), every=1) as seen:
        block(torch.zeros(1, 1, 4, 8), keep)
        block(torch.full((1, 1, 4, 8), torch.nan), None)
        block(torch.zeros(1, 1, 4, 8), torch.zeros(4, 4, dtype=torch.bool))
    first, broken, blind = seen.table()
    assert first["sink_share"] == pytest.approx(0.75) and first["entropy"] == pytest.approx(0.3465736)
    assert broken["entropy"] != broken["entropy"] and broken["max_logit"] != broken["max_logit"]
    assert blind["max_logit"] == -torch.inf and blind["entropy"] != blind["entropy"]


def test_a_step_inside_a_transform_of_torch_func_is_left_out():
    model = llama()
    parameters = dict(model.named_parameters())

    def loss(values):
        return torch.func.functional_call(model, values, (IDS,)).last_hidden_state.sum()

    with ch.models.monitor(model, every=1) as seen:
        loss(parameters).backward()
        with pytest.warns(UserWarning, match=r"layers\.0\.self_attn.*torch\.func"):
            found = torch.func.grad(loss)(parameters)
        torch.testing.assert_close(found["embed_tokens.weight"], model.embed_tokens.weight.grad)
        loss(parameters)
    assert {row["step"] for row in seen.table()} == {0, 2}


@pytest.mark.parametrize("name", ["t5", "clearhead in transformers"])
def test_compiled_padding_and_backends(name):
    """The padding of an encoder–decoder is told apart by the modules' names; a backend may be no plain function."""
    make, inputs = MODELS["t5"] if name == "t5" else (lambda: ch.models.run_on_clearhead(llama()), MODELS["llama"][1])
    rows = []
    for compiled in (False, True):
        model = make()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        with ch.models.monitor(model) as seen:
            (torch.compile(model, backend="eager", fullgraph=True) if compiled else model)(**inputs)
        rows.append(seen.table())
    close(*rows)


def test_removed_by_another_thread_in_the_middle_of_a_pass():
    model, x = Direct().train(), torch.rand(1, 4, 16)
    before = nn.Module._call_impl, F.scaled_dot_product_attention

    class Removing(nn.Module):
        def forward(self, x):
            x = model(x)
            thread = threading.Thread(target=seen.remove)
            thread.start()
            thread.join()
            return model(x)

    holder = Removing().train()
    holder.inner = model
    seen = ch.models.monitor(holder, 1)
    holder(x)
    assert {row["step"] for row in seen.table()} == {0}  # the pass was seen to its end
    assert (nn.Module._call_impl, F.scaled_dot_product_attention) == before
    holder(x)
    assert seen.steps == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_calls_that_cannot_be_read_are_told_of_and_the_step_runs_on(compiled):
    model = llama()
    given = {"input_ids": IDS, "head_mask": torch.ones(4)}
    plain = model(**given).last_hidden_state
    with pytest.warns(UserWarning, match=r"layers\.0\.self_attn.*head_mask") as told:  # noqa: SIM117
        with ch.models.monitor(model, every=1) as seen:
            run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
            for _ in range(2):
                torch.testing.assert_close(run(**given).last_hidden_state, plain)
    torch.compiler.reset()
    assert len(told) == 1 and seen.steps == 2 and not seen.table()
