"""Run uses of clearhead where private names of PyTorch or transformers are missing: a child of `test_private_parts.py`.

Reads a dict of lists of names, and writes for each what every use gave: numbers, or an error. Each runs in a process of
its own, forked before clearhead is imported. A name is missing for the tables alone, PyTorch goes on as it is. What is
compiled runs only beside names that it reaches, so that "" and "all" alone compile nothing.
"""

import builtins
import importlib.util
import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.autograd.forward_ad as forward_ad

warnings.filterwarnings("ignore")
TABLES = [f"clearhead.base.torch_state.{name}" for name in ("private", "torch_private", "active")]
TABLES += ["clearhead.models.interception.transformers_private"]


class Hiding:
    """Loads the tables with a `getattr` that does not find the names that are hidden."""

    def __init__(self, hidden):
        self.hidden = hidden

    def find_spec(self, name, path=None, target=None):
        if name not in TABLES:
            return None
        spec = importlib.util.spec_from_file_location(name, Path(path[0], name.rsplit(".", 1)[1] + ".py"))
        load = spec.loader.exec_module

        def run(module):
            module.getattr = self.getattr
            load(module)

        spec.loader.exec_module = run
        return spec

    def getattr(self, owner, name, *default):
        if name in self.hidden:
            if default:
                return default[0]
            raise AttributeError(name)
        return builtins.getattr(owner, name, *default)


USES = []
COMPILES = {"compiled", "operator_differentiated", "exported"}  # they take seconds: run for what they reach alone
COMPILER = {"", "AutogradFunctionality", "ADInplaceOrView", "_ForceDispatchKeyGuard", "_assert_async", "try_get"}
COMPILER |= {"_dispatch_tls_local_include_set", "_dispatch_tls_local_exclude_set", "_get_dispatch_mode"}


def use(function):
    USES.append(function)
    return function


def inputs(*shape, **given):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*(shape or (2, 2, 5, 8)), generator=generator, **given) for _ in range(3)]


def llama():
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=20, hidden_size=16, intermediate_size=16, **layers)
    return LlamaModel(config).eval()


IDS = torch.arange(6)[None]


@use
def plain(ch):
    return ch.attention(*inputs(), mask=ch.Causal())


@use
def kept_mask(ch):
    rule = ch.MaskFunction(lambda b, h, q, k: q >= k)
    return torch.stack([ch.attention(*inputs(), mask=rule) for _ in range(3)])


@use
def gradients(ch):
    q, k, v = inputs(requires_grad=True)
    return torch.autograd.grad(ch.attention(q, k, v, bias=torch.ones(5, 5)).square().sum(), q)[0]


@use
def learnt_score(ch):
    torch.manual_seed(0)
    score = ch.Bilinear(8, 8)
    q, k, v = inputs()
    return torch.autograd.grad(ch.attention(q, k, v, score=score).square().sum(), list(score.parameters()))[0]


@use
def bug_script(ch):
    model, batch = llama(), {"input_ids": IDS}
    report = ch.audit(model, batch, ch.Causal() & ch.Documents.from_lengths([2, 4]), level="outputs")
    lines = {}
    exec(ch.models.make_bug_script(report, model, batch).rpartition("\n")[0], lines)
    return lines["after"]


@use
def converted_bias(ch):
    return ch.attention(*inputs(), bias=ch.ALiBi(2).double().float())


@use
def score_by_a_function(ch):
    from clearhead.problem import regions

    before, regions.BUDGET = regions.BUDGET, 2**6  # several blocks
    q, k, v = inputs(requires_grad=True)
    found = torch.autograd.grad(ch.attention(q, k, v, score=lambda q, k: q @ k.mT).square().sum(), q)[0]
    regions.BUDGET = before
    return found


@use
def twice(ch):
    q, k, v = inputs(requires_grad=True)
    first = torch.autograd.grad(ch.attention(q, k, v).square().sum(), q, create_graph=True)[0]
    return torch.autograd.grad(first.square().sum(), k)[0]


@use
def fused_twice(ch):
    q, k, v = inputs(requires_grad=True)
    first = torch.autograd.grad(ch.attention(q, k, v, engine="sdpa").square().sum(), q, create_graph=True)[0]
    return torch.autograd.grad(first.square().sum(), k)[0]


@use
def batch_of_losses(ch):
    q, k, v = inputs(requires_grad=True)
    output = ch.attention(q, k, v)
    return torch.autograd.grad(output, q, torch.stack([torch.ones_like(output)] * 2), is_grads_batched=True)[0]


@use
def transformed(ch):
    q, k, v = inputs()
    return torch.func.grad(lambda q: ch.attention(q, k, v).square().sum())(q)


@use
def vectorized(ch):
    q, k, v = inputs(3, 2, 2, 5, 8)
    return torch.func.vmap(lambda q, k, v: ch.attention(q, k, v, mask=ch.Causal()))(q, k, v)


@use
def host_in_transform(ch):
    q, k, v = inputs()
    ids = torch.zeros(2, 5, dtype=torch.int64)
    return torch.func.grad(lambda q: ch.attention(q, k, v, mask=ch.Documents(ids)).square().sum())(q)


@use
def forward_mode(ch):
    q, k, v = inputs()
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(ch.attention(forward_ad.make_dual(q, q), k, v)).tangent


@use
def jvp(ch):
    q, k, v = inputs()
    return torch.func.jvp(lambda q: ch.attention(q, k, v), (q,), (q,))[1]


@use
def autocast(ch):
    with torch.autocast("cpu"):
        return ch.attention(*inputs()).float()


@use
def jit_refused(ch):
    try:
        torch.jit.trace(ch.attention, tuple(inputs()))
    except ch.UnsupportedError as error:
        if "torch.jit.trace" not in str(error):
            raise
    return torch.ones(1)


@use
def fake(ch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        width = ch.attention(*(torch.empty(2, 2, 5, 8) for _ in range(3)), mask=ch.Causal()).shape[-1]
    return torch.ones(width)


@use
def recorded_by_fx(ch):
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = inputs()
    return make_fx(lambda q: ch.attention(q, k, v))(q)(q)


@use
def zeros_without_memory(ch):
    q, k, v = inputs()
    return ch.attention(torch._efficientzerotensor(q.shape), k, v)


@use
def low_precision(ch):
    return ch.attention(*inputs(dtype=torch.bfloat16)).float()


@use
def half_precision(ch):
    return ch.attention(*inputs(dtype=torch.float16)).float()


@use
def rule_in_a_kernel(ch):
    rule = ch.BiasFunction(lambda b, h, i, j: (i - j).float())
    with torch.no_grad():
        return torch.tensor(float(ch.plan(*inputs(), bias=rule, engine="flex").engine == "flex"))


@use
def run_eagerly(ch):
    from clearhead.base.torch_state.contexts import disable_compiler

    return disable_compiler(torch.ones)(1)


@use
def edited(ch):
    model = llama()
    with torch.no_grad(), ch.edit(model, ch.edits.Knockout(layers=0, heads=0, keys=0)):
        return model(input_ids=IDS).last_hidden_state


@use
def written_to(ch):
    q, k, v = inputs(requires_grad=True)
    keep = torch.ones(2, 5, dtype=torch.bool)
    output = ch.attention(q, k, v, mask=ch.Padding(keep))
    return torch.autograd.grad(output.sum(), v)[0]


@use
def compiled(ch):
    q, k, v = inputs(requires_grad=True)
    check = torch.tensor([3, 5])

    @torch.compile(backend="eager")
    def run(q, k, v):
        return ch.attention(q, k, v, mask=ch.Lengths(check))

    return torch.autograd.grad(run(q, k, v).square().sum(), q)[0]


@use
def exported(ch):
    class Module(torch.nn.Module):
        def forward(self, q, k, v, lengths):
            return ch.attention(q, k, v, mask=ch.Lengths(lengths))

    given = (*inputs(), torch.tensor([3, 5]))
    return torch.export.export(Module(), given, strict=False).module()(*given)


@use
def operator_differentiated(ch):
    q, k, v = inputs(requires_grad=True)
    mask = ch.SlidingWindow(before=2)
    run = torch.compile(lambda q, k, v: ch.attention(q, k, v, mask=mask, engine="sdpa"), backend="aot_eager")
    return torch.autograd.grad(run(q, k, v).square().sum(), q)[0]


@use
def module(ch):
    torch.manual_seed(0)
    return ch.nn.MultiHeadAttention(8, 2)(*inputs(2, 5, 8))


@use
def additive_module(ch):
    torch.manual_seed(0)
    return ch.nn.AdditiveAttention(8)(*inputs(2, 5, 8))


@use
def explained_module(ch):
    torch.manual_seed(0)
    layer = ch.nn.MultiHeadAttention(8, 2).eval()
    return torch.tensor(len(str(ch.explain(layer, *inputs(1, 5, 8)))) / 1.0)


@use
def nested(ch):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    layer.self_attn = ch.nn.TorchMultiheadAttention.from_torch(layer.self_attn)
    rows = torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(5, 8)])
    return layer.self_attn(rows, rows, rows, need_weights=False)[0].to_padded_tensor(0.0)


@use
def watched_encoder(ch):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True), 1).eval()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad(), ch.watch(layer) as seen:
        layer(inputs(2, 5, 8)[0], src_key_padding_mask=padding)
    return seen[0].weights[:]


@use
def watched(ch):
    model = llama()
    with torch.no_grad(), ch.watch(model) as seen:
        model(input_ids=IDS)
    return seen[0].weights[:]


@use
def watched_generation(ch):
    model = llama()
    with torch.no_grad(), ch.watch(model) as seen:
        cache = model(input_ids=IDS[:, :4], use_cache=True).past_key_values
        model(input_ids=IDS[:, 4:5], past_key_values=cache)
    return seen[1].weights[:]


@use
def watched_compiled(ch):
    model = llama()
    try:
        with ch.watch(torch.compile(model)):
            pass
    except ch.UnsupportedError as error:
        if "torch.compile" not in str(error):
            raise
    return torch.ones(1)


@use
def nothing_seen(ch):
    try:
        with ch.watch(torch.nn.Linear(2, 2)) as seen:
            seen.model(torch.ones(2)) if hasattr(seen, "model") else None
    except ch.UnsupportedError:
        raise
    except ch.ClearheadError:
        pass
    return torch.ones(1)


@use
def lazy(ch):
    model = llama()
    with torch.no_grad(), ch.models.lazy_attentions(model):
        lazy = model(input_ids=IDS, output_attentions=True).attentions[0]
        plain = model(input_ids=IDS).last_hidden_state
    with torch._C.DisableTorchFunctionSubclass():
        copied = lazy + 1.0
    return torch.cat([t.flatten() for t in (lazy.mean(1), copied, plain, torch.stack([lazy])[0])])


@use
def on_clearhead(ch):
    model = llama()
    ch.models.run_on_clearhead(model)
    with torch.no_grad():
        return model(input_ids=IDS).last_hidden_state


@use
def audited(ch):
    report = ch.audit(llama(), {"input_ids": IDS}, ch.Causal())
    return torch.tensor([float(report.ok)])


@use
def monitored(ch):
    model = llama().train()
    with ch.models.monitor(model, every=1) as monitor:
        model(input_ids=IDS)
    return torch.tensor([row["entropy"] for row in monitor.table()])


def outcome(function, ch):
    try:
        with warnings.catch_warnings():
            # a recorder that misses a part leaves the call out, with a warning that has the error's words
            warnings.filterwarnings("error", ".*which clearhead needs to", UserWarning)
            return [round(float(x), 7) for x in function(ch).detach().flatten()]
    except UserWarning as warning:
        return f"UnsupportedError: {warning}"
    except Exception as error:
        while error.__cause__ is not None and not isinstance(error, ch.UnsupportedError):
            error = error.__cause__
        return f"{type(error).__name__}: {error}"


def main():
    import torch._dynamo
    import transformers.models.llama.modeling_llama  # noqa: F401

    torch.set_num_threads(1)
    given, found = json.load(sys.stdin), {}
    compiles = not given.keys() <= {"", "all"}
    for name, hidden in given.items():
        read, write = os.pipe()
        child = os.fork()
        if not child:
            sys.meta_path.insert(0, Hiding(hidden))
            import clearhead as ch

            reaches = compiles and not COMPILER.isdisjoint(hidden or [""])
            reached = [use for use in USES if reaches or use.__name__ not in COMPILES]
            said = json.dumps({use.__name__: outcome(use, ch) for use in reached})
            with os.fdopen(write, "w") as file:
                file.write(said)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as file:
            said = file.read()
        os.waitpid(child, 0)
        found[name] = json.loads(said)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
