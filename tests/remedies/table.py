"""Wrong code, what its message says to write instead, and what that should give, by plain PyTorch or NumPy.

A case: names for its code; the code that provokes the message; and remedies. A remedy is a fragment that stands in the
message word for word, the code in whose place `@` it is written, and the numbers that were meant. A message is an
error's, a warning's, or the remedies of a diagnosis. B = L, where a mask's meaning can't be told by its shape.
"""

from typing import NamedTuple

Remedy = tuple[str, str, str]


class Case(NamedTuple):
    wrong: str
    remedies: tuple[Remedy, ...]
    setup: str = ""


def case(wrong: str, *remedies: Remedy, setup: str = "") -> Case:
    return Case(wrong, remedies, setup)


ROWS = "plain(x, x, x, rows[:, None])"  # padding, a row a sequence
MATRIX = "plain(x, x, x, matrix)"  # queries by keys
LLAMA = """
import transformers
IDS = torch.arange(6)[None]
def model(train=False, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    sizes |= {"attention_dropout": 0.5 * train}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, **options)
    return transformers.LlamaModel(config).train(train)
def ids_out(one):
    with torch.no_grad():
        return one(IDS).last_hidden_state
def lazy(train=False, **options):
    one = model(train)
    with torch.no_grad(), ch.models.lazy_attentions(one, **options):
        found = one(IDS, output_attentions=True).attentions
    return found[0] if found else None
def eager():
    with torch.no_grad():
        return model(attn_implementation="eager")(IDS, output_attentions=True).attentions[0]
"""
PLOT = "import matplotlib\nmatplotlib.use('Agg')\ndrawn = lambda axes: torch.tensor(axes is not None)"
UNDER = """
def under(manager):
    one = ch.models.run_on_clearhead(model())
    with torch.no_grad(), manager(one):
        return one(IDS, output_attentions=True).attentions[0]
"""
ROOTED = """
a = torch.ones(2, requires_grad=True)
far = (torch.arange(5)[:, None] - torch.arange(5)).clamp(min=0).sqrt()
def of_a(give):
    with torch.enable_grad():
        return torch.autograd.grad(give().square().sum(), a)[0]
def rooted(f):
    return of_a(lambda: attention(q, q, q, score=Dot().then(f), mask=Causal()))
expected = of_a(lambda: plain(q, q, q, five, -a[:, None, None] * far))
"""
CASES = [
    # inputs
    case(
        "attention(x.mT, x, x)",
        ("query.mT", "attention(@, x, x)", "plain(x, x, x)"),
        setup="query = x.mT",
    ),
    case(
        "attention(query, query, query)",
        (
            "nn.Embedding(num_tokens, width)(query)",
            "attention(*[(torch.manual_seed(0), @)[1]] * 3)",
            "plain(*[(torch.manual_seed(0), nn.Embedding(9, 8)(query))[1]] * 3)",
        ),
        ("query.float()", "attention(*[@] * 3)", "plain(*[query.to(torch.float32)] * 3)"),
        setup="from torch import nn\nquery, num_tokens, width = torch.arange(16).view(4, 4) % 9, 9, 8",
    ),
    case(
        "ch.weights(x, x, x)",
        ("weights(query, key)", "ch.@[:]", "soft(x, x)"),
        ("attention(query, key, value)", "@", "plain(x, x, x)"),
        setup="query = key = value = x",
    ),
    case(
        "ch.diagnose(q, q, q, score=Dot().then(lambda s, b, h, i, j: s - a[h] * (i - j).sqrt()), mask=Causal())",
        ("(i - j).clamp(min=0)", "rooted(lambda s, b, h, i, j: s - a[h] * @.sqrt())", "expected"),
        setup=ROOTED,
    ),
    case(
        "warned(lambda: ch.models.run_on_clearhead(model())(IDS, output_attentions=True))",
        ("ch.models.lazy_attentions(model)", "under(lambda model: @)", "eager()"),
        setup=LLAMA + UNDER,
    ),
    # masks
    case(
        "attention(x, x, x, mask=mask)",
        ("Lengths(mask)", "attention(x, x, x, mask=@)", "plain(x, x, x, torch.arange(4) < mask[:, None, None])"),
        setup="mask = torch.tensor([1, 2, 3, 4])",
    ),
    case(
        "attention(x, x, x, mask=mask)",
        ("mask=mask.float()", "attention(x, x, x, @)", "plain(x, x, x, low)"),
        setup="mask = torch.zeros(4, 4).long().masked_fill(~low, -(10**9))",
    ),
    case(
        "attention(query, query, query, mask=mask)",
        ("mask=mask.astype(query.dtype)", "torch.from_numpy(attention(*[query] * 3, @))", "plain(x, x, x, low)"),
        setup="query, mask = x.numpy(), torch.zeros(4, 4).long().masked_fill(~low, -1000).numpy()",
    ),
    case(
        "attention(query, query, query, mask=mask)",
        ("mask.filled(0)", "torch.from_numpy(attention(*[query] * 3, mask=@))", "plain(x, x, x, low)"),
        setup="import numpy as np\nquery, mask = x.numpy(), np.ma.masked_array(np.ones((4, 4), bool), ~low.numpy())",
    ),
    case(
        "attention(x, x, x, mask=lambda b, h, i, j: i >= j)",
        ("MaskFunction(mask)", "attention(x, x, x, mask=@)", "plain(x, x, x, low)"),
        setup="mask = lambda b, h, i, j: i >= j",
    ),
    case(
        "attention(x, x, x, mask=blocks)",
        ("MaskFunction(mask.mask_mod)", "attention(x, x, x, mask=@)", "plain(x, x, x, low)"),
        setup="from torch.nn.attention.flex_attention import create_block_mask\n"
        "mask = blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 4, 4, device='cpu')",
    ),
    case(
        "attention(query, key, key, mask=Causal() & Documents.from_cu_seqlens(cu_q, cu_k))",
        (
            'align="lower_right"',
            "attention(query, key, key, mask=Causal() & Documents.from_cu_seqlens(cu_q, cu_k), @)",
            "torch.cat([plain(query[:1], key[:2], key[:2]), plain(query[1:], key[2:], key[2:], five[1:3, :3])])",
        ),
        setup="query, key = x[0, :3], x[1:3].flatten(0, 1)[:5]\n"
        "cu_q, cu_k = torch.tensor([0, 1, 3]), torch.tensor([0, 2, 5])",
    ),
    case(
        "attention(x, x, x, mask=Causal() & rows.long())",
        ("Padding(tensor.bool())", "attention(x, x, x, mask=Causal() & @)", "plain(x, x, x, rows[:, None] & low)"),
        setup="tensor = rows.long()",
    ),
    case(
        "attention(x, x, x, mask=Causal() & matrix.int())",
        ("DenseMask(tensor.bool())", "attention(x, x, x, mask=Causal() & @)", "plain(x, x, x, matrix & low)"),
        setup="tensor = matrix.int()",
    ),
    case(
        "attention(x, x, x, mask=Causal() & (~rows).long())",
        (
            "tensor == 0",
            "attention(x, x, x, mask=Causal() & Padding(@))",
            "plain(x, x, x, rows[:, None] & low)",
        ),
        setup="tensor = (~rows).long()",
    ),
    case(
        "attention(x, x, x, mask=Causal() & added)",
        ("bias=tensor", "attention(x, x, x, mask=Causal(), @)", "plain(x, x, x, low, added)"),
        setup="tensor = added",
    ),
    case(
        "attention(x, x, x, mask=rows.long())",
        ("Padding(mask.bool())", "attention(x, x, x, mask=@)", ROWS),
        ("DenseMask(mask.bool())", "attention(x, x, x, mask=@)", "plain(x, x, x, rows)"),
        ("mask == 0", "attention(x, x, x, mask=Padding(@))", "plain(x, x, x, ~rows[:, None])"),
        setup="mask = rows.long()",
    ),
    case(
        "attention(x, x, x, mask=rows.float())",
        ("Padding(mask.bool())", "attention(x, x, x, mask=@)", ROWS),
        ("bias=mask", "attention(x, x, x, @)", "plain(x, x, x, None, rows.float().view(4, 4))"),
        setup="mask = rows.float()",
    ),
    case(
        "DenseMask(rows.float())",
        ("Padding(mask.bool())", "attention(x, x, x, mask=@)", ROWS),
        setup="mask = rows.float()",
    ),
    case(
        "Lengths(rows.float())",
        ("Padding(keep.bool())", "attention(x, x, x, mask=@)", ROWS),
        ("DenseMask(keep.bool())", "attention(x, x, x, mask=@)", "plain(x, x, x, rows)"),
        setup="keep = rows.float()",
    ),
    case(
        "Lengths(torch.tensor([1.0, 2.0, 3.0, 4.0]))",
        ("torch.as_tensor(valid_lens).long()", "attention(x, x, x, mask=Lengths(@))", "plain(x, x, x, steps)"),
        setup="valid_lens = torch.tensor([1.0, 2.0, 3.0, 4.0]); steps = (torch.arange(4) < valid_lens[:, None])[:, None]",
    ),
    case(
        "Padding(rows.float())",
        ("keep.bool()", "attention(x, x, x, mask=Padding(@))", ROWS),
        setup="keep = rows.float()",
    ),
    case(
        "Padding(torch.tensor([[1.0, 3.0]]))",
        ("Lengths(valid_lens)", "attention(x, x, x, mask=@)", "plain(x, x, x, steps)"),
        setup="valid_lens = torch.tensor([1, 2, 3, 4]); steps = (torch.arange(4) < valid_lens[:, None])[:, None]",
    ),
    case(
        "attention(x[:3], x[:3], x[:3], mask=rows[:3])",
        ("Padding(mask)", "attention(x[:3], x[:3], x[:3], mask=@)", "plain(x, x, x, rows[:, None])[:3]"),
        setup="mask = rows[:3, :]",
    ),
    case(
        "attention(q, q, q, mask=padding)",
        ("mask[:, None, None]", "attention(q, q, q, mask=@)", "plain(q, q, q, keep[:, None, None])"),
        setup="keep = torch.arange(5) < torch.tensor([[2], [4]]); "
        "mask = padding = torch.zeros(2, 5).masked_fill(~keep, -torch.inf)",
    ),
    case(
        "attention(q, q, q, mask=heads)",
        ("mask[None]", "attention(q, q, q, mask=@)", "plain(q, q, q, heads[None])"),
        ("mask[:, None]", "attention(q, q, q, mask=@)", "plain(q, q, q, heads[:, None])"),
        setup="mask = heads = torch.rand(2, 5, 5) < 0.7; heads[..., 0] = True",
    ),
    case(
        "attention(x, x, x, mask=added.double())",
        ("mask.to(query.dtype)", "attention(x, x, x, mask=@)", "plain(x, x, x, None, added)"),
        setup="mask, query = added.double(), x",
    ),
    case(
        "attention(x[:, :3], x, x, mask=Causal())",
        ('align="upper_left"', "attention(x[:, :3], x, x, mask=Causal(), @)", "plain(x[:, :3], x, x, low[:3])"),
        ('align="lower_right"', "attention(x[:, :3], x, x, mask=Causal(), @)", "plain(x[:, :3], x, x, low[1:])"),
    ),
    case("~Causal() and Causal()", ("&", "(~Causal() @ Causal()).dense(4, 4).float()", "torch.zeros(4, 4)")),
    case(
        "MaskFunction(matrix)",
        ("DenseMask(keep)", "attention(x, x, x, mask=@)", MATRIX),
        setup="keep = matrix",
    ),
    case(
        "attention(x, x, x, mask=MaskFunction(lambda b, h, i, j: (i - j).float()))",
        (
            "bool",
            "attention(x, x, x, mask=MaskFunction(lambda b, h, i, j: (i >= j).to(torch.@)))",
            "plain(x, x, x, low)",
        ),
    ),
    case(
        "Documents(torch.tensor([2.0, 2.0]))",
        ("Documents.from_lengths(lengths)", "attention(x, x, x, mask=@)", "plain(x, x, x, blocks)"),
        setup="lengths = [2, 2]; blocks = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).bool()",
    ),
    case(
        "Documents.from_cu_seqlens([2, 2])",
        ("Documents.from_lengths(lengths)", "attention(x, x, x, mask=@)", "plain(x, x, x, blocks)"),
        setup="lengths = [2, 2]; blocks = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).bool()",
    ),
    case(
        "Documents.from_lengths([[2, 2]])",
        ("ids", "attention(x, x, x, mask=Documents(@))", "plain(x, x, x, blocks)"),
        setup="ids = torch.tensor([[0, 0, 1, 1]] * 4); "
        "blocks = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).bool()",
    ),
    case(
        "Lengths([2, 3]).dense(x[0], x[0])",
        ("query (B, Lq, E) and key (B, Lk, E)", "Lengths([2, 3]).dense(x[:2], x[:2]).float() # @", "two"),
        setup="two = (torch.arange(4) < torch.tensor([[2], [3]]))[:, None].expand(2, 4, 4).float()",
    ),
    case(
        "attention(x, x, x, mask=Lengths([9]))",
        ("FirstKeys(9)", "attention(x, x, x, mask=ch.@)", "plain(x, x, x)"),
    ),
    # inputs
    case(
        "attention(x[0, 0], x, x)",
        ("query[None]", "attention(@, x[0], x[0])", "plain(x[0, :1], x[0], x[0])"),
        setup="query = x[0, 0]",
    ),
    case(
        "attention(x[0, :, 0], x[0, :, 1], x[0, :, 2], score=ch.Gaussian())",
        (
            "query[:, None]",
            "attention(@, x[0, :, 1:2], x[0, :, 2:3], score=ch.Gaussian())",
            "attention(x[0, :, :1], x[0, :, 1:2], x[0, :, 2:3], score=ch.Gaussian())",
        ),
        setup="query = x[0, :, 0]",
    ),
    case(
        "attention([[1.0, 2.0]], x, x)",
        (
            "numpy.asarray(query)",
            "torch.from_numpy(attention(@, x[0, :, :2].numpy(), x[0].numpy()))",
            "plain(torch.tensor([[1.0, 2.0]]), x[0, :, :2], x[0])",
        ),
        setup="import numpy; query = np.float32([[1.0, 2.0]]).tolist(); numpy = SimpleNamespace(asarray=lambda v: np.asarray(v, np.float32))",
    ),
    case(
        "attention(x, x.double(), x)",
        ("key.to(query)", "attention(x, @, x)", "plain(x, x, x)"),
        setup="query, key = x, x.double()",
    ),
    case(
        "attention(x.numpy(), x, x)",
        ("torch.from_numpy(array)", "attention(@, x, x)", "plain(x, x, x)"),
        setup="array = x.numpy()",
    ),
    case(
        "attention(masked, x.numpy(), x.numpy())",
        ("query.filled(0)", "torch.from_numpy(attention(@, x.numpy(), x.numpy()))", "plain(zeroed, x, x)"),
        setup="query = masked = np.ma.masked_less(x.numpy(), 0.2); zeroed = torch.where(x < 0.2, 0.0, x)",
    ),
    case(
        "attention(x.numpy(), masked, x.numpy())",
        (
            "~key.mask.any(-1)",
            "torch.from_numpy(attention(x.numpy(), key.filled(0.0), x.numpy(), mask=Padding(@)))",
            "plain(x, x, x, rows[:, None])",
        ),
        setup="hidden = (~rows[:, :, None]).expand(4, 4, 8).numpy(); key = masked = np.ma.array(x.numpy(), mask=hidden)",
    ),
    case(
        "attention(x.to_sparse(), x, x)",
        ("query.to_dense()", "attention(@, x, x)", "plain(x, x, x)"),
        setup="query = x.to_sparse()",
    ),
    case(
        "ch.partial(jagged, x, x)",
        ("query.to_padded_tensor(0.0)", "ch.partial(@, x[:2], x[:2]).finish()[1, :2]", "plain(x[1, :2], x[1], x[1])"),
        setup="import warnings; warnings.simplefilter('ignore'); query = jagged = torch.nested.nested_tensor([x[0], x[1, :2]])",
    ),
    case(
        "torch.func.grad(lambda s: attention(jagged * s, jagged, jagged).values().sum())(torch.ones(()))",
        (
            "mask=Lengths(valid_lens)",
            "torch.func.grad(lambda s: attention(padded * s, padded, padded, @)[1, :2].sum())(torch.ones(()))",
            "torch.func.grad(lambda s: plain(x[1, :2] * s, x[1, :2], x[1, :2]).sum())(torch.ones(()))",
        ),
        setup="jagged = torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged)\n"
        "padded, valid_lens, one = jagged.to_padded_tensor(0.0), [len(x[0]), 2], torch.ones((), requires_grad=True)\n",
    ),
    case(
        "attention(jagged, x, x)",
        ("to_padded_tensor(0.0)", "attention(jagged.@, x[:2], x[:2])[1, :2]", "plain(x[1, :2], x[1], x[1])"),
        setup="import warnings; warnings.simplefilter('ignore'); query = jagged = torch.nested.nested_tensor([x[0], x[1, :2]])",
    ),
    case(
        "attention(jagged, jagged, jagged, mask=torch.zeros(4, 4))",
        (
            "bias=",
            "attention(jagged, jagged, jagged, @torch.eye(4))[0]",
            "(x[0] @ x[0].T / 8**0.5 + torch.eye(4)).softmax(-1) @ x[0]",
        ),
        setup="jagged = torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged)",
    ),
    case(
        "attention(jagged, jagged, jagged)",
        ("layout='BLHD'", "attention(jagged, jagged, jagged, @)[0].transpose(0, 1)", "plain(q[0], q[0], q[0])"),
        setup="parts = q[0].transpose(0, 1), q[1, :, :3].transpose(0, 1); jagged = torch.nested.nested_tensor(list(parts), layout=torch.jagged)",
    ),
    case(
        "torch.compile(attention, backend='eager', fullgraph=True)(jagged, jagged, jagged)",
        (
            "mask=Lengths(valid_lens)",
            "torch.compile(attention, backend='eager', fullgraph=True)(*[jagged.to_padded_tensor(0.0)] * 3, @)[1, :2]",
            "plain(x[1, :2], x[1, :2], x[1, :2])",
        ),
        setup="valid_lens = [4, 2]; jagged = torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged)",
    ),
    case(
        "ch.diagnose(y, y, y)",
        ("layout='BLHD'", "attention(y, y, y, @)", "plain(*[y.transpose(1, 2)] * 3).transpose(1, 2)"),
        setup="y = torch.randn(2, 256, 4, 16)",
    ),
    case(
        "attention(q.transpose(1, 2), q3.transpose(1, 2), q3.transpose(1, 2))",
        (
            "tensor.transpose(1, 2)",
            "attention(*[@ for tensor in (q.transpose(1, 2), q3.transpose(1, 2), q3.transpose(1, 2))])",
            "plain(q, q3, q3)",
        ),
        setup="q3 = torch.rand(2, 2, 3, 8)",
    ),
    case(
        "attention(q, q[0], q)",
        ("key[None]", "attention(q, @, q)", "plain(q, q[:1], q)"),
        ("key[:, None]", "attention(q, @, q)", "plain(q, q[0][:, None], q)"),
        setup="key = q[0]",
    ),
    case(
        "Causal().plot(key=4)",
        (
            "pass both",
            "torch.tensor(Causal().plot(query=4, key=4).get_title() == 'Causal()') # @",
            "torch.tensor(True)",
        ),
    ),
    # scores and biases
    case(
        "attention(x, x[..., :6], x)",
        (
            "Bilinear(query_dim=8, key_dim=6)",
            "attention(x, x[..., :6], x, score=fixed(@))",
            "plain(x @ W, x[..., :6], x, scale=1.0)",
        ),
        setup="W = torch.rand(8, 6)\ndef fixed(score):\n    score.W.data.copy_(W)\n    return score",
    ),
    case(
        "attention(x, x, x, score=Bilinear(8, 6))",
        ("key_dim=8", "attention(x, x, x, score=fixed(Bilinear(8, @)))", "plain(x @ W, x, x, scale=1.0)"),
        setup="W = torch.rand(8, 8)\ndef fixed(score):\n    score.W.data.copy_(W)\n    return score",
    ),
    case(
        "attention(x.double(), x.double(), x.double(), score=score)",
        (
            "score.to(torch.float64)",
            "attention(x.double(), x.double(), x.double(), score=@)",
            "plain(x.double() @ W.double(), x.double(), x.double(), scale=1.0)",
        ),
        setup="score = Bilinear(8, 8); W = score.W.data.clone()",
    ),
    case(
        "attention(x, x, x, bias=torch.nn.attention.bias.causal_lower_right(4, 4))",
        ("mask=Causal(), align='lower_right'", "attention(x, x, x, @)", "plain(x, x, x, low)"),
        setup="import torch.nn.attention.bias",
    ),
    case(
        "attention(x, x, x, score=Dot)",
        ("Dot()", "attention(x, x, x, score=@)", "plain(x, x, x)"),
    ),
    case(
        "attention(x, x, x, score=Gaussian(), scale=2.0)",
        ("scale", "attention(x, x, x, @=2.0)", "plain(x, x, x, scale=2.0)"),
    ),
    case(
        "attention(q, q, q, bias=ALiBi(3))",
        ("ALiBi(2)", "attention(q, q, q, bias=@)", "plain(q, q, q, None, slopes * -apart)"),
        setup="slopes = torch.tensor([2**-4, 2**-8])[:, None, None]; apart = (torch.arange(5)[:, None] - torch.arange(5)).abs()",
    ),
    case(
        "attention(q, q, q, bias=RelativeBias(3))",
        ("RelativeBias(2)", "attention(q, q, q, bias=zeroed(@))", "plain(q, q, q)"),
        setup="def zeroed(bias):\n    bias.weight.data.zero_()\n    return bias",
    ),
    case(
        "ALiBi(2) + added",
        (
            "DenseBias(tensor)",
            "attention(x[:, None], x[:, None], x[:, None], bias=ALiBi(1) + @)[:, 0]",
            "plain(x, x, x, None, added - apart / 256)",
        ),
        setup="tensor = added; apart = (torch.arange(4)[:, None] - torch.arange(4)).abs()",
    ),
    case(
        "BiasFunction(added)",
        ("DenseBias(tensor)", "attention(x, x, x, bias=@)", "plain(x, x, x, None, added)"),
        setup="tensor = added",
    ),
    case("DenseBias(matrix)", ("mask=DenseMask(keep)", "attention(x, x, x, @)", MATRIX), setup="keep = matrix"),
    case(
        "attention(x, x, x, bias=BiasFunction(lambda b, h, i, j: i >= j))",
        ("MaskFunction", "attention(x, x, x, mask=@(lambda b, h, i, j: i >= j))", "plain(x, x, x, low)"),
    ),
    case(
        "attention(x, x, x, score=Dot().then(lambda s, b, h, i, j: i >= j))",
        ("MaskFunction", "attention(x, x, x, mask=@(lambda b, h, i, j: i >= j))", "plain(x, x, x, low)"),
    ),
    case(
        "attention(x, x, x, score=lambda s, b, h, i, j: s.masked_fill(j > i, -torch.inf))",
        (
            "score=Dot().then(f)",
            "(f := lambda s, b, h, i, j: s.masked_fill(j > i, -torch.inf)) and attention(x, x, x, @)",
            "plain(x, x, x, low)",
        ),
    ),
    case(
        "RelativeBias(2, num_buckets=16, max_distance=4)",
        ("fewer buckets", "RelativeBias(2, num_buckets=4, max_distance=4).weight.new_zeros(1) # @", "torch.zeros(1)"),
    ),
    # drop-ins
    case(
        "ch.scaled_dot_product_attention(x, x, x, attn_mask=matrix, is_causal=True)",
        (
            "attention(query, key, value, mask=DenseMask(attn_mask) & Causal(), align='upper_left')",
            "@",
            "plain(x, x, x, matrix & low)",
        ),
        setup="query = key = value = x; attn_mask = matrix",
    ),
    case(
        "ch.scaled_dot_product_attention(x, x, x, attn_mask=added, is_causal=True)",
        (
            "attention(query, key, value, mask=Causal(), bias=attn_mask, align='upper_left')",
            "@",
            "plain(x, x, x, low, added)",
        ),
        setup="query = key = value = x; attn_mask = added",
    ),
    case(
        "ch.scaled_dot_product_attention(x, x, x, attn_mask=attn_mask)",
        ("attn_mask.bool()", "ch.scaled_dot_product_attention(x, x, x, attn_mask=@)", "plain(x, x, x, low)"),
        setup="attn_mask = low.long()",
    ),
    case(
        "ch.scaled_dot_product_attention(x, x, x, attn_mask=Causal())",
        (
            "attention(query, key, value, mask=...)",
            "(lambda attention: @)(lambda query, key, value, mask: ch.attention(query, key, value, mask=Causal()))",
            "plain(x, x, x, low)",
        ),
        setup="query = key = value = x",
    ),
    case(
        "ch.scaled_dot_product_attention(four, q, q)",
        ("enable_gqa=True", "ch.scaled_dot_product_attention(four, q, q, @)", "plain(four, twice, twice)"),
        setup="four = torch.rand(2, 4, 5, 8); twice = q.repeat_interleave(2, 1)",
    ),
    # weights
    case(
        "ch.weights(x, x).cumsum(-1)",
        ("w[:].cumsum", "(lambda w: @(-1))(ch.weights(x, x))", "soft(x, x).cumsum(-1)"),
        ("w[..., 0, :].cumsum", "(lambda w: @(-1))(ch.weights(x, x))", "soft(x, x)[..., 0, :].cumsum(-1)"),
    ),
    case(
        "bool(ch.weights(x, x))",
        ("w[..., 0, 0]", "(lambda w: @)(ch.weights(x, x))", "soft(x, x)[..., 0, 0]"),
        ("(w[:] > 0.5).any()", "(lambda w: @)(ch.weights(x, x))", "(soft(x, x) > 0.5).any()"),
    ),
    case("torch.relu_(ch.weights(x, x))", ("w.dense()", "(lambda w: torch.relu_(@))(ch.weights(x, x))", "soft(x, x)")),
    case(
        "ch.weights(x, x).gradients(x, x).dense(max_bytes=8)",
        ("g[..., -1, :]", "(lambda g: @)(ch.weights(x, x).gradients(x, x))", "(x @ x.mT)[..., -1, :]"),
        ("by_query()", "ch.weights(x, x).gradients(x, x).@", "(soft(x, x) * (x @ x.mT)).sum(-1)"),
        ("max_bytes=None", "ch.weights(x, x).gradients(x, x).dense(@)", "x @ x.mT"),
    ),
    case(
        "watched().compare(watched())[0].weights.dense(max_bytes=8)",
        ("d[..., -1, :]", "(lambda d: @)(watched().compare(watched())[0].weights)", "torch.zeros(2, 2, 5)"),
        (
            "blocks(sequence, head)",
            "(lambda d, sequence, head: next(d.@)[1])(watched().compare(watched())[0].weights, 0, 0)",
            "torch.zeros(5, 5)",
        ),
        ("max_bytes=None", "watched().compare(watched())[0].weights.dense(@)", "torch.zeros(2, 2, 5, 5)"),
    ),
    case(
        "ch.weights(x, x).dense(max_bytes=8)",
        ("max_bytes=None", "ch.weights(x, x).dense(@)", "soft(x, x)"),
        ("w[..., -1, :]", "(lambda w: @)(ch.weights(x, long))", "soft(x, long)[..., -1, :]"),
        setup="long = torch.rand(4, 20, 8)",
    ),
    case(
        "ch.weights(x, x)[torch.tensor([0, 1])]",
        ("dense()", "ch.weights(x, x).@[torch.tensor([0, 1])]", "soft(x, x)[:2]"),
    ),
    case(
        "ch.explain(x[0], x[0], x[0]).weights",
        ("explanation['weights']", "(lambda explanation: @)(ch.explain(x[0], x[0], x[0]))", "soft(x[0], x[0])"),
    ),
    case(
        "attention(x, x, x, sinks=torch.zeros(3))",
        ("(1,)", "attention(x, x, x, sinks=torch.zeros(@)).sum().isfinite()", "torch.tensor(True)"),
    ),
    # modules
    case(
        "attend(x, x, x, mask=rows.long())",
        ("mask=Padding(mask)", "attend(x, x, x, @)", "of_torch(x, ~rows)"),
        ("mask=DenseMask(mask.bool())", "attend(x, x, x, @)", "of_torch(x, None, ~rows)"),
        setup="mask = rows.long()",
    ),
    case(
        "attend(x, x, x, mask=torch.tensor([1, 2, 3, 4]))",
        ("valid_lens=mask", "attend(x, x, x, @)", "of_torch(x, ~steps)"),
        ("mask=Lengths(mask)", "attend(x, x, x, @)", "of_torch(x, ~steps)"),
        setup="mask = torch.tensor([1, 2, 3, 4]); steps = torch.arange(4) < mask[:, None]",
    ),
    case(
        "attend(x, x, x, valid_lens=rows)",
        ("mask=Padding(keep)", "attend(x, x, x, @)", "of_torch(x, ~rows)"),
        setup="keep = rows",
    ),
    case("attend(x, x, x, valid_lens=Causal())", ("mask=", "attend(x, x, x, @Causal())", "of_torch(x, None, ~low)")),
    case(
        "attend(x[:3], x[:3], x[:3], mask=rows[:3])",
        ("Padding(mask)", "attend(x[:3], x[:3], x[:3], mask=@)", "of_torch(x, ~rows)[:3]"),
        ("Padding(~mask)", "attend(x[:3], x[:3], x[:3], mask=Padding(~(@).keep))", "of_torch(x, ~rows)[:3]"),
        setup="mask = rows[:3]",
    ),
    case(
        "attend(x[:3], x[:3], x[:3], mask=padding)",
        ("mask[:, None]", "attend(x[:3], x[:3], x[:3], mask=@)", "of_torch(x, ~rows)[:3]"),
        setup="mask = padding = torch.zeros(3, 4).masked_fill(~rows[:3], -torch.inf)",
    ),
    case(
        "as_torch(x, x, x, attn_mask=rows.long())",
        ("key_padding_mask=attention_mask == 0", "as_torch(x, x, x, @)[0]", "of_torch(x, ~rows)"),
        setup="attention_mask = rows.long()",
    ),
    case(
        "as_torch(x, x, x, is_causal=True)",
        (
            "torch.nn.Transformer.generate_square_subsequent_mask(length)",
            "as_torch(x, x, x, attn_mask=@, is_causal=True)[0]",
            "of_torch(x, None, ~low)",
        ),
        setup="length = 4",
    ),
    case(
        "ch.nn.MultiHeadAttention(7, 2)",
        (
            "MultiHeadAttention(7, 2, head_dim=4)",
            "ch.nn.@(x[..., :7], x[..., :7], x[..., :7])[:, :, :0]",
            "x[:, :, :0]",
        ),
    ),
    case(
        "attend(x.double(), x, x)",
        ("query.to(module.W_q.weight)", "attend(@, x, x)", "of_torch(x)"),
        setup="query, module = x.double(), attend",
    ),
    case(
        "attend(x.tolist(), x, x)",
        ("torch.as_tensor(query)", "attend(@, x, x)", "of_torch(x)"),
        setup="query = x.tolist()",
    ),
    # diagnoses
    case(
        "ch.diagnose(q, q, q, mask=mask)",
        ("Causal()", "attention(q, q, q, mask=@)", "plain(q, q, q, tri)"),
        ("~mask", "attention(q, q, q, mask=@)", "plain(q, q, q, tri)"),
        setup="mask = torch.ones(5, 5).triu(1).bool(); tri = torch.ones(5, 5).tril().bool()",
    ),
    case(
        "ch.diagnose(q, q, q, mask=mask)",
        ("Causal()", "attention(q, q, q, mask=@)", "plain(q, q, q, tri)"),
        ("mask.mT", "attention(q, q, q, mask=@)", "plain(q, q, q, tri)"),
        setup="mask = torch.ones(5, 5).triu().bool(); tri = torch.ones(5, 5).tril().bool()",
    ),
    case(
        "ch.diagnose(*[flat.reshape(2, 2, 3, 4)] * 3)",
        (
            "flat.unflatten(-1, (2, 4)).transpose(1, 2)",
            "attention(*[@] * 3)",
            "torch.stack([plain(*[flat[..., 4 * h : 4 * h + 4]] * 3) for h in (0, 1)], 1)",
        ),
        setup="flat = torch.rand(2, 3, 8)",
    ),
    case(
        "ch.diagnose(torch.nn.MultiheadAttention(8, 2), query, query, query)",
        ("batch_first=True", "built(@)(query, query, query)[0]", "of_torch(query)"),
        ("query.transpose(0, 1)", "built()(*[@] * 3)[0].transpose(0, 1)", "of_torch(query)"),
        setup="query = torch.rand(2, 3, 8)\n"
        "def built(**options):\n    like = torch.nn.MultiheadAttention(8, 2, **options).eval()\n"
        "    like.load_state_dict(as_torch.state_dict())\n    return like",
    ),
    case(
        "ch.diagnose(torch.nn.MultiheadAttention(8, 2), x[:, :3], x[:, :3], x[:, :3], key_padding_mask=~rows[:, :3])",
        (
            "batch_first=True",
            "built(@)(x[:, :3], x[:, :3], x[:, :3], key_padding_mask=~rows[:, :3])[0]",
            "as_torch(x[:, :3], x[:, :3], x[:, :3], key_padding_mask=~rows[:, :3])[0]",
        ),
        setup="def built(**options):\n    like = torch.nn.MultiheadAttention(8, 2, **options).eval()\n"
        "    like.load_state_dict(as_torch.state_dict())\n    return like",
    ),
    case(
        "ch.diagnose(long, long, long, mask=mask)",
        ("~mask", "attention(long, long, long, mask=@)", "plain(long, long, long, near)"),
        setup="long = torch.rand(2, 12, 8); near = (torch.arange(12)[:, None] - torch.arange(12)).abs() < 3; mask = ~near",
    ),
    case(
        "diagnosed(mask)",
        ("mask.bool()", "attention(x, x, x, mask=@)", MATRIX),
        setup="mask = matrix.float()\nclass Adds(Block):\n    def forward(self, x):\n"
        "        return torch.nn.functional.scaled_dot_product_attention(x, x, x, mask)\n"
        "def diagnosed(mask):\n    model = Adds()\n    with ch.watch(model) as seen:\n        model(x[:, None])\n"
        "    return seen.diagnose()",
    ),
    case(
        "ch.diagnose(long, long, long, scale=1.0)",
        ("scale=0.125", "attention(long, long, long, @)", "plain(long, long, long)"),
        setup="long = torch.randn(2, 12, 64)",
    ),
    case(
        "ch.diagnose(x[:, :3], x, x, mask=Causal())",
        ('align="lower_right"', "attention(x[:, :3], x, x, mask=Causal(), @)", "plain(x[:, :3], x, x, low[1:])"),
    ),
    # models
    case(
        "gradient(inside=False)",
        ("Call backward() inside the `with`", "gradient(inside=True) # @", "torch.zeros_like(q)"),
        setup="from torch.utils.checkpoint import checkpoint\ndef gradient(inside):\n    block, x = Block(), q.clone().requires_grad_()\n    with torch.enable_grad(), ch.edit(block, ch.edits.ScaleHeads(heads=[0, 1], factor=0.0)):\n        loss = checkpoint(block, x, use_reentrant=False).sum()\n        if inside:\n            loss.backward()\n    if not inside:\n        loss.backward()\n    return x.grad",
    ),
    case(
        "twice(block, ch.edits.ScaleHeads(heads=0, factor=0.0), ch.edits.ScaleHeads(heads=1, factor=0.0))",
        ("ch.edit(model, first, second)", "inside(@, model)", "torch.zeros_like(q)"),
        setup="model = block = torch.nn.Sequential(Block()); first, second = ch.edits.ScaleHeads(heads=0, factor=0.0), ch.edits.ScaleHeads(heads=1, factor=0.0)\ndef inside(manager, model):\n    with manager:\n        return model(q)\ndef twice(block, a, b):\n    with ch.edit(block, a), ch.edit(block[0], b):\n        return block(q)",
    ),
    case(
        "unread(block)",
        ("values=True", "output(block, @)", "plain(q, q, q, five)"),
        setup="block = Block()\ndef output(block, **options):\n    with ch.watch(block, **options) as seen:\n        block(q)\n    return seen[0].output\ndef unread(block):\n    return output(block)",
    ),
    case(
        "monitored(Block().eval())",
        ("model.train()", "monitored((lambda model: @)(Block().eval()))", "torch.tensor(1)"),
        setup="def monitored(model):\n    with ch.models.monitor(model) as seen:\n        model(q)\n    return torch.tensor(seen.steps)",
    ),
    case("ch.diagnose(q)", ("query, key and value", "torch.tensor(len(ch.diagnose(q, q, q))) # @", "torch.tensor(0)")),
    # more inputs
    case(
        "attention(x.numpy().astype('O'), x.numpy(), x.numpy())",
        ("query.astype(float)", "torch.from_numpy(attention(@, *[x.double().numpy()] * 2))", "plain(x, x, x).double()"),
        setup="query = x.numpy().astype('O')",
    ),
    case(
        "attention(q.transpose(1, 2), q.transpose(1, 2), q)",
        ("tensor.transpose(1, 2)", "attention(*[@ for tensor in (q.transpose(1, 2),) * 2], q)", "plain(q, q, q)"),
    ),
    case(
        "torch.jit.trace(Attend(), x)",
        ("torch.export", "@.export(Attend(), (x,)).module()(x)", "plain(x, x, x)"),
        setup="class Attend(Block):\n    def forward(self, x):\n        return ch.attention(x, x, x)",
    ),
    case(
        "torch.func.vmap(lambda x: attention(x, x, x, dropout_p=0.5), randomness='different')(x)",
        ("dropout_p=0", "torch.func.vmap(lambda x: attention(x, x, x, @))(x)", "plain(x, x, x)"),
    ),
    case(
        "torch.func.vmap(lambda m: attention(x[0], x[0], x[0], mask=m))(matrix[None])",
        (
            "call attention() on the whole batch",
            "attention(x[:1], x[:1], x[:1], mask=matrix[None]) # @",
            "plain(x[:1], x[:1], x[:1], matrix)",
        ),
        (
            "MaskFunction(lambda b, h, i, j: keep[j])",
            "torch.func.vmap(lambda x, keep: attention(x, x, x, mask=@))(x, rows)",
            ROWS,
        ),
    ),
    case(
        "attention(x, x, x, mask=matrix.to('meta'))",
        ("mask.to(query.device)", "attention(x, x, x, mask=matrix) # @", MATRIX),
    ),
    case(
        "attention(q, q, q, sinks=torch.zeros(2, device='meta'))",
        ("sinks.to(query.device)", "attention(q, q, q, sinks=torch.full((2,), -1e9)) # @", "plain(q, q, q)"),
    ),
    case(
        "Documents.from_cu_seqlens([0, 2, 4]) & Documents.from_cu_seqlens([0, 4])",
        ("Documents.from_cu_seqlens(cu_q, cu_k)", "attention(x, x, x, mask=@)", "plain(x, x, x, blocks)"),
        setup="cu_q = cu_k = [0, 2, 4]; blocks = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).bool()",
    ),
    case(
        "attention(x, x, x, mask=Padding(rows[:, :3]))",
        ("the mask of the source", "attention(x, x, x, mask=Padding(rows)) # @", ROWS),
    ),
    case("Causal().dense('a', 4)", ("both lengths", "Causal().dense(4, 4).float() # @", "low.float()")),
    case(
        "attention(x, x, x, mask=Wrong())",
        ("view(1, 1, -1)", "attention(x, x, x, mask=Wrong(lambda p: p.@))", "plain(x, x, x, low)"),
        setup="class Wrong(ch.extend.Mask):\n    def __init__(self, shape=lambda p: p):\n        self.shape = shape\n    def lower(self, sizes):\n        place = self.shape(torch.arange(sizes.queries))\n        return ch.extend.Spans(place * 0, place + 1)",
    ),
    case(
        "ch.masked_softmax(listed)",
        ("torch.stack(scores)", "ch.masked_softmax(@)", "torch.full((2, 3), 1 / 3)"),
        setup="listed = scores = [torch.zeros(3, requires_grad=True)] * 2",
    ),
    case(
        "ch.masked_softmax(ragged)",
        (
            "valid_lens",
            "ch.masked_softmax(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), @=torch.tensor([2, 1]))[1]",
            "torch.tensor([1.0, 0.0])",
        ),
        setup="ragged = [[1.0, 2.0], [3.0]]",
    ),
    # inspection
    case(
        "ch.weights(x, x).reduce(ch.reductions.Mass(torch.tensor([0, -1, 1, 1])))",
        (
            "bool, (groups, Lk)",
            "ch.weights(x, x).reduce(ch.reductions.Mass(torch.tensor([[True, False, False, False], [False, False, True, True]]))) # @",
            "torch.stack([soft(x, x)[..., 0], soft(x, x)[..., 2:].sum(-1)], -1)",
        ),
    ),
    case(
        "freed(lambda tensor: tensor)",
        ("tensor.clone()", "freed(lambda tensor: @)", "plain(x, x, x)"),
        setup="def freed(given):\n    whole = x.clone()\n    part = given(whole)\n    whole.untyped_storage().resize_(0)\n    return ch.attention(x, x, part)",
    ),
    case(
        "stale(lambda tensor: tensor)",
        ("tensor.clone()", "stale(lambda tensor: @)", "keep @ keep.mT"),
        setup="keep = x.clone()\ndef stale(given):\n    value = keep.clone()\n    found = ch.weights(x, x).gradients(given(value), keep)\n    value.zero_()\n    return found[...]",
    ),
    # scores
    case(
        "ch.Additive.from_concatenated(torch.rand(5, 7), torch.rand(5))",
        (
            "pass key_dim",
            "ch.Additive.from_concatenated(torch.rand(5, 7), torch.rand(5), key_dim=3)(x[..., :4], x[..., :3])[..., :0] # @",
            "x[..., :0]",
        ),
    ),
    # modules
    case(
        "attend(x, x, x, mask=[1, 2])",
        (
            "valid_lens=...",
            "attend(x, x, x, valid_lens=torch.tensor([1, 2, 3, 4])) # @",
            "of_torch(x, torch.arange(4) >= torch.tensor([[1], [2], [3], [4]]))",
        ),
    ),
    case(
        "attend(x, x, x, valid_lens=2)",
        (
            "one for each sequence",
            "attend(x, x, x, valid_lens=[2, 2, 2, 2]) # @",
            "of_torch(x, (torch.arange(4) >= 2).expand(4, 4))",
        ),
    ),
    case(
        "attend(y, y.transpose(0, 1), y.transpose(0, 1))",
        ("tensor.transpose(0, 1)", "attend(*[@ for tensor in (y,) * 3])", "of_torch(x)"),
        setup="y = x[:, :3].transpose(0, 1); x = x[:, :3]\nm = of_torch\ndef of_torch(x):\n    return module_(x)\nmodule_ = lambda x: as_torch(x, x, x)[0]",
    ),
    case(
        "ch.nn.LearnedPositionalEncoding(2, 8)(x)",
        ("max_len=4", "ch.nn.LearnedPositionalEncoding(embed_dim=8, @)(x)[..., :0]", "x[..., :0]"),
    ),
    case(
        "attend(x, attend.prepare(x, x), cache=ch.nn.KeyValueCache())",
        ("one of the two", "attend(x, attend.prepare(x, x)) # @", "of_torch(x)"),
    ),
    case(
        "attend(x, x, x, new_lens=torch.tensor([1, 2, 3, 4]))",
        (
            "valid_lens",
            "attend(x, x, x, @=torch.tensor([1, 2, 3, 4]))",
            "of_torch(x, torch.arange(4) >= torch.tensor([[1], [2], [3], [4]]))",
        ),
    ),
    case(
        "attend(x, attend.prepare(x, x), x)",
        ("attend(query, prepared)", "@", "of_torch(x)"),
        ("attend(query, key, value)", "@", "of_torch(x)"),
        setup="query = key = value = x; prepared = attend.prepare(x, x)",
    ),
    case(
        "attend(x, x[:, :3], x[:, :3], mask=matrix)",
        (
            "Padding(keep)",
            "attend(x, x[:, :3], x[:, :3], mask=@)[:2]",
            "as_torch(x, x[:, :3], x[:, :3], key_padding_mask=~keep)[0][:2]",
        ),
        setup="keep = torch.tensor([[True, True, False]] * 4)",
    ),
    case(
        "used(attend)",
        ("Read attention_weights before", "used(attend, True) # @", "soft(*projected)"),
        setup="projected = [attend.W_q(x).unflatten(-1, (2, 4)).transpose(1, 2).detach(), attend.W_k(x).unflatten(-1, (2, 4)).transpose(1, 2).detach()]\ndef used(attend, before=False):\n    one = x.clone()\n    dot = ch.nn.DotProductAttention()\n    q1, k1 = (t.clone() for t in projected)\n    dot(q1, k1, k1)\n    if before:\n        return dot.attention_weights.dense().detach()\n    k1.zero_()\n    return dot.attention_weights.dense()",
    ),
    # diagnoses of the rest
    case(
        "ch.diagnose(q, q, q, mask=torch.zeros(5, 5).bool())",
        ("pass ~mask", "attention(q, q, q, mask=~torch.zeros(5, 5).bool()) # @", "plain(q, q, q)"),
    ),
    case(
        "ch.explain(x.to('meta'), x.to('meta'), x.to('meta'))",
        ("outside of torch.compile", "ch.explain(x, x, x)['output'] # @", "plain(x, x, x)"),
    ),
    case(
        "ch.diagnose(x.to('meta'), x.to('meta'), x.to('meta'))",
        ("Call it in eager code", "torch.tensor(len(ch.diagnose(x, x, x))) # @", "torch.tensor(0)"),
    ),
    # models
    case(
        "watched(layers='nothing')", ("numbered from 0", "watched(layers=0)[0].weights.dense() # @", "soft(q, q, five)")
    ),
    case(
        "watched().view(layer=0, heads=[1], opens=(0, 0))",
        (
            "one of the heads 1",
            "torch.tensor(watched().view(layer=0, heads=[1], opens=(0, 1)).page.meta()['opens']['head']) # @",
            "torch.tensor(0)",
        ),
    ),
    case(
        "of_two(1, opens=(0, 1))",
        (
            "'L1'",
            "torch.tensor(list(of_two(1, opens=(@, 1)).page.meta()['opens'].values()))",
            "torch.tensor([0, 1])",
        ),
        setup="def of_two(layer, **options):\n    model = torch.nn.Sequential(Block(), Block())\n"
        "    with ch.watch(model) as seen:\n        model(q)\n    return seen.view(layer, **options)",
    ),
    case(
        "watched().view(layer=0, heads=[])",
        (
            "or None",
            "torch.tensor(len(watched().view(layer=0, heads=None)._repr_html_()) > 1000) # @",
            "torch.tensor(True)",
        ),
    ),
    case(
        "other_output().diagnose()",
        ("another backend", "torch.tensor(len(watched(values=True).diagnose().errors)) # @", "torch.tensor(0)"),
        (
            "ch.audit",
            "torch.tensor(@(other_output(), Causal()).findings[0].code == 'first-key-masked')",
            "torch.tensor(True)",
        ),
        setup="def other_output():\n    seen = watched(values=True)\n"
        "    seen[0].outcome.output = plain(q, q, q, five & (torch.arange(5) > 0))\n    return seen\n",
    ),
    case(
        "ch.audit(watched(), 'causal')",
        ("ch.Causal()", "torch.tensor(ch.audit(watched(), @).ok)", "torch.tensor(True)"),
        ("a dict by layer", "torch.tensor(ch.audit(watched(), {0: Causal()}).ok) # @", "torch.tensor(True)"),
        ("None for every key", "torch.tensor(ch.audit(watched(), None).ok) # @", "torch.tensor(False)"),
    ),
    case(
        "ch.audit(lambda x: x, x, {0: Causal()})",
        (
            "one Mask, such as ch.Causal()",
            "torch.tensor(ch.audit(lambda x: x.cumsum(1), x, Causal()).ok) # @",
            "torch.tensor(True)",
        ),
    ),
    case(
        "ch.audit(model(), {'input_ids': torch.full((1, 6), 7)}, Causal())",
        (
            "a text with more words",
            "torch.tensor(ch.audit(model(), {'input_ids': IDS}, Causal()).ok) # @",
            "torch.tensor(True)",
        ),
        setup=LLAMA,
    ),
    case(
        "ch.audit(model(), {'tokens': IDS}, Causal())",
        (
            'inputs="..."',
            "torch.tensor(ch.audit(lambda tokens: model()(tokens), {'tokens': IDS}, Causal(), @.replace('...', 'tokens')).ok)",
            "torch.tensor(True)",
        ),
        setup=LLAMA,
    ),
    case(
        "packs([[5, 6], [5, 6, 7]])",
        ("examples of distinct ids", "packs([[5, 6], [7, 8, 9]]) # @", "torch.tensor(True)"),
        setup=LLAMA
        + "from transformers import DataCollatorWithFlattening\n"
        + "def packs(texts):\n    examples = [{'input_ids': ids} for ids in texts]\n"
        + "    return torch.tensor(ch.models.audit_collator(model(), DataCollatorWithFlattening(), examples).ok)\n",
    ),
    case(
        "watched().compare(longer())",
        (
            "matched=([0, 1, 3], [0, 1, 2])",
            "watched().compare(longer(), @)[0].divergence.isfinite().all()",
            "torch.tensor(True)",
        ),
        setup="def longer():\n    model = Block()\n    with ch.watch(model) as seen:\n        model(torch.rand(2, 2, 7, 8))\n    return seen",
    ),
    case(
        "watched(padding=torch.ones(3, 4))",
        ("(B, L)", "watched(padding=torch.ones(2, 5))[0].weights.dense() # @", "soft(q, q, five)"),
    ),
    case(
        "ch.watch(torch.compile(Block()))",
        ("watch(model._orig_mod)", "seen(ch.@)", "soft(q, q, five)"),
        setup="model = torch.compile(Block())\ndef seen(manager):\n    with manager as found:\n        model._orig_mod(q)\n    return found[0].weights.dense()",
    ),
    case(
        "warned(lambda: trained(Block().train()))",
        ("model.eval()", "trained((lambda model: @)(Block()))[0].weights.dense()", "soft(q, q, five)"),
        setup="class Drops(Block):\n    def forward(self, x):\n        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=0.5 * self.training)\nBlock = Drops\ndef trained(model):\n    with ch.watch(model, gradients=True) as seen:\n        model(q)\n    return seen",
    ),
    case(
        "changed(Block().train())",
        (
            "model.eval()",
            "changed((lambda model: @)(Block()))",
            "plain(q, q, q, five) * torch.tensor([0.0, 1.0])[:, None, None]",
        ),
        setup="class Drops(Block):\n    def forward(self, x):\n        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=0.5 * self.training)\nBlock = Drops\ndef changed(model):\n    with ch.edit(model, ch.edits.ScaleHeads(heads=0, factor=0.0)):\n        return model(q)",
    ),
    case(
        "edited(ch.edits.AddBias(torch.zeros(3, 3)))",
        ("the whole sequence", "edited(ch.edits.AddBias(torch.zeros(5, 5))) # @", "plain(q, q, q, five)"),
        setup="def edited(edit):\n    model = Block()\n    with ch.edit(model, edit):\n        return model(q)",
    ),
    case(
        "ch.models.load_recording(other())",
        ("seen.write()", "again()[0].weights.dense() # @", "soft(q, q, five)"),
        setup="import os, tempfile\nfrom safetensors.torch import save_file\ndef other():\n    path = os.path.join(tempfile.mkdtemp(), 'a.safetensors')\n    save_file({'x': x}, path)\n    return path\ndef again():\n    with tempfile.TemporaryDirectory() as folder:\n        return ch.models.load_recording(watched().write(folder + '/seen.safetensors'))",
    ),
    case(
        "watched().write('/nowhere/at/all.safetensors')",
        ("a folder that exists", "again()[0].weights.dense() # @", "soft(q, q, five)"),
        setup="import tempfile\ndef again():\n    with tempfile.TemporaryDirectory() as folder:\n        return ch.models.load_recording(watched().write(folder + '/seen.safetensors'))",
    ),
    case(
        "warned(lambda: monitored(Linear()))",
        ("scaled_dot_product_attention", "monitored(Block().train())", "torch.tensor(1)"),
        setup="Linear = lambda: torch.nn.Linear(8, 8).train()\ndef monitored(model):\n    with ch.models.monitor(model) as seen:\n        model(q)\n    return torch.tensor(seen.steps)",
    ),
    case(
        "seen(torch.nn.Linear(8, 8))",
        ("scaled_dot_product_attention", "seen(Block()) # @", "soft(q, q, five)"),
        setup="def seen(model):\n    with ch.watch(model) as found:\n        model(q)\n    return found[0].weights.dense()",
    ),
    case(
        "twice()",
        ("with ch.edit(...):", "twice(True) # @", "torch.zeros_like(q)"),
        setup="def twice(anew=False):\n    model = Block()\n    make = lambda: ch.edit(model, ch.edits.ScaleHeads(heads=[0, 1], factor=0.0))\n    manager = make()\n    with manager:\n        model(q)\n    with make() if anew else manager:\n        return model(q)",
    ),
    case(
        "backward(False)",
        ("loss.backward()", "backward(True).isfinite().all() # @", "torch.tensor(True)"),
        setup="def backward(yes):\n    model, one = Block(), q.clone().requires_grad_()\n    with torch.enable_grad(), ch.watch(model, gradients=True) as seen:\n        loss = model(one).sum()\n        if yes:\n            loss.backward()\n    return seen[0].gradients[...]",
    ),
    # pictures and words
    case(
        "watched().plot(0, title=3)",
        ("pass a string", "drawn(watched().plot(0, title='three')) # @", "torch.tensor(True)"),
        setup=PLOT,
    ),
    case(
        "watched().plot(0, tokens=list('abc'))",
        ("one word for each", "drawn(watched().plot(0, tokens=list('abcde'))) # @", "torch.tensor(True)"),
        setup=PLOT,
    ),
    case(
        "ch.weights(x, x).plot(0, query_labels='abcd')",
        ("a list of words", "drawn(ch.weights(x, x).plot(0, query_labels=list('abcd'))) # @", "torch.tensor(True)"),
        setup=PLOT,
    ),
    case(
        "ch.weights(x, x).plot(0, query_labels=list('abc'))",
        ("one for each", "drawn(ch.weights(x, x).plot(0, query_labels=list('abcd'))) # @", "torch.tensor(True)"),
        setup=PLOT,
    ),
    case(
        "ch.explain(x, x, x, title=3)",
        ("title='The first head'", "ch.explain(x, x, x, @)['output']", "plain(x, x, x)"),
    ),
    case(
        "watched(values=True)[0].explain(tokens=list('abc'))",
        (
            "one a position",
            "watched(values=True)[0].explain(tokens=list('abcde'))['output'][0, :] # @",
            "plain(q, q, q, five)[0, :]",
        ),
    ),
    case(
        "watched(values=True)[0].explain(tokens=q)",
        (
            "tokenizer.convert_ids_to_tokens(ids)",
            "watched(values=True)[0].explain(tokens=(lambda tokenizer, ids: @)(SimpleNamespace(convert_ids_to_tokens=list), 'abcde'))['output'][0, :]",
            "plain(q, q, q, five)[0, :]",
        ),
    ),
    case(
        "ch.explain(q, q, q, tokens=[list('abcde'), list('vwxyz')])",
        (
            "at=(0,)",
            "ch.explain(q, q, q, tokens=[list('abcde'), list('vwxyz')], @)['output']",
            "plain(q, q, q)[:1]",
        ),
        (
            "pass one list of words",
            "ch.explain(q, q, q, tokens=list('abcde'))['output'] # @",
            "plain(q, q, q)",
        ),
    ),
    case(
        "watched().table(tokens=list('abc'))",
        (
            "a list of words for each sequence",
            "torch.tensor(len(watched().table(tokens=[list('abcde')] * 2))) # @",
            "torch.tensor(2)",
        ),
    ),
    case(
        "watched().table(tokens=list('abcde'))",
        (
            "tokens=[words] * 2",
            "torch.tensor((lambda words: len(watched().table(@)))(list('abcde')))",
            "torch.tensor(2)",
        ),
    ),
    case(
        "watched().table(tokens=torch.rand(5))",
        (
            "integers (L,) or (B, L)",
            "torch.tensor(len(watched().table(tokens=torch.arange(5).repeat(2, 1)))) # @",
            "torch.tensor(2)",
        ),
    ),
    case(
        "ch.models.match_tokens('abc', 'abd')",
        (
            "ids.tolist()",
            "torch.tensor(ch.models.match_tokens((lambda ids: @)(torch.tensor([1, 2, 3])), [1, 2, 4]))",
            "torch.tensor([[0, 1], [0, 1]])",
        ),
    ),
    case(
        "watched().compare(watched(), matched=3)",
        (
            "matched=([0, 1, 3], [0, 1, 2])",
            "watched().compare(watched(), @)[0].divergence.isfinite().all()",
            "torch.tensor(True)",
        ),
    ),
    case(
        "watched().compare(many())",
        ("seen.runs[0]", "watched().compare((lambda seen: @)(many()))[0].divergence", "torch.zeros(2).double()"),
        setup="def many():\n    model = Block()\n    with ch.watch(model) as seen:\n        model(q), model(q)\n    return seen",
    ),
    case(
        "many().rollout()",
        ("seen.runs[0].rollout()", "(lambda seen: @)(many()).isfinite().all()", "torch.tensor(True)"),
        setup="def many():\n    model = Block()\n    with ch.watch(model) as seen:\n        model(q), model(torch.rand(2, 2, 7, 8))\n    return seen",
    ),
    case(
        "reduced()[0].weights",
        ("Name all statistics that you need in reductions", "reduced()[0].results[0].nan_to_num(0) # @", "entropy"),
    ),
    # lazy attentions
    case(
        "lazy().data_ptr()",
        ("attention.dense().data_ptr()", "torch.tensor((lambda attention: @)(lazy()) > 0)", "torch.tensor(True)"),
        setup=LLAMA,
    ),
    case(
        "lazy().zero_()",
        ("attention.clone()", "(lambda attention: @)(lazy()).zero_().sum()", "torch.tensor(0.0)"),
        setup=LLAMA,
    ),
    case(
        "lazy(max_bytes=8).clone()",
        ("attention[:, 0]", "(lambda attention: @)(lazy(max_bytes=400))", "eager()[:, 0]"),
        (
            "attention.weights.entropy()",
            "(lambda attention: @)(lazy(max_bytes=400)).nan_to_num(0)",
            "-(eager() * eager().clamp(min=1e-30).log()).sum(-1)",
        ),
        setup=LLAMA,
    ),
    case("warned(lambda: lazy(train=True))", ("model.eval()", "lazy() # @", "eager()"), setup=LLAMA),
    case(
        "wrapped()",
        (
            "pass the model inside it",
            "torch.tensor(wrapped(True).config._attn_implementation == 'clearhead') # @",
            "torch.tensor(True)",
        ),
        setup=LLAMA
        + "def wrapped(inside=False):\n    return ch.models.run_on_clearhead(model() if inside else torch.nn.Sequential(model()))\n",
    ),
    case(
        "of_layers()",
        ("seen[name].joined()", "(lambda seen, name: @)(recorded(), 'layers.0.self_attn').dense()", "eager()"),
        setup=LLAMA
        + "def recorded():\n    one = model()\n    with ch.watch(one) as seen, torch.no_grad():\n        one(IDS)\n    return seen\ndef of_layers():\n    return recorded()['*'].joined()\n",
    ),
    # the rest
    case(
        "torch.func.vmap(lambda v: attention(x, x, x, mask=Lengths(v)))(lens)",
        (
            "on the whole batch",
            "attention(x, x, x, mask=Lengths(lens[0])) # @",
            "plain(x, x, x, torch.arange(4) < lens[0][:, None, None])",
        ),
        (
            "MaskFunction(lambda b, h, i, j: j < length)",
            "torch.func.vmap(torch.func.grad(lambda x, length: attention(x, x, x, mask=@).square().sum()))(x, lens[0])",
            "torch.func.grad(lambda y: plain(y, y, y, torch.arange(4) < lens[0][:, None, None]).square().sum())(x)",
        ),
        (
            "a float mask of 0 and −∞",
            "torch.func.vmap(lambda x, m: attention(x, x, x, mask=m))(x, torch.where(rows[:, None], 0.0, -torch.inf)) # @",
            ROWS,
        ),
        setup="lens = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])",
    ),
    case(
        "attention(x, x, x, mask=Far())",
        ("0 ≤ start and stop ≤ Lk", "attention(x, x, x, mask=Far(0)) # @", "plain(x, x, x)"),
        setup="class Far(ch.extend.Mask):\n    def __init__(self, more=3):\n        self.more = more\n    def lower(self, sizes):\n        start = torch.zeros(1, 1, 1, dtype=torch.int64)\n        return ch.extend.Spans(start, start + sizes.keys + self.more)",
    ),
    case(
        "ch.nn.RotaryEmbedding(8)([1.0])",
        ("pass a tensor (..., L, E)", "ch.nn.RotaryEmbedding(8)(x[:, :1]) # @", "x[:, :1]"),
    ),
    case(
        "ch.nn.SinusoidalPositionalEncoding(8)([1.0])",
        ("pass a tensor (..., L, 8)", "ch.nn.SinusoidalPositionalEncoding(8)(x)[:0] # @", "x[:0]"),
    ),
    case(
        "ch.Additive.from_weights(torch.rand(8, 5), torch.rand(5, 8), torch.rand(5))(x, x)",
        (
            "W_q.T",
            "ch.Additive.from_weights((lambda W_q: @)(W), K, w)(x, x)",
            "torch.tanh((x @ W)[:, :, None] + (x @ K.T)[:, None]) @ w",
        ),
        setup="W, K, w = torch.rand(8, 5), torch.rand(5, 8), torch.rand(5)",
    ),
    case(
        "again()",
        ("with ch.models.monitor(...):", "again(True) # @", "torch.tensor(1)"),
        setup="def again(anew=False):\n    model = Block().train()\n    seen = ch.models.monitor(model)\n    with seen:\n        model(q)\n    with ch.models.monitor(model) if anew else seen as second:\n        model(q)\n    return torch.tensor(second.steps)",
    ),
    case(
        "first(x[:, :3], y, y)",
        ("batch_first=True", "ch.nn.TorchMultiheadAttention(8, 2, @)(x[:, :3], y, y)[0][..., :0]", "x[:, :3, :0]"),
        setup="first = ch.nn.TorchMultiheadAttention(8, 2); y = torch.rand(4, 5, 8)",
    ),
    case(
        "saved(gauss())",
        (
            "ch.models.Recording([call for call in seen.calls if …]).write(path)",
            "saved(watched()) # @",
            "soft(q, q, five)",
        ),
        setup="import os, tempfile\ndef saved(seen):\n    path = os.path.join(tempfile.mkdtemp(), 'a.safetensors')\n    return ch.models.load_recording(seen.write(path))[0].weights.dense()\nclass Gauss(Block):\n    def forward(self, x):\n        return ch.attention(x, x, x, score=ch.Gaussian())\ndef gauss():\n    one = Gauss()\n    with ch.watch(one) as seen:\n        one(q)\n    return seen",
    ),
    case(
        "lazily().backward()",
        ("call.weights.gradients(value, grad)", "(lambda call, value, grad: @)(watched()[0], q, q)[...]", "q @ q.mT"),
        setup=LLAMA
        + "def lazily():\n    one = model()\n    with ch.models.lazy_attentions(one):\n        found = one(IDS, output_attentions=True).attentions[0]\n    found.register_hook(print)\n    return found.sum()\n",
    ),
    case(
        "torch.func.vmap(one)(q[None])",
        ("without", "one(q) # @", "plain(q, q, q, five)"),
        setup="block = Block()\ndef one(x):\n    with ch.edit(block, ch.edits.ScaleHeads(heads=0, factor=1.0)):\n        return block(x)",
    ),
    case(
        "left_out().rollout()",
        ("ch.models.Recording(seen.calls)", "(lambda seen: @)(left_out())[0].weights.dense()", "soft(q, q, five)"),
        setup="""
import warnings
class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = Block(), Block()
    def forward(self, x):
        torch.func.grad(lambda x: self.other(x).sum())(x)
        return self.one(x)
def left_out():
    model = Two()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        with ch.watch(model) as seen:
            model(q)
    return seen
""",
    ),
    case(
        "of_cache()",
        ('align="lower_right"', "attention(x[:, 1:], x, x, mask=Causal(), @)", "plain(x[:, 1:], x, x, low[1:])"),
        setup="of_cache = lambda: ch.diagnose(x[:, 1:], x, x, mask=Causal(), align='upper_left')",
    ),
    case(
        "swapped()",
        ("torch.func.grad", "@(of_rate)(torch.tensor(0.5))", "want()"),
        ("engine='reference'", "swapped(@)", "want()"),
        setup="""
y = torch.rand(1, 2, 512, 64)
class Attend(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = torch.nn.Parameter(torch.tensor(0.7))
    def rule(self, b, head, i, j):
        return self.rate * (i - j) / 512
    def forward(self, **options):
        score = lambda q, k: q @ k.mT / 8
        return attention(y, y, y, score=score, bias=BiasFunction(self.rule), **options).sin().mean()
def of_rate(rate, **options):
    return torch.func.functional_call(Attend(), {'rate': rate}, (), options)
@torch.enable_grad()
def swapped(**options):
    rate = torch.tensor(0.5, requires_grad=True)
    return torch.autograd.grad(of_rate(rate, **options), rate)[0]
@torch.enable_grad()
def want():
    rate, at = torch.tensor(0.5, requires_grad=True), torch.arange(512)
    return torch.autograd.grad(plain(y, y, y, added=rate * (at[:, None] - at) / 512).sin().mean(), rate)[0]
""",
    ),
    case(
        "by_head(hidden)",
        ("reads=", "by_head(hidden, reads=parameters) # @", "want()"),
        setup="parameters = [torch.nn.Parameter(torch.tensor(rate)) for rate in (0.5, 0.7)]\nhides = SimpleNamespace(held=parameters)\ndef hidden(b, head, i, j):\n    return torch.stack([getattr(hides, 'held')[n] for n in head.flatten().tolist()]).view(head.shape) * (i - j) / 512\ny = torch.rand(1, 2, 512, 64)\ndef gradients(output):\n    return torch.stack(torch.autograd.grad(output.sin().mean(), parameters))\n@torch.enable_grad()\ndef by_head(function, reads=()):\n    return gradients(attention(y, y, y, score=lambda q, k: q @ k.mT / 8, bias=BiasFunction(function, reads=reads)))\n@torch.enable_grad()\ndef want():\n    at = torch.arange(512)\n    return gradients(plain(y, y, y, added=torch.stack(parameters)[:, None, None] * (at[:, None] - at) / 512))",
    ),
]
