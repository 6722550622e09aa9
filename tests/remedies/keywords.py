"""The keywords of other libraries, and what the message says to write for each."""

from typing import NamedTuple

from remedies.table import Case, case

MASKED = "plain(x, x, x, {})"


class Keyword(NamedTuple):
    """A keyword, a fragment of what is to be passed for it, where that is put, and the numbers that it should give."""

    name: str
    fragment: str
    put: str
    meant: str
    setup: str = ""


CALL = "attention(x, x, x, @)"
LATER = "attention(x[:, :2], x, x, mask=Causal(), @)"
OF_FUNCTIONS = (
    Keyword("attn_mask", "mask=attn_mask", CALL, MASKED.format("matrix"), "attn_mask = matrix"),
    Keyword("attn_mask", "mask=~attn_mask", CALL, MASKED.format("~matrix"), "attn_mask = matrix"),
    Keyword("is_causal", "mask=Causal()", CALL, MASKED.format("low")),
    Keyword("is_causal", "align='upper_left'", LATER, "plain(x[:, :2], x, x, low[:2])"),
    Keyword("causal", "mask=Causal()", CALL, MASKED.format("low")),
    Keyword("causal", "align='lower_right'", LATER, "plain(x[:, :2], x, x, low[2:])"),
    Keyword(
        "key_padding_mask",
        "mask=Padding(~key_padding_mask)",
        CALL,
        MASKED.format("rows[:, None]"),
        "key_padding_mask = ~rows",
    ),
    Keyword(
        "attention_mask",
        "mask=Padding(attention_mask)",
        CALL,
        MASKED.format("rows[:, None]"),
        "attention_mask = rows.long()",
    ),
    Keyword("softmax_scale", "scale=softmax_scale", CALL, MASKED.format("scale=0.5"), "softmax_scale = 0.5"),
    Keyword(
        "softcap",
        "score=Dot(softcap=softcap)",
        CALL,
        "(2 * (x @ x.mT / 8**0.5 / 2).tanh()).softmax(-1) @ x",
        "softcap = 2.0",
    ),
    Keyword(
        "window_size",
        "mask=SlidingWindow(before=window_size[0], after=window_size[1])",
        CALL.replace("attention(", "(lambda SlidingWindow: attention(").replace("@)", "@))(ch.SlidingWindow)"),
        MASKED.format("low & ~low.tril(-2)"),
        "window_size = (1, 0)",
    ),
    Keyword(
        "score_mod",
        "score=Dot().then(score_mod)",
        CALL.replace("attention(", "(lambda Dot: attention(").replace("@)", "@))(ch.Dot)"),
        MASKED.format("None, (torch.arange(4)[:, None] - torch.arange(4)) / 10"),
        "score_mod = lambda score, b, h, i, j: score + (i - j) / 10",
    ),
    Keyword("need_weights", "weights(query, key, …)", "ch.weights(x, x)[:] # @", "soft(x, x)"),
)
MODULE = "attend(x, x, x, @)"
OF_MODULES = (
    Keyword(
        "position_ids",
        "positions=position_ids",
        "turning(x, x, x, @)",
        "turning(x, x, x)",
        "position_ids = torch.arange(3, 7); turning = ch.nn.MultiHeadAttention(8, 2, rotary=ch.nn.RotaryEmbedding(4))",
    ),
    Keyword(
        "past_key_values",
        "cache=KeyValueCache()",
        "(lambda KeyValueCache: attend(x, x, x, @))(ch.nn.KeyValueCache)",
        "of_torch(x)",
    ),
    Keyword("attn_mask", "mask=~attn_mask", MODULE, "of_torch(x, None, ~matrix)", "attn_mask = ~matrix"),
    Keyword("is_causal", "mask=Causal()", MODULE, "of_torch(x, None, ~low)"),
    Keyword(
        "key_padding_mask",
        "mask=Padding(~key_padding_mask)",
        MODULE,
        "of_torch(x, ~rows)",
        "key_padding_mask = ~rows",
    ),
    Keyword(
        "attention_mask",
        "mask=Padding(attention_mask)",
        MODULE,
        "of_torch(x, ~rows)",
        "attention_mask = rows.long()",
    ),
    Keyword(
        "need_weights", "module.attention_weights", "(attend(x, x, x), (lambda module: @)(attend))[1].mean(1)", "seen"
    ),
)
WIDTHS = "torch.tensor([*ch.nn.{}({}).W_{}.weight.shape])"
SIZES = "num_hiddens, num_heads, dropout, key_size, value_size, query_size = 8, 2, 0.5, 5, 6, 7"


def _built(who: str, name: str, fragment: str, rest: str, layer: str, meant: list[int]) -> Case:
    """A keyword with which a module is built, and the shape of a layer that it should give."""
    given = f"@, {rest}" if rest else "@"
    return case(
        f"ch.nn.{who}({name}=0)", (fragment, WIDTHS.format(who, given, layer), f"torch.tensor({meant})"), setup=SIZES
    )


CAPPED = "(lambda made: ch.attention(x, x, x, **made))(dict(@))"
BETWEEN = "(lambda SlidingWindow: attention(x, x, x, @))(ch.SlidingWindow)"
BUILT = [
    _built("MultiHeadAttention", "num_hiddens", "embed_dim=num_hiddens", "num_heads=2", "q", [8, 8]),
    _built("MultiHeadAttention", "key_size", "kdim=key_size", "embed_dim=8, num_heads=2", "k", [8, 5]),
    _built("MultiHeadAttention", "value_size", "vdim=value_size", "embed_dim=8, num_heads=2", "v", [8, 6]),
    _built(
        "MultiHeadAttention",
        "query_size",
        "embed_dim=query_size, head_dim=num_hiddens // num_heads",
        "num_heads=2",
        "q",
        [8, 7],
    ),
    _built("AdditiveAttention", "num_hiddens", "hidden_dim=num_hiddens", "key_dim=5", "k", [8, 5]),
    _built("AdditiveAttention", "key_size", "key_dim=key_size", "hidden_dim=8", "k", [8, 5]),
    _built("AdditiveAttention", "query_size", "query_dim=query_size", "hidden_dim=8", "q", [8, 7]),
    case(
        "ch.nn.MultiHeadAttention(8, 2, softcap=2.0)",
        ("score=Dot(softcap=softcap)", CAPPED, "ch.attention(x, x, x, score=Dot(softcap=2.0))"),
        setup="softcap = 2.0",
    ),
    case(
        "ch.nn.MultiHeadAttention(8, 2, sliding_window=2)",
        ("mask=Causal() & SlidingWindow(before=sliding_window - 1)", BETWEEN, "plain(x, x, x, low & ~low.tril(-2))"),
        setup="sliding_window = 2",
    ),
    case(
        "ch.nn.RotaryEmbedding(4, rope_theta=50.0)",
        ("base=rope_theta", "ch.nn.RotaryEmbedding(4, @)(x)", "ch.nn.RotaryEmbedding(4, 50.0)(x)"),
        setup="rope_theta = 50.0",
    ),
    case(
        "ch.nn.KeyValueCache(max_len=9)",
        ("capacity=max_len", "torch.tensor(ch.nn.KeyValueCache(@).capacity)", "torch.tensor(9)"),
        setup="max_len = 9",
    ),
    case(
        "ch.masked_softmax(x, mask=0)",
        ("valid_lens=mask", "ch.masked_softmax(torch.matmul(x, x.mT) / 8**0.5, @)", "soft(x, x, low)"),
        setup="mask = low",
    ),
    case(
        "Lengths([1.0, 2.0, 3.0, 4.0])",
        ("torch.as_tensor(valid_lens).long()", "attention(x, x, x, valid_lens=@)", "plain(x, x, x, steps)"),
        setup="valid_lens = [1.0, 2.0, 3.0, 4.0]; steps = torch.arange(4) < torch.tensor(valid_lens)[:, None, None]",
    ),
]


def _case(one: Keyword, wrong: str, more: str = "") -> Case:
    return case(wrong, (one.fragment, one.put, one.meant), setup=f"{more}{one.setup}")


SEEN = """
parts_of = lambda layer: layer(x).unflatten(-1, (2, 4)).transpose(1, 2).detach()
seen = soft(parts_of(attend.W_q), parts_of(attend.W_k)).mean(1)
"""
CASES = [_case(one, f"attention(x, x, x, {one.name}=0)") for one in OF_FUNCTIONS]
CASES += [_case(one, f"attend(x, x, x, {one.name}=0)", SEEN) for one in OF_MODULES] + BUILT
