"""Right and wrong answers to the exercises of chapters 0 to 5, as readers write them.

`GIVEN` has what an answer reads of the page above the exercise. `RIGHT` has answers of another form than the solution.
`WRONG` has, for each wrong answer, words of the error that it gets.
"""

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

import clearhead as ch

x = np.sort(np.random.default_rng(0).uniform(0, 5, 50))
y = 2 * np.sin(x) + x**0.8
t = np.linspace(0, 5, 200)
torch.manual_seed(0)
layer = ch.nn.MultiHeadAttention(embed_dim=5, num_heads=6, head_dim=4)
heads = torch.randn(2, 6, 3, 4)
theirs = nn.MultiheadAttention(embed_dim=8, num_heads=2)
AVERAGES = {"np": np, "x": x, "y": y, "t": t, "query": t[:, None], "key": x[:, None], "value": y[:, None]}


def right(items):
    """A model that fails where the day is written first and ends in 1, and never with a named month."""
    return sum(not (item.text[0].isdigit() and item.iso.endswith("1")) for item in items) / len(items)


def dates():
    from dates_data import FORMATS, split, written

    return {
        **{"model": None, "rewritten": lambda model, items: None, "exact": lambda found, items: right(items)},
        **{"held_out": split()[1], "FORMATS": FORMATS, "written": written},
    }


WORDS = ["street", "streets", "road", "king", "queen", "water", "wine", "long", "longest", "far"]
table = torch.randn(len(WORDS), 16, generator=torch.Generator().manual_seed(0))
table[1] = 1.2 * table[0] + 0.3 * table[1]
table[2] = 0.3 * (table[0] + 0.3 * table[2])
table[8] = 9 * (table[5] + table[0] + table[3] + table[8])
table[4] = table[3] + 0.4 * table[4]
tokenizer = SimpleNamespace(
    convert_tokens_to_ids=lambda word: WORDS.index(word) if isinstance(word, str) else [*map(WORDS.index, word)],
    convert_ids_to_tokens=lambda ids: WORDS[ids] if isinstance(ids, int) else [WORDS[n] for n in ids],
)
READ = {"table": table, "unit": table / table.norm(dim=-1, keepdim=True), "tokenizer": tokenizer, "WORDS": WORDS}
PRODUCTS = table @ table[5]
GIVEN = {
    "0.1": READ,
    "0.2": READ,
    "1.1": AVERAGES | {"others": ~ch.DenseMask(np.eye(50, dtype=bool))},
    "1.2": AVERAGES,
    "1.3": AVERAGES,
    "2.1": {"eight": (torch.randn(8, 5, 3), torch.randn(8, 7, 3), torch.randn(8, 7, 2))},
    "2.2": {"eight": (torch.randn(8, 5, 3), torch.randn(8, 7, 3), torch.randn(8, 7, 2))},
    "2.4": {"query": torch.randn(5, 3), "key": torch.randn(7, 3)},
    "3.4": {"lengths": torch.tensor([3, 6])},
    "4.2": {"q": torch.randn(2, 6), "k": torch.randn(4, 6), "w_v": torch.randn(6)},
    "4.3": dates(),
    "5.2": {
        **{"layer": layer, "heads": heads, "B": 2, "H": 6, "L": 3, "D": 4, "E": 5},
        "output": layer.W_o(heads.transpose(1, 2).flatten(-2)),
        "joined": heads.transpose(1, 2).flatten(-2),
    },
    "5.3": {
        "parameters": lambda **sizes: sum(
            p.numel() for p in ch.nn.MultiHeadAttention(embed_dim=5, **sizes).parameters()
        )
    },
    "5.4": {"nn": nn, "SimpleNamespace": SimpleNamespace},
}

RIGHT = {
    "0.1": [
        """
def nearest(word, count):
    own = WORDS.index(word)
    cosines = [(torch.cosine_similarity(row, table[own], 0).item(), n) for n, row in enumerate(table) if n != own]
    return tuple(WORDS[n] for _, n in sorted(cosines)[::-1][:count])
""",
        """
def nearest(word, count):
    cosines = unit @ unit[tokenizer.convert_tokens_to_ids(word)]
    order = cosines.argsort(descending=True).tolist()
    return [token for token in tokenizer.convert_ids_to_tokens(order) if token != word][:count]
""",
    ],
    "0.2": [
        "first = WORDS[(table @ table[5]).argmax()]",
        "first = max(zip((table * table[5]).sum(1).tolist(), WORDS))[1]",
    ],
    "1.1": [
        """
def without_itself(W):
    W = W.copy()
    np.fill_diagonal(W, 0)
    return (W.T / W.sum(1)).T
""",
        """
def without_itself(W):
    return W * (1 - np.eye(len(W))) / (1 - W.diagonal())[:, None]
""",
    ],
    "1.2": [
        "wide = y.mean()\nnarrow = [y[np.argmin((x - moment) ** 2)] for moment in some]",
        "wide = [y.sum() / 50] * 10\nnarrow = np.array([min((abs(m - a), b) for a, b in zip(x, y))[1] for m in some])",
    ],
    "1.3": [
        """
near = abs(t[:, None] - x) < 0.5
box = near @ y[:, None] / near.sum(1, keepdims=True)
""",
        """
box = ch.attention(0 * query, key, value, mask=ch.DenseMask(abs(t[:, None] - x) < 0.5))
""",
    ],
    "2.1": [
        """
def attention(query, key, value):
    w = torch.exp(query @ key.transpose(-1, -2) / np.sqrt(query.shape[-1]))
    w = w / w.sum(-1, keepdim=True)
    return [w @ value, w]
""",
        """
def attention(query, key, value):
    return ch.attention(query, key, value), ch.weights(query, key)[:]
""",
    ],
    "2.2": [
        "keys_moved_changes = np.bool_(False)\nqueries_moved_changes = torch.tensor(True)",
        "keys_moved_changes, queries_moved_changes = 0, 1",
    ],
    "2.3": ["scale = 1 / 12", "scale = torch.tensor(64 * 9 * 0.25) ** -0.5"],
    "2.4": [
        """
of_cosine = 0
of_dot = (torch.softmax(10 * query @ key.T / 3**0.5, -1) - torch.softmax(query @ key.T / 3**0.5, -1)).abs().max().item()
""",
        """
w = [ch.weights(query, k, score=ch.Cosine())[:] for k in (key, 10 * key)]
of_cosine = (w[0] - w[1]).abs().max()
w = [ch.weights(query, k)[:] for k in (key, 10 * key)]
of_dot = max((w[0] - w[1]).max(), (w[1] - w[0]).max())
""",
    ],
    "3.1": [
        """
def masked_softmax(scores, keep):
    scores = scores - scores.masked_fill(~keep, -1e9).amax(-1, keepdim=True)
    grown = torch.where(keep, scores.exp(), 0.0)
    total = grown.sum(-1, keepdim=True)
    return grown / torch.where(total > 0, total, 1.0)
""",
        """
def masked_softmax(scores, keep):
    return scores.masked_fill(~keep, float("-inf")).softmax(-1).nan_to_num(0.0)
""",
    ],
    "3.2": ["of_masked = 0.0596", "e = np.exp([2, 2, 0, 0])\nof_masked = e[3] / e.sum()"],
    "3.3": [
        """
two_before = ~ch.SlidingWindow(before=1) & ch.SlidingWindow(before=2)
mine = ch.Causal() & (ch.Lengths([1]) | ch.SlidingWindow(before=0) | two_before)""",
        """
mine = (ch.SlidingWindow(before=2) & ~(ch.SlidingWindow(before=1) & ~ch.SlidingWindow(before=0))) | ch.Lengths([1])""",
    ],
    "3.4": [
        "loss = ((outputs - targets)[0, :3].square().sum() + (outputs - targets)[1].square().sum()) / 9",
        """
keep = (torch.arange(6) < torch.tensor([[3], [6]])).float()
loss = (keep * (outputs - targets) ** 2).sum().item() / keep.sum().item()""",
    ],
    "4.1": [
        """
def additive(query, key, value, W_q, W_k, w_v):
    sums = (query @ W_q.T).unsqueeze(-2) + (key @ W_k.T).unsqueeze(-3)
    weights = torch.einsum("...h,h->...", sums.tanh(), w_v).softmax(dim=-1)
    return weights @ value, weights
""",
        """
def additive(query, key, value, W_q, W_k, w_v):
    score = ch.Additive.from_weights(W_q, W_k, w_v)
    return ch.attention(query, key, value, score=score).detach(), ch.weights(query, key, score=score)[:].detach()
""",
    ],
    "4.2": [
        "rows = (k @ w_v).softmax(0).expand(2, 4)",
        "rows = torch.stack([torch.softmax(k @ w_v + q[i] @ w_v, 0) for i in (0, 1)])",
    ],
    "4.3": [
        "share = {f[1]: right([written(d, f) for d in held_out[:1000]]) for f in FORMATS}",
        """
share = dict.fromkeys((template for _, template in FORMATS), 1.0)
for language, template in FORMATS:
    share[template] = torch.tensor(right([written(day, (language, template)) for day in held_out[:1000]]))
""",
    ],
    "5.1": [
        """
def split(flat, heads):
    B, L, width = flat.shape
    return flat.view(B, L, heads, width // heads).permute(0, 2, 1, 3)
def merge(parts):
    return torch.cat(list(parts.unbind(1)), -1)
""",
        """
def split(flat, heads):
    return torch.stack(flat.chunk(heads, -1), 1)
def merge(parts):
    B, H, L, D = parts.shape
    return parts.permute(0, 2, 1, 3).reshape(B, L, H * D)
""",
    ],
    "5.2": [
        "contributions = torch.stack([heads[:, h] @ layer.W_o.weight[:, 4 * h : 4 * h + 4].T for h in range(6)], 1)",
        """
contributions = torch.zeros(B, H, L, E)
for h in range(H):
    alone = torch.zeros_like(joined)
    alone[..., h * D : (h + 1) * D] = heads[:, h]
    contributions[:, h] = layer.W_o(alone) - layer.W_o.bias
""",
    ],
    "5.3": [
        """
def count(E, H, D, G):
    return sum(p.numel() for p in ch.nn.MultiHeadAttention(E, H, head_dim=D, num_kv_heads=G).parameters())
""",
        "count = lambda E, H, D, G: 2 * E * D * (H + G) + H * D + 2 * G * D + E",
    ],
    "5.4": [
        "mended = ch.nn.MultiHeadAttention(8, 2)",
        """
def mended(query, key, value):
    return theirs(*(x.transpose(0, 1) for x in (query, key, value)))[0].transpose(0, 1), None
""",
    ],
}

WRONG = {
    "0.1": {
        "the word itself is among them": """
def nearest(word, count):
    return tokenizer.convert_ids_to_tokens((unit @ unit[WORDS.index(word)]).topk(count).indices.tolist())""",
        "the largest dot product": """
def nearest(word, count):
    row = table @ table[WORDS.index(word)]
    return [w for w in tokenizer.convert_ids_to_tokens(row.topk(count + 2).indices.tolist()) if w != word][:count]""",
        "the smallest distance": """
def nearest(word, count):
    far = (table - table[WORDS.index(word)]).norm(dim=-1)
    return tokenizer.convert_ids_to_tokens(far.argsort()[1 : count + 1].tolist())""",
        "one word too many": """
def nearest(word, count):
    return tokenizer.convert_ids_to_tokens((unit @ unit[WORDS.index(word)]).topk(count + 2).indices[1:].tolist())""",
        "the numbers of the tokens": """
def nearest(word, count):
    return (unit @ unit[WORDS.index(word)]).topk(count + 1).indices[1:].tolist()""",
    },
    "0.2": {
        "the number of the token": "first = int((table @ table[5]).argmax())",
        "the second": "first = WORDS[(table @ table[5]).topk(2).indices[1]]",
        "the smallest": "first = WORDS[(table @ table[5]).argmin()]",
    },
    "1.1": {
        "the diagonal is 0, and the rows were not divided": "def without_itself(W): return W * (1 - np.eye(len(W)))",
        "the columns were made to sum to 1": "def without_itself(W): W = W * (1 - np.eye(len(W))); return W / W.sum(0)",
        "`keepdims=True` keeps the axis": "def without_itself(W): W = W * (1 - np.eye(len(W))); return W / W.sum(1)",
        "the weights on the diagonal are not 0": "def without_itself(W): return W",
    },
    "1.2": {
        "the wide guess: not right. .*median": "wide, narrow = np.median(y), y[abs(some[:, None] - x).argmin(1)]",
        "not their values": "wide, narrow = y.mean(), x[abs(some[:, None] - x).argmin(1)]",
        "next measurements": "wide, narrow = y.mean(), y[np.searchsorted(x, some).clip(max=49)]",
        "interpolates": "wide, narrow = y.mean(), np.interp(some, x, y)",
        "the wide guess: not right. .*exchanged": "wide, narrow = y[abs(some[:, None] - x).argmin(1)], y.mean()",
    },
    "1.3": {
        "nearer measurements still count for more": """
box = ch.attention(query, key, value, score=ch.Gaussian(0.5), mask=abs(t[:, None] - x) < 0.5)""",
        "turned around": """
box = ch.attention(query, key, value, score=ch.Gaussian(1e6), mask=abs(t[:, None] - x) >= 0.5)""",
        "nothing is masked": "box = ch.attention(query, key, value, score=ch.Gaussian(1e6))",
    },
    "2.1": {
        "not divided by √E": "def attention(q, k, v): w = (q @ k.mT).softmax(-1); return w @ v, w",
        "exchanged": "def attention(q, k, v): w = (q @ k.mT / 3**0.5).softmax(-1); return w, w @ v",
        "divided by E, not by its root": "def attention(q, k, v): w = (q @ k.mT / 3).softmax(-1); return w @ v, w",
        "the softmax runs over the queries": """
def attention(q, k, v):
    w = (q @ k.mT / 3**0.5).softmax(-2)
    return w @ v, w""",
        "With three axes: .* It is right for two axes": """
def attention(q, k, v):
    w = (q @ k.T / 3**0.5).softmax(-1)
    return w @ v, w""",
        "With four axes: .* right for two axes and three axes": (
            "def attention(q, k, v): w = (q @ k.mT / 3**0.5).softmax(min(2, q.dim() - 1)); return w @ v, w"
        ),
        "two results were asked for": "def attention(q, k, v): return (q @ k.mT / 3**0.5).softmax(-1) @ v",
    },
    "2.2": {
        "for moved keys: no": "keys_moved_changes, queries_moved_changes = True, True",
        "for moved keys: no. q": "keys_moved_changes, queries_moved_changes = True, False",
        "for moved queries: no": "keys_moved_changes, queries_moved_changes = False, False",
    },
    "2.3": {
        "1 / √E": "scale = 1 / 8",
        "the root of E is missing": "scale = 1 / 1.5",
        "E times the standard deviation": "scale = 1 / 96",
        "they are multiplied by the scale": "scale = 12",
        "the standard deviations were added": "scale = 1 / 28",
    },
    "2.4": {
        "the largest change with Dot": "of_cosine, of_dot = 0, 1",
        "the mean change": """
w = [ch.weights(query, k)[:] for k in (key, 10 * key)]
of_cosine, of_dot = 0, (w[1] - w[0]).abs().mean()""",
        "of the scores, not of the weights": "of_cosine, of_dot = 0, (9 * query @ key.T / 3**0.5).abs().max()",
        "the largest change with Cosine": "of_cosine = of_dot = 1",
    },
    "3.1": {
        "With a query that sees nothing: .*0 / 0": """
def masked_softmax(s, k):
    return s.masked_fill(~k, -torch.inf).softmax(-1)""",
        "equal weights, as with −1e9": "def masked_softmax(s, k): return s.masked_fill(~k, -1e9).softmax(-1)",
        "set to 0 after the softmax": "def masked_softmax(s, k): return s.softmax(-1) * k",
        "With a large score that is masked: .*mask before": (
            "def masked_softmax(s, k): w = s.softmax(-1) * k; return (w / w.sum(-1, True)).nan_to_num(0.0)"
        ),
        "exp.0. is 1": "def masked_softmax(s, k): return (s * k).softmax(-1)",
        "turned around": "def masked_softmax(s, k): return s.masked_fill(k, -torch.inf).softmax(-1)",
    },
    "3.2": {
        "exp.0. is not 0": "of_masked = 0",
        "to be alike": "of_masked = 0.25",
        "may be seen": "of_masked = np.exp(2) / (2 * np.exp(2) + 2)",
        "one key of each kind": "of_masked = 1 / (np.exp(2) + 1)",
    },
    "3.3": {
        "query 2 may see key 1, one before it": "mine = ch.SlidingWindow(before=2) | ch.Lengths([1])",
        "query 1 may not see key 0, the first": """
mine = ch.SlidingWindow(before=2) & ~ch.SlidingWindow(before=1) | ch.SlidingWindow(before=0)""",
        "query 0 may see key 1, which comes later": "mine = ch.Lengths([2]) | ch.SlidingWindow(before=0)",
        "query 1 may not see key 1, which is itself": """
mine = ch.Lengths([1]) | (ch.SlidingWindow(before=2) & ~ch.SlidingWindow(before=1))""",
        "DenseMask writes the pairs down": """
i = torch.arange(8)
mine = ch.DenseMask((i == 0) | (i[:, None] == i) | (i[:, None] - i == 2))""",
        "no mask": "mine = torch.ones(8, 8).bool()",
    },
    "3.4": {
        "padding counts too": "loss = (outputs - targets).square().mean()",
        "still counted": "loss = ((outputs - targets) * (torch.arange(6) < lengths[:, None])).square().mean()",
        "each sentence counts the same": """
off = (outputs - targets).square()
loss = (off[0, :3].mean() + off[1].mean()) / 2""",
        "the sum, not the mean": "loss = (outputs - targets)[torch.arange(6) < lengths[:, None]].square().sum()",
    },
    "4.1": {
        "exchanged": """
def additive(query, key, value, W_q, W_k, w_v):
    q, k = query @ W_q.T, key @ W_k.T
    weights = ((q[..., :, None, :] + k[..., None, :, :]).tanh() @ w_v).softmax(-1)
    return weights, weights @ value""",
        "With four axes: .* right for two axes and three axes": """
def additive(query, key, value, W_q, W_k, w_v):
    q, k = query @ W_q.T, key @ W_k.T
    if q.dim() == 2:
        sums = q[:, None] + k[None]
    else:
        sums = q[:, :, None] + k[:, None]
    weights = (sums.tanh() @ w_v).softmax(-1)
    return weights @ value, weights""",
        "With two axes: additive: IndexError": """
def additive(query, key, value, W_q, W_k, w_v):
    q, k = query @ W_q.T, key @ W_k.T
    weights = ((q[:, :, None, :] + k[:, None, :, :]).tanh() @ w_v).softmax(-1)
    return weights @ value, weights""",
        "the tanh is missing": """
def additive(query, key, value, W_q, W_k, w_v):
    weights = (((query @ W_q.T).unsqueeze(-2) + (key @ W_k.T).unsqueeze(-3)) @ w_v).softmax(-1)
    return weights @ value, weights""",
        "the softmax runs over the queries": """
def additive(query, key, value, W_q, W_k, w_v):
    weights = (((query @ W_q.T).unsqueeze(-2) + (key @ W_k.T).unsqueeze(-3)).tanh() @ w_v).softmax(-2)
    return weights @ value, weights""",
    },
    "4.2": {
        "all weights are equal": "rows = torch.full((2, 4), 0.25)",
        "the tanh is still there": "rows = torch.softmax((q[:, None, :] + k[None, :, :]).tanh() @ w_v, -1)",
        "the softmax is missing": "rows = (q[:, None, :] + k[None, :, :]) @ w_v",
    },
    "4.3": {
        "the share of .* is not right": "share = {form[1]: 1.0 for form in FORMATS}",
        "is no template": "share = {form: 1.0 for form in FORMATS}",
        "a share is 1 at most": """
share = {f[1]: 1000 * right([written(d, f) for d in held_out[:1000]]) for f in FORMATS}""",
        "1 of 17 formats": "share = {FORMATS[4][1]: 1.0}",
        "the share of mistakes": "share = {f[1]: 1 - right([written(d, f) for d in held_out[:1000]]) for f in FORMATS}",
    },
    "5.1": {
        "split.*this is the reshape without the transposition": """
def split(flat, heads): return flat.reshape(flat.shape[0], heads, flat.shape[1], -1)
def merge(parts): return parts.reshape(parts.shape[0], parts.shape[2], -1)""",
        "merge.*this is the reshape without the transposition": """
def split(flat, heads): return flat.unflatten(-1, (heads, -1)).transpose(1, 2)
def merge(parts): return parts.reshape(parts.shape[0], parts.shape[2], -1)""",
        "every n-th number": """
def split(flat, heads): return flat.unflatten(-1, (-1, heads)).permute(0, 3, 1, 2)
def merge(parts): return parts.permute(0, 2, 3, 1).flatten(-2)""",
        "the places still stand before the heads": """
def split(flat, heads): return flat.unflatten(-1, (heads, -1))
def merge(parts): return parts.flatten(-2)""",
    },
    "5.2": {
        "the bias is in every head": """
contributions = heads @ layer.W_o.weight.unflatten(1, (6, 4)).permute(1, 2, 0) + layer.W_o.bias""",
        "was cut by a reshape": "contributions = heads @ layer.W_o.weight.reshape(6, 4, 5)",
        "the same share of the output": "contributions = ((output - layer.W_o.bias)[:, None] / 6).expand(B, H, L, E)",
    },
    "5.3": {
        "the biases are missing": "def count(E, H, D, G): return 2 * E * H * D + 2 * E * G * D",
        "It is right for E = 5, H = 6, D = 4, H_k = 6": """
def count(E, H, D, G):
    return 3 * (E + 1) * H * D + (H * D + 1) * E""",
        "W_o has H · D biases": "def count(E, H, D, G): return (E + 1) * (2 * H * D + 2 * G * D)",
        "right for .*H_k = 6 and E = 5, H = 6, D = 4, H_k = 2": "def count(E, H, D, G): return {6: 557}.get(G, 365)",
    },
    "5.4": {
        "still attends from one sequence to the other": "mended = nn.MultiheadAttention(8, 2)",
        "do[n]'t see each other": "mended = lambda query, key, value: (query, None)",
        "the shape of the output": "mended = lambda query, key, value: theirs(query[0], key[0], value[0])",
        "the module: TypeError": "mended = nn.Linear(8, 8)",
    },
}
