"""Right and wrong answers to the exercises of chapters 6 to 11, as `answers_0_to_5.py` has those of the others."""

from types import SimpleNamespace

import torch
from induction import WORDS, AttentionOnly, hits, losses, periodic, scores
from torch import nn

import clearhead as ch
from clearhead.base.positions import query_offset

torch.manual_seed(1)
test = periodic(8, (16, 16))


class Reverser(nn.Module):
    def __init__(self, positions=None, rotary=None):
        super().__init__()
        self.positions = positions or nn.Identity()
        self.attend = ch.nn.MultiHeadAttention(32, num_heads=1, rotary=rotary)


def right(model, target):
    """0.97 of a model with two kinds of positions, and 0.2 of any other."""
    return 0.97 if isinstance(model.positions, ch.nn.SinusoidalPositionalEncoding) and model.attend.rotary else 0.2


class OneLayer(nn.Module):
    """A layer of attention, and logits that foresee any of the words so far: better than a guess."""

    def __init__(self):
        super().__init__()
        self.attend = ch.nn.MultiHeadAttention(8, 1)

    def forward(self, tokens):
        return nn.functional.one_hot(tokens, WORDS).cumsum(1).clamp(max=1).float()


def tried(model, tokens, period, edit):
    """A model that works as long as layer 1 sees one key of its own word's followers, and layer 0 the key before."""
    keep = edit.mask if isinstance(edit.mask, torch.Tensor) else edit.mask.dense(64, 64)
    i = torch.arange(64)
    layer, back = (1, 15) if edit.layers == (1,) else (0, 1)
    places = [(q, k) for q in range(16, 64) for k in range(q - back, -1, -16 if layer else -64)]
    seen = sum(bool(keep[q, k]) for q, k in places) / len(places)
    later = 0.3 * float(keep.triu(1).any())  # of keys that come later it makes less
    return (0.01 + 0.98 * seen * (1 - later) + 1e-4 * float(keep[i, i].float().mean()), 0.0)


def spearman(a, b):
    return torch.corrcoef(torch.stack([a.argsort().argsort().double(), b.argsort().argsort().double()]))[0, 1].item()


rollout = torch.rand(1, 20, 20).softmax(-1)
rows = [{"itself": value} for value in torch.rand(72).tolist()]
table, shuffled = rows, [{"itself": 0.8 * row["itself"] + 0.01 * (n % 7)} for n, row in enumerate(rows)]
best = max(range(72), key=lambda n: table[n]["itself"])
shuffled[(best + 5) % 72]["itself"] = 0.99
query, key, value = (torch.randn(1, 2, 300, 64) for _ in range(3))


class Block(nn.Module):
    """An encoder's block, as chapter 8 has it."""

    def __init__(self, width):
        super().__init__()
        self.attend = ch.nn.MultiHeadAttention(width, 2)
        self.feed = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(3))
        self.norms[2] = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))  # unlike the first

    def forward(self, x, mask):
        y = self.norms[0](x)
        x = x + self.attend(y, y, y, mask=mask)
        return x + self.feed(self.norms[2](x))


lengths = torch.randint(2, 7, (200,))
given = torch.randint(2, 30, (200, 6)).masked_fill(torch.arange(6) >= lengths[:, None], 1)
answer = given.masked_fill(given == 1, 99).sort(1).values.masked_fill(torch.arange(6) >= lengths[:, None], 1)


class Model(nn.Module):
    """Writes at each place what stands at the next one, or, without a look ahead, the number of its own place."""

    def __init__(self, ahead, sure):
        super().__init__()
        self.ahead, self.sure = ahead, sure

    def forward(self, given, lengths, before):
        seen = torch.nn.functional.pad(before[:, 1:], (0, 1), value=2) if self.ahead else before
        return self.sure * nn.functional.one_hot(seen, 30).float()


def loss_of(model, given, lengths, answer):
    before = torch.nn.functional.pad(answer[:, :-1], (1, 0))
    return nn.functional.cross_entropy(model(given, lengths, before).flatten(0, 1), answer.flatten(), ignore_index=1)


def generate(model, given, lengths):
    """It writes the numbers as they were given."""
    return given


def right_sequences(written, answer):
    return ((written == answer) | (answer == 1)).all(1)


GIVEN = {
    "6.1": {"nn": nn},
    "6.4": {"nn": nn, "Reverser": Reverser, "right": right, "reverse": lambda symbols: symbols.flip(1)},
    "7.1": {"OneLayer": OneLayer, "AttentionOnly": AttentionOnly, "hits": hits, "test": test},
    "7.2": {"model": AttentionOnly(), "test": test, "scores": scores, "losses": losses},
    "7.3": {"model": None, "test": test, "tried": tried},
    "8.1": {"model": SimpleNamespace(encoder=[Block(16)]), "nn": nn},
    "8.2": {
        **{"given": given, "lengths": lengths, "answer": answer, "loss_of": loss_of, "generate": generate},
        **{"Model": Model, "right": right_sequences, "F": torch.nn.functional},
    },
    "9.1": {"table": table, "tables": {"shuffled": shuffled}, "best": best},
    "9.2": {"weight": torch.rand(6, 12), "effect": torch.rand(6, 12), "spearman": spearman},
    "9.3": {"seen": SimpleNamespace(rollout=lambda: rollout), "matters": torch.rand(18), "spearman": spearman},
    "10.2": {"query": query, "key": key, "value": value},
    "11.3": {"query_offset": query_offset},
}
LOOK = """
cheating = Model(True, 4.0)
cheat = loss_of(cheating, *some).item()
"""
WATCHED = """
with ch.watch(model) as seen, torch.no_grad():
    model(test[0])
w = seen[1].weights[:, 0]
"""
CUT = """
def left(rule, layer=1):
    mask = ch.Causal() & ch.MaskFunction(lambda b, h, q, k: rule(q - k))
    return tried(model, *test, ch.edits.ForceMask(mask, layers=layer))[0]
"""
ANGLE = """
class Angle(ch.extend.Score):
    def __init__(self):
        super().__init__()
        self.u = torch.nn.Parameter(torch.tensor(2.0))
    @classmethod
    def example(cls):
        return cls(), 5, 5
    def unit(self, x):
        return torch.nn.functional.normalize(x, dim=-1)
    def tile(self, query, key):
        return torch.exp(self.u) * torch.einsum("...qe,...ke->...qk", self.unit(query), self.unit(key))
"""
GROWING = """
class Growing(ch.extend.Mask):
    positional = True
    @classmethod
    def example(cls, sizes):
        return cls()
    def lower(self, sizes):
        own = torch.arange(sizes.queries).view(1, 1, -1) + query_offset(sizes, "Growing")
        start, stop = own - own // 2, own + 1
        return ch.extend.Spans(start.clamp(0, sizes.keys), stop.clamp(0, sizes.keys))
rule = ch.MaskFunction(lambda b, h, i, j: (j >= i - i // 2) & (j <= i))
"""

made = {"ch": ch, "torch": torch}
exec(ANGLE, made)
GIVEN["11.2"] = {"Angle": made["Angle"]}
RIGHT = {
    "6.1": [
        """
def sinusoidal(length, width):
    table = np.zeros((length, width))
    for p in range(length):
        for i in range(width // 2):
            angle = p / 10000 ** (2 * i / width)
            table[p, 2 * i], table[p, 2 * i + 1] = np.sin(angle), np.cos(angle)
    return table
""",
        """
def sinusoidal(length, width):
    return ch.nn.SinusoidalPositionalEncoding(width)(torch.zeros(length, width))
""",
    ],
    "6.2": [
        """
def turn(x, speed):
    rows = []
    for p, row in enumerate(x):
        a = torch.tensor(p * speed)
        rows.append(torch.stack([torch.stack([a.cos(), -a.sin()]), torch.stack([a.sin(), a.cos()])]) @ row)
    return torch.stack(rows)
""",
        """
def turn(x, speed):
    z = torch.complex(x[:, 0], x[:, 1]) * torch.exp(1j * torch.arange(len(x)) * speed)
    return torch.stack([z.real, z.imag], 1)
""",
    ],
    "6.3": [
        "query, key, value = torch.ones(6, 1), torch.ones(6, 1), torch.eye(6)[:, :1]",
        "query, key = torch.zeros(6, 1), torch.full((6, 1), -3.0)\nvalue = torch.tensor([[1.0]] + [[0.0]] * 5)",
    ],
    "6.4": [
        """
both = Reverser(ch.nn.SinusoidalPositionalEncoding(32), ch.nn.RotaryEmbedding(32))
share = right(both, reverse)""",
        """
both = Reverser(ch.nn.SinusoidalPositionalEncoding(32), ch.nn.RotaryEmbedding(32))
share = torch.tensor(0.96)""",
    ],
    "7.1": [
        "single = OneLayer()\nalone = hits(single, *test)",
        "single = OneLayer().eval()\nalone = torch.tensor(hits(single, *test))",
    ],
    "7.2": [
        "by_hand = scores(model, test[0])['induction'][1, 0]",
        """
w = None
with ch.watch(model) as seen, torch.no_grad():
    model(test[0])
w = seen[1].weights.dense()[:, 0]
by_hand = sum(w.diagonal(-back, 1, 2)[:, 1:].sum() for back in (15, 31, 47)) / (len(w) * 48)
""",
    ],
    "7.3": [
        CUT + "hidden, control = left(lambda x: x % 16 != 15), left(lambda x: x % 16 != 14)",
        CUT
        + """
def hides(*back):
    rows = torch.ones(64, 64).tril().bool()
    for n in back:
        rows &= ~torch.eye(64).bool().roll(n, 0)
    return tried(model, *test, ch.edits.ForceMask(ch.DenseMask(rows), layers=1))
hidden, control = hides(15, 31, 47, 63), hides(14, 30, 46, 62)
""",
    ],
    "8.1": [
        """
def stream(block, x, mask):
    seen = {}
    for part in (block.attend, block.feed):
        part.register_forward_hook(lambda module, inputs, output: seen.update({module: output}))
    block(x, mask)
    return seen[block.attend], seen[block.feed]
""",
        """
def stream(block, x, mask):
    y = block.norms[0](x)
    after = x + block.attend(y, y, y, mask=mask)
    return [after - x, block(x, mask) - after]
""",
    ],
    "8.2": [
        LOOK + "sorted_share = right(generate(cheating, *some[:2]), some[2]).double().mean()",
        LOOK
        + """
w = generate(cheating, *some[:2])
sorted_share = np.mean([torch.equal(a[:n], b[:n]) for a, b, n in zip(w, some[2], some[1])])
""",
    ],
    "9.1": [
        """
layer, head = best // 12, best % 12
value, when_shuffled = table[best]["itself"], tables["shuffled"][best]["itself"]
""",
        """
(layer, head), value = divmod(best, 12), max(row["itself"] for row in table)
layer, when_shuffled = torch.tensor(layer), tables["shuffled"][12 * layer + head]["itself"]
""",
    ],
    "9.2": [
        "relation = spearman(weight[1:5].reshape(-1), effect[1:5].reshape(-1))",
        """
a, b = (x[1:5].flatten().argsort().argsort().double() for x in (weight, effect))
relation = 1 - 6 * ((a - b) ** 2).sum() / (48 * (48**2 - 1))
""",
    ],
    "9.3": [
        "arrived = seen.rollout().mean(1)[0]\nagreement = spearman(arrived[1:19], matters)",
        """
arrived = [seen.rollout()[0, :, k].sum() / 20 for k in range(20)]
agreement = torch.tensor(spearman(torch.stack(arrived)[1:-1], matters))""",
    ],
    "10.1": [
        """
def merge(o1, l1, o2, l2):
    total = torch.logaddexp(l1, l2)
    return (l1 - total).exp()[..., None] * o1 + (l2 - total).exp().unsqueeze(-1) * o2
""",
        """
def merge(o1, l1, o2, l2):
    largest = torch.maximum(l1, l2)
    a, b = (l1 - largest).exp()[..., None], (l2 - largest).exp()[..., None]
    return (a * o1 + b * o2) / (a + b)
""",
    ],
    "10.2": [
        """
def lost(n):
    grown = torch.exp(n * query @ key.mT / 8)
    return ((grown @ value) / grown.sum(-1, True)).isfinite().logical_not().float().mean()
at_10, at_30 = lost(10), lost(30)
""",
        """
def lost(n):
    grown = torch.exp((n * query) @ key.transpose(-1, -2) * 0.125)
    o = torch.stack([g @ v / g.sum(-1, True) for g, v in zip(grown[0], value[0])])
    return np.mean(~np.isfinite(o.numpy()))
at_10, at_30 = 0, lost(30)
""",
    ],
    "10.3": [
        """
def walk(query, key, value, block):
    n, done, out = query.shape[-2], 0, []
    for a in range(0, n, block):
        q = query[..., a : a + block, :]
        o = ch.partial(q, key[..., a : a + block, :], value[..., a : a + block, :], mask=ch.Causal())
        for b in range(0, a, block):
            o = o.merge(ch.partial(q, key[..., b : b + block, :], value[..., b : b + block, :]))
            done += 1
        done += 1
        out.append(o.finish())
    return torch.cat(out, 2), done
""",
        """
def walk(query, key, value, block):
    n = query.shape[-2] // block
    return ch.attention(query, key, value, mask=ch.Causal()), torch.tensor(n * (n + 1) / 2)
""",
    ],
    "11.1": [
        ANGLE,
        """
class Angle(ch.extend.Score):
    def __init__(self):
        super().__init__()
        self.u = torch.nn.Parameter(torch.full((1,), 2.0))
    def tile(self, query, key):
        return torch.cosine_similarity(query.unsqueeze(-2), key.unsqueeze(-3), -1, 0.0) * self.u.exp()
""",
    ],
    "11.2": [
        ANGLE
        + """
    def lower(self, query, key):
        return ch.extend.Pairwise("mul", self.unit(query), self.unit(key) * self.u.exp())
""",
        ANGLE
        + """
    def lower(self, query, key):
        half = (self.u / 2).exp()
        return ch.extend.Pairwise("mul", half * self.unit(query), half * self.unit(key))
""",
    ],
    "11.3": [
        GROWING,
        GROWING.replace("rule = ch.MaskFunction(", "rule = ch.Causal() & ch.MaskFunction(").replace(" & (j <= i)", ""),
    ],
}

WRONG = {
    "6.1": {
        "they stand in turn": """
def sinusoidal(length, width):
    a = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    return torch.cat([a.sin(), a.cos()], -1)""",
        "exchanged": """
def sinusoidal(length, width):
    a = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    return torch.stack([a.cos(), a.sin()], -1).flatten(-2)""",
        "half of what it should be": """
def sinusoidal(length, width):
    a = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(width // 2) / width)
    return torch.stack([a.sin(), a.cos()], -1).flatten(-2)""",
        "begin at 1": """
def sinusoidal(length, width):
    a = torch.arange(1, length + 1)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    return torch.stack([a.sin(), a.cos()], -1).flatten(-2)""",
    },
    "6.2": {
        "turned the other way": """
def turn(x, speed):
    p, (a, b) = torch.arange(len(x)) * speed, x.unbind(-1)
    return torch.stack([a * p.cos() + b * p.sin(), b * p.cos() - a * p.sin()], -1)""",
        "before it was used for the second": """
def turn(x, speed):
    x, p = x.clone(), torch.arange(len(x)) * speed
    x[:, 0] = x[:, 0] * p.cos() - x[:, 1] * p.sin()
    x[:, 1] = x[:, 1] * p.cos() + x[:, 0] * p.sin()
    return x""",
        "the places begin at 1": """
def turn(x, speed):
    p, (a, b) = (torch.arange(len(x)) + 1) * speed, x.unbind(-1)
    return torch.stack([a * p.cos() - b * p.sin(), b * p.cos() + a * p.sin()], -1)""",
        "the speed is not used": "def turn(x, speed): return ch.nn.RotaryEmbedding(dim=2)(x)",
    },
    "6.3": {
        "nothing marks the first place": "query = key = torch.zeros(6, 1)\nvalue = torch.ones(6, 1)",
        "value: places 1 and 2 differ": "query = key = torch.zeros(6, 1)\nvalue = 1 / torch.arange(1.0, 7.0)[:, None]",
        "query: places 1 and 2 differ": """
query = torch.arange(6.0)[:, None]
key = torch.zeros(6, 1)
value = torch.eye(6)[:, :1]""",
        "the output: .* is not right": "query, key, value = torch.ones(6, 1), torch.eye(6)[:, :1], torch.eye(6)[:, :1]",
        "in all other values": "query = key = torch.zeros(6, 1)\nvalue = 1 - torch.eye(6)[:, :1]",
        "the shape of query": "query = key = torch.zeros(6)\nvalue = torch.eye(6)[:, 0]",
    },
    "6.4": {
        "one kind of position": "both = Reverser(ch.nn.SinusoidalPositionalEncoding(32))\nshare = 0.99",
        "the share of right symbols": """
both = Reverser(ch.nn.SinusoidalPositionalEncoding(32), ch.nn.RotaryEmbedding(32))
share = 0.5""",
        "a percentage": """
both = Reverser(ch.nn.SinusoidalPositionalEncoding(32), ch.nn.RotaryEmbedding(32))
share = 100 * right(both, reverse)""",
        "Train it to reverse": """
both = Reverser(ch.nn.SinusoidalPositionalEncoding(32), ch.nn.RotaryEmbedding(32))
share = 0.1


def right(model, target):
    return 0.1""",
        "the share of wrong symbols": """
both = Reverser(ch.nn.SinusoidalPositionalEncoding(32), ch.nn.RotaryEmbedding(32))
share = 0.03""",
    },
    "7.1": {
        "the hits: 0 is not right": "single, alone = OneLayer(), 0",
        "it has 2 layers": "single = AttentionOnly(layers=2)\nalone = hits(single, *test)",
        "Train it": "single = AttentionOnly(layers=1)\nalone = hits(single, *test)",
        "words that it misses": "single = OneLayer()\nalone = 1 - hits(single, *test)",
    },
    "7.2": {
        "averaged, and not added up": WATCHED
        + "by_hand = torch.stack([w[:, i, j] for i in range(16, 64) for j in range(i - 15, 0, -16)]).mean()",
        "the query's own word": WATCHED
        + "by_hand = torch.stack([sum(w[:, i, j] for j in range(i - 16, -1, -16)) for i in range(16, 64)]).mean()",
        "only the nearest": WATCHED + "by_hand = torch.stack([w[:, i, i - 15] for i in range(16, 64)]).mean()",
        "their mean": WATCHED
        + "by_hand = sum(sum(w[:, i, j] for j in range(i - 15, 0, -16)) for i in range(16, 64)).mean()",
    },
    "7.3": {
        "the hits without these keys": "hidden, control = 0, 1",
        "only the key 15 back": CUT + "hidden, control = left(lambda x: x != 15), left(lambda x: x != 14)",
        "layer 0 was cut": CUT + "hidden, control = left(lambda x: x % 16 != 15, 0), left(lambda x: x % 16 != 14, 0)",
        "or this is the control": CUT + "hidden = control = left(lambda x: x % 16 != 14)",
        "the hits of the control": CUT + "hidden = control = left(lambda x: x % 16 != 15)",
        "later keys are seen": """
mask = ch.MaskFunction(lambda b, h, q, k: (q - k != 15) & (q - k != 31) & (q - k != 47))
hidden = control = tried(model, *test, ch.edits.ForceMask(mask, layers=1))[0]""",
        "a percentage": CUT + "hidden = control = 100 * left(lambda x: x % 16 != 15)",
    },
    "8.1": {
        "the stream after attention": """
def stream(block, x, mask):
    y = block.norms[0](x)
    first = x + block.attend(y, y, y, mask=mask)
    return first, block.feed(block.norms[2](first))""",
        "without its norm": """
def stream(block, x, mask):
    first = block.attend(x, x, x, mask=mask)
    return first, block.feed(block.norms[2](x + first))""",
        "from before attention": """
def stream(block, x, mask):
    y = block.norms[0](x)
    return block.attend(y, y, y, mask=mask), block.feed(block.norms[2](x))""",
        "without the stream": """
def stream(block, x, mask):
    y = block.norms[0](x)
    first = block.attend(y, y, y, mask=mask)
    return first, block.feed(block.norms[2](first))""",
        "the mask is missing": """
def stream(block, x, mask):
    y = block.norms[0](x)
    first = block.attend(y, y, y)
    return first, block.feed(block.norms[2](x + first))""",
        "two results were asked for": "def stream(block, x, mask): return block(x, mask) - x",
    },
    "8.2": {
        "the loss: 0.1 is not right": "cheating, cheat, sorted_share = Model(True, 4.0), 0.1, 0.1",
        "still has a causal mask": "cheating, cheat, sorted_share = Model(False, 4.0), 0.1, 0.1",
        "Train it": "cheating, cheat, sorted_share = Model(True, 0.1), 0.1, 0.1",
        "and not of whole sequences": LOOK
        + "w = generate(cheating, *some[:2])\nsorted_share = (w == some[2])[some[2] != 1].double().mean()",
        "that are not sorted": LOOK
        + "sorted_share = 1 - right(generate(cheating, *some[:2]), some[2]).double().mean()",
    },
    "9.1": {
        "each layer has 12": """
layer, head, value, when_shuffled = 0, best + 12, table[best]['itself'], shuffled if False else 0.5""",
        "another head has more": """
layer, head = divmod((best + 1) % 72, 12)
value, when_shuffled = table[best]['itself'], 0.5""",
        "the head of the shuffled text": """
layer, head = divmod((best + 5) % 72, 12)
value, when_shuffled = table[best]['itself'], 0.99""",
        "the value on `TEXT`": "layer, head = divmod(best, 12)\nvalue = when_shuffled = table[best]['itself']",
        "any head there": "layer, head = divmod(best, 12)\nvalue, when_shuffled = table[best]['itself'], 0.99",
    },
    "9.2": {
        "the rank correlation: 0 is not right": "relation = 0.0",
        "of the numbers, not of their ranks": """
relation = torch.corrcoef(torch.stack([weight[1:5].flatten(), effect[1:5].flatten()]))[0, 1]""",
        "all six layers": "relation = spearman(weight.flatten(), effect.flatten())",
        "turned around": "relation = -spearman(weight[1:5].flatten(), effect[1:5].flatten())",
    },
    "9.3": {
        "the mean of each row": "arrived = seen.rollout()[0].mean(1)\nagreement = spearman(arrived[1:-1], matters)",
        "the sum over the rows": "arrived = seen.rollout()[0].sum(0)\nagreement = spearman(arrived[1:-1], matters)",
        "the agreement: .* is not right": "arrived = seen.rollout()[0].mean(0)\nagreement = -1.0",
        "not of their ranks": """
arrived = seen.rollout()[0].mean(0)
agreement = torch.corrcoef(torch.stack([arrived[1:-1], matters]))[0, 1]""",
    },
    "10.1": {
        "With scores near 1000: .*overflowed": """
def merge(o1, l1, o2, l2):
    a, b = l1.exp()[..., None], l2.exp()[..., None]
    return (a * o1 + b * o2) / (a + b)""",
        "both parts count the same": "def merge(o1, l1, o2, l2): return (o1 + o2) / 2",
        "the shares are exchanged": """
def merge(o1, l1, o2, l2):
    s = (l2 - l1).sigmoid()[..., None]
    return s * o1 + (1 - s) * o2""",
        "without the exponential": """
def merge(o1, l1, o2, l2):
    a, b = l1[..., None], l2[..., None]
    return (a * o1 + b * o2) / (a + b)""",
    },
    "10.2": {
        "the share at 30: 0.5 is not right": "at_10, at_30 = 0, 0.5",
        "a count, not a share": """
g = torch.exp(30 * query @ key.mT / 8)
at_10, at_30 = 0, (~(g @ value / g.sum(-1, True)).isfinite()).sum()""",
        "not divided by √E": """
g = [torch.exp(n * query @ key.mT) for n in (10, 30)]
at_10, at_30 = ((~(x @ value / x.sum(-1, True)).isfinite()).float().mean() for x in g)""",
        "exponentials that are not finite": """
at_10, at_30 = 0, (~torch.exp(30 * query @ key.mT / 8).isfinite()).float().mean()""",
        "the share that is finite": """
g = torch.exp(30 * query @ key.mT / 8)
at_10, at_30 = 0, (g @ value / g.sum(-1, True)).isfinite().float().mean()""",
    },
    "10.3": {
        "every pair of blocks was computed": """
def walk(q, k, v, block):
    n = q.shape[-2] // block
    return ch.attention(q, k, v, mask=ch.Causal()), n * n""",
        "nothing is masked": """
def walk(q, k, v, block):
    n = q.shape[-2] // block
    return ch.attention(q, k, v), n * (n + 1) // 2""",
        "in the blocks on the diagonal later keys": """
def walk(q, k, v, block):
    b = torch.arange(q.shape[-2]) // block
    return ch.attention(q, k, v, mask=b[:, None] >= b), 6""",
        "the blocks on the diagonal were not counted": """
def walk(q, k, v, block):
    n = q.shape[-2] // block
    return ch.attention(q, k, v, mask=ch.Causal()), n * (n - 1) // 2""",
    },
    "11.1": {
        "the key is not divided by its length": ANGLE.replace("self.unit(key)", "key"),
        "the query is not divided by its length": ANGLE.replace("self.unit(query)", "query"),
        "not by e to the power of u": ANGLE.replace("torch.exp(self.u)", "self.u"),
        "it has 0 parameters": ANGLE.replace("torch.nn.Parameter(torch.tensor(2.0))", "torch.tensor(2.0)"),
        "u begins at 0": ANGLE.replace("2.0", "0.0"),
    },
    "11.2": {
        "no gradient reaches u": ANGLE
        + """
    def lower(self, query, key):
        return ch.extend.Pairwise("mul", self.unit(query), self.unit(key), scale=self.u.exp().item())""",
        "e to the power of u is missing": ANGLE
        + """
    def lower(self, query, key):
        return ch.extend.Pairwise("mul", self.unit(query), self.unit(key))""",
        "is not the φ of a product": ANGLE
        + """
    def lower(self, query, key):
        return ch.extend.Pairwise("sq_diff", self.unit(query), self.unit(key))""",
        "the lengths were not divided out": ANGLE
        + """
    def lower(self, query, key):
        return ch.extend.Pairwise("mul", query * self.u.exp(), key)""",
    },
    "11.3": {
        "the rule: this is no mask": GROWING.replace("rule = ch.MaskFunction(", "rule = ("),
        "the mask: query 0 may not see key 0, the first": GROWING.replace("own + 1", "own"),
        "the rule: query 1 may see key 0": GROWING.replace("i - i // 2", "i // 2"),
        "the last three queries alone": GROWING.replace(' + query_offset(sizes, "Growing")', ""),
        "the mask: query 1 may see key 0": GROWING.replace("own - own // 2", "own // 2"),
        "the rule: query 0 may see key 1, which comes later": GROWING.replace(" & (j <= i)", ""),
    },
}
