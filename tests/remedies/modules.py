"""Cases, as in the table: modules, problems that an edit gives back, and models under watch."""

from remedies.table import LLAMA, case

OWN = """
class Own(ch.edits.Edit):
    def __init__(self, change):
        super().__init__()
        self.change = change
    def before(self, problem, spot):
        return self.change(problem)
def edited(edit):
    model = Block()
    with ch.edit(model, edit if isinstance(edit, ch.edits.Edit) else Own(edit)):
        return model(q)
"""
PART = """
module = ch.nn.MultiHeadAttention.from_torch(torch.nn.MultiheadAttention(8, 2, batch_first=True)).eval()
def part(module):
    module.W_q, module.W_k, module.W_v = (row(getattr(module, name)) for name in ('W_q', 'W_k', 'W_v'))
    module.W_o.weight = torch.nn.Parameter(module.W_o.weight[:, :4])
    return module
def row(layer):
    layer.weight, layer.bias = torch.nn.Parameter(layer.weight[:4]), torch.nn.Parameter(layer.bias[:4])
    return layer
def first(module, added):
    q1, k1, v1 = (torch.nn.functional.linear(x, l.weight[:4], l.bias[:4]) for l in (module.W_q, module.W_k, module.W_v))
    return torch.nn.functional.linear(plain(q1, k1, v1, None, added), module.W_o.weight[:, :4], module.W_o.bias)
"""
HOOKED = """
score, query, key = Dot(), q, q
def hooked(hook):
    score.register_forward_pre_hook(hook)
    return score
def changed(score):
    score.register_forward_hook(lambda module, args, output: output.tanh())
    return score
def function(score, *places):
    return score.tanh()
"""
ADDITIVE = """
module = ch.nn.AdditiveAttention(5)
module(x, x, x)
key = query = value = x
def called(change):
    change(module)
    return module(x, x, x)
def formula():
    W_q, W_k = module.W_q.weight, module.W_k.weight
    return torch.softmax(torch.tanh((x @ W_q.T)[:, :, None] + (x @ W_k.T)[:, None]) @ module.w_v, -1) @ x
"""
OPTIONS = """
torch.manual_seed(0)
rotary = ch.nn.RotaryEmbedding(4)
def made(**options):
    torch.manual_seed(1)
    return ch.nn.MultiHeadAttention(8, 2, **options).eval()
def unit(x):
    return x / x.norm(dim=-1, keepdim=True)
class Unit(torch.nn.Module):
    def forward(self, x):
        return unit(x)
def halves(x, at):
    angles = at[:, None] * torch.tensor([1.0, 0.01])
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
def formula(module, q, k, turn=lambda t, at: t, at=None, key_at=None, scale=None, keep=None, added=None):
    split = lambda t: t.unflatten(-1, (2, 4)).transpose(1, 2)
    q, k, v = turn(split(module.W_q(q)), at), turn(split(module.W_k(k)), key_at), split(module.W_v(k))
    q = q if scale is None else q * scale
    return module.W_o(plain(q, k, v, keep, added, scale=None if scale is None else 1.0).transpose(1, 2).flatten(2))
factor, at, key_at = torch.tensor([2.0, 3.0]), torch.arange(4.0), torch.arange(4.0) + 3
"""
NESTED = (
    OPTIONS
    + """
jagged = torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged)
padded, module = jagged.to_padded_tensor(0.0), made()
"""
)
CACHED = (
    OPTIONS
    + """
from clearhead.nn import KeyValueCache
def decoded(cache, mask=None, bias=None, x=x, sizes=(2, 1, 1), **options):
    module = made(**options)
    with torch.no_grad():
        parts = [module(part, part, part, mask, bias=bias, cache=cache) for part in x.split(sizes, 1)]
    return torch.cat(parts, 1)
def within(mode):
    with mode:
        return made()(x, x, x, cache=KeyValueCache(capacity=4))
def slopes(output):
    module = made()
    with torch.enable_grad():
        return torch.autograd.grad(output(module).pow(2).sum(), module.W_k.weight)[0]
even = MaskFunction(lambda b, h, q, k: k % 2 == 0)
apart = torch.arange(4)[:, None] - torch.arange(4)
parts, layer = KeyValueCache(), 0
parts.of(1)
"""
)
CASES = [
    case(
        "ch.nn.DotProductAttention().attention_weights",
        (
            "Call the module first",
            "run(ch.nn.DotProductAttention()).attention_weights.dense().bmm(x) # @",
            "plain(x, x, x)",
        ),
        setup="def run(module):\n    module(x, x, x)\n    return module",
    ),
    # nested inputs
    case(
        "exported(lambda: ch.nn.KeyValueCache())",
        (
            "KeyValueCache(capacity=most)",
            "exported(lambda: ch.nn.@)",
            "of_torch(torch.cat([x, x], 1), None, ~eight)[:, 4:]",
        ),
        setup="""
eight, most = torch.ones(8, 8).tril().bool(), 8
class Twice(torch.nn.Module):
    def __init__(self, make):
        super().__init__()
        self.attend, self.make = attend, make
    def forward(self, x):
        cache = self.make()
        self.attend(x, x, x, Causal(), cache=cache)
        return self.attend(x, x, x, Causal(), cache=cache)
def exported(make):
    shapes = {'x': {1: torch.export.Dim('length', min=2, max=4)}}
    with torch.no_grad():
        return torch.export.export(Twice(make), (x,), dynamic_shapes=shapes).module()(x)
""",
    ),
    case(
        "module(jagged, jagged, jagged, cache=ch.nn.KeyValueCache())",
        (
            "new_lens=",
            "module(padded, padded, padded, cache=ch.nn.KeyValueCache(), @[4, 2])[1, :2]",
            "formula(module, x[1:2, :2], x[1:2, :2])[0]",
        ),
        setup=NESTED,
    ),
    case(
        "ch.explain(module, jagged, jagged, jagged)",
        (
            "query[0][None]",
            "ch.explain(module, @, @, @)['result']",
            "formula(module, x[:1], x[:1])",
        ),
        setup=NESTED + "query = jagged",
    ),
    case(
        "Lengths(jagged)",
        (
            "integers in rows of one length",
            "attention(x[:2], x[:2], x[:2], mask=Lengths([4, 2]))[1] # @",
            "plain(x[1], x[1, :2], x[1, :2])",
        ),
        setup=NESTED,
    ),
    # modules
    case(
        "made(score=ch.Cosine(), scale=2.0)",
        (
            "pass one of the two",
            "made(score=ch.Cosine(0.5))(x, x, x) # @",
            "formula(made(), x, x, lambda t, at: unit(t), scale=2.0)",
        ),
        setup=OPTIONS,
    ),
    case(
        "made(score=lambda q, k: unit(q) @ unit(k).mT, scale=factor)",
        (
            "score=Dot()",
            "made(query_norm=Unit(), key_norm=Unit(), scale=factor, @)(x, x, x)",
            "formula(made(), x, x, lambda t, at: unit(t), scale=factor[:, None, None])",
        ),
        setup=OPTIONS,
    ),
    case(
        "made()(x, x, x, positions=[0, 1, 0, 1])",
        (
            "mask=Documents.from_lengths(",
            "made()(x, x, x, @[2, 2]))",
            "formula(made(), x, x, keep=torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).bool())",
        ),
        setup=OPTIONS,
    ),
    case(
        "made(rotary=rotary)(x[:, :3], x, x, positions=[0, 1, 2])",
        (
            "key_positions",
            "made(rotary=rotary)(x[:, :3], x, x, positions=[0, 1, 2], @=[3, 4, 5, 6])",
            "formula(made(), x[:, :3], x, halves, at[:3], key_at)",
        ),
        setup=OPTIONS,
    ),
    case(
        "(lambda m: m(x, m.prepare(x, x), key_positions=[3, 4, 5, 6]))(made(rotary=rotary))",
        (
            "prepare(key, value, positions=...)",
            "(lambda m: m(x, m.prepare(x, x, positions=[3, 4, 5, 6])))(made(rotary=rotary)) # @",
            "formula(made(), x, x, halves, at, key_at)",
        ),
        setup=OPTIONS,
    ),
    case(
        "rotary(x[..., :4], 3, positions=[3, 4, 5, 6])",
        ("pass one of the two", "rotary(x[..., :4], positions=[3, 4, 5, 6]) # @", "halves(x[..., :4], key_at)"),
        setup=OPTIONS,
    ),
    case(
        "made(query_norm=Unit)",
        (
            "expected a module",
            "made(query_norm=Unit(), key_norm=Unit())(x, x, x) # @",
            "formula(made(), x, x, lambda t, at: unit(t))",
        ),
        setup=OPTIONS,
    ),
    case(
        "part(module)(x, x, x, bias=ALiBi(2))",
        (
            "(B, 1, Lq, Lk)",
            "part(module)(x, x, x, bias=DenseBias(slope.expand(4, 1, 4, 4))) # @",
            "first(module, slope)",
        ),
        setup=PART + "slope = -(torch.arange(4)[:, None] - torch.arange(4)).abs() / 16\n",
    ),
    case(
        "called(lambda module: module.W_q.register_forward_hook(lambda *given: None))",
        (
            "clearhead.attention(W_q(query), W_k(key), value, score=Additive.from_weights(None, None, w_v))",
            "(lambda clearhead, Additive, W_q, W_k, w_v: @)(ch, ch.Additive, module.W_q, module.W_k, module.w_v)",
            "formula()",
        ),
        setup=ADDITIVE,
    ),
    case(
        "later(attend, cache)",
        ("KeyValueCache()", "later(attend, ch.nn.@)", "of_torch(x[:1])"),
        (
            "copy.deepcopy(cache)",
            "of_copy(@)[:, -1:]",
            "(as_torch(x[:1, -1:], x[:1], x[:1])[0])",
        ),
        setup="import copy\ncache = ch.nn.KeyValueCache()\nother = copy.deepcopy(attend)\n"
        "other(x[:1, :3], x[:1, :3], x[:1, :3], cache=cache)\n"
        "def later(attend, cache):\n    return attend(x[:1], x[:1], x[:1], cache=cache)\n"
        "def of_copy(cache):\n    return copy.deepcopy(other)(x[:1, 3:], x[:1, 3:], x[:1, 3:], cache=cache)",
    ),
    case(
        "again(lambda: torch.nn.Parameter(torch.full((2,), 0.5)))",
        (
            "pass a temperature that was made outside of torch.device('meta')",
            "(lambda temperature: again(lambda: temperature))(torch.nn.Parameter(torch.full((2,), 0.5))) # @",
            "formula(zeros(), x, x, scale=torch.full((2, 1, 1), 1.0))",
        ),
        setup=OPTIONS
        + "def zeros():\n    module = made()\n    for p in module.parameters():\n        p.data.zero_()\n    return module\n"
        "def again(temperature):\n    with torch.device('meta'):\n        module = made(temperature=temperature())\n"
        "    module.to_empty(device='cpu').reset_parameters()\n    assert module.temperature.tolist() == [0.5, 0.5]\n"
        "    for layer in (module.W_q, module.W_k, module.W_v, module.W_o):\n"
        "        for p in layer.parameters():\n            p.data.zero_()\n    return module(x, x, x)\n",
    ),
    # caches of fixed capacity
    case(
        "decoded(KeyValueCache(window=4), Causal() & even)",
        (
            "KeyValueCache(capacity=...)",
            "decoded(KeyValueCache(capacity=4), Causal() & even) # @",
            "formula(made(), x, x, keep=low & (torch.arange(4) % 2 == 0))",
        ),
        (
            "Causal(), SlidingWindow(), FirstKeys(), Lengths() and PrefixLM(), with &, | and ~",
            "decoded(KeyValueCache(window=4), Causal() & ~Lengths([1]) | PrefixLM(1) & SlidingWindow(before=1)) # @",
            "formula(made(), x, x, keep=low & ((torch.arange(4) > 0) | (apart <= 1)))",
        ),
        setup=CACHED + "SlidingWindow, PrefixLM = ch.SlidingWindow, ch.PrefixLM\n",
    ),
    case(
        "decoded(KeyValueCache(capacity=3), Causal())",
        (
            "KeyValueCache(capacity=...)",
            "decoded(KeyValueCache(capacity=4), Causal()) # @",
            "formula(made(), x, x, keep=low)",
        ),
        (
            "KeyValueCache(window=..., first=...)",
            "decoded(KeyValueCache(window=1, first=2), Causal()) # @",
            "formula(made(), x, x, keep=low & ((apart < 1) | (torch.arange(4) < 2)))",
        ),
        setup=CACHED,
    ),
    case(
        "made()(x, x, x, cache=KeyValueCache(capacity=4))",
        ("torch.no_grad()", "within(@)", "formula(made(), x, x)"),
        ("torch.inference_mode()", "within(@)", "formula(made(), x, x)"),
        ("KeyValueCache()", "slopes(lambda m: m(x, x, x, cache=@))", "slopes(lambda m: formula(m, x, x))"),
        setup=CACHED,
    ),
    case(
        "decoded(parts)",
        ("cache=cache.of(layer)", "(lambda cache: made()(x, x, x, @))(parts)", "formula(made(), x, x)"),
        setup=CACHED,
    ),
    case(
        "KeyValueCache(window=5).append(q, q)",
        ("cache=", "made()(x, x, x, Causal(), @KeyValueCache(window=5))", "formula(made(), x, x, keep=low)"),
        (
            "KeyValueCache(capacity=...)",
            "(lambda cache: [cache.append(part, part)[0] for part in q.split(3, 2)][1])(KeyValueCache(capacity=5)) # @",
            "q",
        ),
        setup=CACHED,
    ),
    case(
        "ch.nn.MultiHeadAttention.from_torch(theirs(add_zero_attn=True))",
        (
            "Append it to key and value",
            "ours()(x, x, x) # @",
            "theirs(add_zero_attn=True)(x, x, x)[0].detach()",
        ),
        setup="""
def theirs(**options):
    torch.manual_seed(0)
    return torch.nn.MultiheadAttention(8, 2, bias=False, batch_first=True, **options).eval()
def ours():
    module = ch.nn.MultiHeadAttention.from_torch(theirs())
    zeroed = torch.nn.functional.pad(x, (0, 0, 0, 1))
    return lambda q, k, v: module(q, zeroed, zeroed)
""",
    ),
    # what an edit gives back
    case(
        "edited(written)",
        (
            "problem._replace(…)",
            "edited(lambda problem: problem._replace(scores=problem.scores._replace(query=2 * problem.query))) # @",
            "plain(2 * q, q, q, five)",
        ),
        setup=OWN + "def written(problem):\n    problem.query.mul_(2)\n    return problem\n",
    ),
    case(
        "looked(lambda problem: times(problem, next(factors)))",
        (
            "Draw random numbers once",
            "looked(lambda problem, factor=next(factors): times(problem, factor)) # @",
            "soft(2 * q, q, five)",
        ),
        ("look at the model outside of the edit's `with`", "watched()[0].weights[:] # @", "soft(q, q, five)"),
        setup=OWN
        + """
import itertools
factors = itertools.count(2)
def times(problem, factor):
    return problem._replace(scores=problem.scores._replace(scale=factor * problem.scores.scale))
def looked(change):
    model = Block()
    with ch.edit(model, Own(change)), ch.watch(model) as seen:
        model(q)
    return seen[0].weights[:]
""",
    ),
    case(
        "edited(ch.edits.AddBias(torch.zeros(3, 5, 5)))",
        (
            "(..., 2, Lq, Lk)",
            "edited(ch.edits.AddBias(torch.stack([bias, 2 * bias]))) # @",
            "plain(q, q, q, five, torch.stack([bias, 2 * bias]))",
        ),
        ("(..., 1, Lq, Lk)", "edited(ch.edits.AddBias(bias[None])) # @", "plain(q, q, q, five, bias)"),
        setup=OWN + "bias = torch.rand(5, 5)\n",
    ),
    case(
        "warned(lambda: inside(model()))",
        ("torch.no_grad()", "under(@)", "eager() * torch.tensor([0.5, 1.0])[:, None, None]"),
        (
            "outside of the edit's `with`",
            "after() # @",
            "eager()",
        ),
        setup=LLAMA
        + """
def inside(one):
    with torch.enable_grad(), ch.edit(one, ch.edits.ScaleHeads(heads=0, factor=0.5)), ch.models.lazy_attentions(one):
        found = one(IDS, output_attentions=True).attentions
    return found[0] if found else None
def under(no_grad):
    one = model()
    with no_grad, ch.edit(one, ch.edits.ScaleHeads(heads=0, factor=0.5)), ch.models.lazy_attentions(one):
        return one(IDS, output_attentions=True).attentions[0]
def after():
    one = model()
    with ch.edit(one, ch.edits.ScaleHeads(heads=0, factor=0.5)):
        one(IDS)
    with torch.enable_grad(), ch.models.lazy_attentions(one):
        return one(IDS, output_attentions=True).attentions[0].dense().detach()
""",
    ),
    case(
        "torch.export.export(Cached(), (x,))",
        (
            "attention(query, keys, values, valid_lens=lengths)",
            "torch.export.export(Buffers(lambda query, keys, values, lengths: @), (x,)).module()(x)",
            "plain(x, x, x)",
        ),
        setup="""
class Cached(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attend, self.cache = ch.nn.MultiHeadAttention(8, 2), ch.nn.KeyValueCache(capacity=9)
    def forward(self, x):
        return self.attend(x, x, x, Causal(), cache=self.cache)
class Buffers(torch.nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.register_buffer("keys", torch.zeros(4, 9, 8))
    def forward(self, x):
        self.keys[:, :4] = x
        return self.attend(x, self.keys, self.keys, torch.full((4,), 4))
""",
    ),
    # hooks of a score, which is read and not called
    case(
        "attention(q, q, q, score=hooked(lambda module, args: tuple(2 * a for a in args)))",
        ("return None", "attention(q, q, q, score=hooked(lambda module, args: None)) # @", "plain(q, q, q)"),
        setup=HOOKED,
    ),
    case(
        "warned(lambda: attention(q, q, q, score=changed(Dot())))",
        (
            "score=score.then(function)",
            "attention(q, q, q, @)",
            "torch.softmax((q @ q.mT / 8**0.5).tanh(), -1) @ q",
        ),
        ("clearhead.weights(query, key, score=score)", "(lambda clearhead: @)(ch)[:]", "soft(q, q)"),
        setup=HOOKED,
    ),
    # exercises
    case(
        "tried({})",
        ("{'two axes': [scores]}", "tried(@)", "torch.ones(1)"),
        setup="scores = x\n"
        "def tried(inputs):\n"
        "    ch.exercises.tried(torch.exp, torch.exp, inputs)\n"
        "    return torch.ones(1)",
    ),
]
