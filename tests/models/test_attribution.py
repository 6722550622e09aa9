"""Logit attributions of models with a softcap, with functions that are not linear, and under edits, by own hooks."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

import clearhead as ch

HEADS, WIDTH = 4, 32
IDS = torch.tensor([[1, 5, 9, 2, 7, 3], [4, 4, 8, 6, 0, 11]])
SAME = {
    "vocab_size": 40,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,  # so the results inside an MLP are as wide as the residual stream
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
}


def moved(model: Any, dtype: torch.dtype = torch.float64, by: float = 0.2) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.randn_like(parameter)
    return model.eval().to(dtype)


def gemma(cap: float | None, dtype: torch.dtype = torch.float64, by: float = 0.2) -> Any:
    torch.manual_seed(0)
    more = {"num_key_value_heads": 2, "head_dim": 8}
    return moved(Gemma2ForCausalLM(Gemma2Config(**SAME, **more, final_logit_softcapping=cap)), dtype, by)


def kept_of(model: nn.Module, modules: list[nn.Module], inputs: dict[str, Any]) -> tuple[Any, list[Any], list[Any]]:
    """The model's output, and what some of its modules were given and gave."""
    given: list[Any] = [None] * len(modules)
    gave: list[Any] = [None] * len(modules)

    def hook(n: int) -> Any:
        def keep(module: nn.Module, args: Any, result: Any) -> None:
            given[n], gave[n] = args[0].detach(), result.detach()

        return keep

    hooks = [module.register_forward_hook(hook(n)) for n, module in enumerate(modules)]
    with torch.no_grad():
        output = model(**inputs)
    for one in hooks:
        one.remove()
    return output, given, gave


def through(norm: Any, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A part of the input of a norm of Gemma, at the norm's size for the whole input."""
    return part * (whole.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * (1 + norm.weight.detach())


def parts_of_gemma(model: Any, inputs: dict[str, Any], at: int = -1) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The output; the logits before the cap at a position, (B, V); and what heads add to them, (2, B, H, V)."""
    layers, norm = list(model.model.layers), model.model.norm
    modules = [*(m.self_attn.o_proj for m in layers), *(m.post_attention_layernorm for m in layers), norm]
    output, given, gave = kept_of(model, [*modules, model.lm_head], inputs)
    found = []
    for n, layer in enumerate(layers):
        heads = given[n].unflatten(-1, (HEADS, -1))
        written = torch.einsum("blhe,dhe->bhld", heads, layer.self_attn.o_proj.weight.unflatten(1, (HEADS, -1)))
        part = through(layer.post_attention_layernorm, given[2 + n].unsqueeze(1), written)
        found.append(through(norm, given[4].unsqueeze(1), part)[:, :, at] @ model.lm_head.weight.T)
    return output, gave[5][:, at], torch.stack(found).detach()


@pytest.mark.parametrize("against", [None, 3, [3, 8]])
@pytest.mark.parametrize("cap", [None, 30.0, 2.0, 0.5])
def test_the_logit_before_a_softcap_is_attributed(cap: float | None, against: Any) -> None:
    model, inputs = gemma(cap), {"input_ids": IDS}
    output, before, heads = parts_of_gemma(model, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ch.models.logit_attribution(model, inputs, token=7, against=against)
    rows = torch.arange(2)

    def of(logits: torch.Tensor) -> torch.Tensor:
        other = 0.0 if against is None else logits[..., rows, torch.tensor(against).expand(2)]
        return logits[..., rows, torch.tensor([7, 7])] - other

    assert torch.allclose(found.logit, of(before), rtol=1e-9)
    for n, call in enumerate(found):
        assert torch.allclose(call.heads, of(heads[n].transpose(0, 1)).T, rtol=1e-6, atol=1e-9)
    assert found.remainder.abs().max() < 1e-6 * before.abs().max()
    if cap is None:
        assert found.capped is None and "softcap" not in found.sentence
    else:
        assert torch.allclose(found.capped, of(output.logits[:, -1]), rtol=1e-9)
        assert torch.allclose(output.logits[:, -1], cap * (before / cap).tanh(), rtol=1e-9)
        assert "before the model's softcap" in found.sentence


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_softcap_that_is_nearly_full_hides_nothing(dtype: torch.dtype) -> None:
    model, inputs = gemma(15.0, dtype, by=1.5), {"input_ids": IDS}
    _, before, _ = parts_of_gemma(model, inputs)
    token = before.argmax(-1)
    found = ch.models.logit_attribution(model, inputs, token=token)
    assert found.capped.min() > 14.9 and found.logit.min() > 45
    rounding = {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    assert torch.allclose(found.logit, before.max(-1).values, rtol=rounding)
    assert (found.remainder / found.logit).abs().max() < rounding


def test_a_softcap_by_a_function_is_met_too() -> None:
    torch.manual_seed(0)
    sizes = {**SAME, "num_hidden_layers": 3, "lru_width": WIDTH, "num_key_value_heads": 1, "head_dim": 8}
    config = RecurrentGemmaConfig(**sizes, block_types=["recurrent", "recurrent", "attention"], logits_soft_cap=2.0)
    model = moved(RecurrentGemmaForCausalLM(config), torch.float32)
    logits = model(IDS, use_cache=False).logits[:, -1, 7].detach()
    found = ch.models.logit_attribution(model, {"input_ids": IDS, "use_cache": False}, token=7)
    assert torch.allclose(found.capped, logits, rtol=1e-4, atol=1e-6)
    assert torch.allclose(2.0 * (found.logit / 2.0).tanh(), logits, rtol=1e-4, atol=1e-6)
    assert found.logit.abs().min() > found.capped.abs().min()


@pytest.mark.parametrize("kind", [BertForMaskedLM, BertForSequenceClassification, BertForTokenClassification])
def test_parts_that_do_not_add_up_are_told(kind: Any) -> None:
    """The head of a masked language model has a GELU, and that of a sequence a tanh which is no softcap."""
    torch.manual_seed(0)
    model = moved(kind(BertConfig(**SAME, num_labels=5)), torch.float32)
    name = {BertForMaskedLM: "gelu", BertForSequenceClassification: "tanh"}.get(kind)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = ch.models.logit_attribution(model, {"input_ids": IDS}, token=1, against=3)
    assert found.capped is None
    texts = [str(one.message) for one in said if "logit_attribution" in str(one.message)]
    assert len(texts) == (name is not None)
    if name is not None:
        assert f"computes {name}, " in texts[0] and said[0].filename == __file__


class Ends(nn.Module):
    """A residual stream that ends in a function of the logits."""

    def __init__(self, end: Any) -> None:
        super().__init__()
        self.embed, self.end = nn.Embedding(40, WIDTH), end
        self.layers = nn.ModuleList(ch.nn.MultiHeadAttention(WIDTH, HEADS, bias=False) for _ in range(2))
        self.choose = nn.Linear(WIDTH, 40, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x, x, x)
        result: torch.Tensor = self.end(self.choose(x))
        return result


ENDS = {
    "a cap": (lambda x: 5 * torch.tanh(input=x / 5), True),
    "a cap of another slope": (lambda x: (x / 2).tanh() * 3, True),
    "a cap and a bias": (lambda x: 5 * torch.tanh(x / 5) + torch.arange(40.0), False),
    "a cap of some": (lambda x: torch.cat((x[..., :20].tanh(), x[..., 20:]), -1), False),
    "log of chances": (lambda x: x.log_softmax(-1), False),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_last_tanh_is_a_softcap_where_the_numbers_say_so(name: str) -> None:
    torch.manual_seed(0)
    end, capped = ENDS[name]
    model = Ends(end).eval().double()
    before = Ends(lambda x: x).eval().double()
    before.load_state_dict(model.state_dict())
    logits = {"a cap of another slope": 1.5}.get(name, 1.0) * before(IDS)[:, -1, 7].detach()
    if capped:
        found = ch.models.logit_attribution(model, IDS, token=7)
        assert torch.allclose(found.logit, logits, rtol=1e-9) and found.remainder.abs().max() < 1e-9
        assert torch.allclose(found.capped, model(IDS)[:, -1, 7].detach(), rtol=1e-9)
        return
    with pytest.warns(UserWarning, match="do not add up to the logit. What is missing is in remainder"):
        found = ch.models.logit_attribution(model, IDS, token=7)
    assert found.capped is None and torch.allclose(found.logit, model(IDS)[:, -1, 7].detach())


def seen(model: Any, ids: torch.Tensor) -> Any:
    with torch.no_grad(), ch.watch(model, values=True) as found:
        model(ids)
    return found


EDITS: dict[str, Any] = {
    "zero": lambda here, other: [ch.edits.Ablate(0, 1)],
    "mean": lambda here, other: [ch.edits.Ablate(0, 1, "mean", other)],
    "resample": lambda here, other: [ch.edits.Ablate(1, [0, 2], "resample", other)],
    "output": lambda here, other: [ch.edits.Patch(other, 0, 3, queries=[0, 5])],
    "value": lambda here, other: [ch.edits.Patch(other, 0, [2, 3], part="value")],
    "query": lambda here, other: [ch.edits.Patch(other, 0, 2, part="query")],
    "weights": lambda here, other: [ch.edits.Freeze(other, 1, 2)],
    "scale": lambda here, other: [ch.edits.ScaleHeads(0, 1, factor=-2.5)],
    "knockout": lambda here, other: [ch.edits.Knockout(1, 0, keys=0)],
    "knockout after": lambda here, other: [ch.edits.Knockout(1, 0, keys=0, after=True)],
    "bias": lambda here, other: [ch.edits.AddBias(ch.ALiBi(HEADS), 0)],
    "path": lambda here, other: [ch.edits.Patch(here), ch.edits.Patch(other, 0, 1)],
}
# by layer, the heads whose output is of no key
PUT = {"mean": {0: [1]}, "resample": {1: [0, 2]}, "output": {0: [3]}, "path": {0: [1], 1: [0, 1, 2, 3]}}


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("name", EDITS)
def test_the_parts_of_an_edited_run(name: str, cap: float | None) -> None:
    model, inputs = gemma(cap), {"input_ids": IDS}
    edits = EDITS[name](seen(model, IDS), seen(model, IDS.flip(1)))
    plain = ch.models.logit_attribution(model, inputs, token=7)
    with ch.edit(model, *edits):
        _, before, heads = parts_of_gemma(model, inputs)
        found = ch.models.logit_attribution(model, inputs, token=7)
    assert torch.allclose(found.logit, before[:, 7], rtol=1e-9) and not torch.allclose(found.logit, plain.logit)
    for n, call in enumerate(found):
        assert torch.allclose(call.heads, heads[n][..., 7], rtol=1e-6, atol=1e-9)
        assert torch.allclose(call.positions.sum(-1), call.heads, rtol=1e-9, atol=1e-12)
        read = call.heads.clone()
        read[:, PUT.get(name, {}).get(n, [])] = 0.0
        assert torch.allclose(call.sources.sum(-1), read, rtol=1e-6, atol=1e-9)
        if name.startswith("knockout") and n == 1:
            assert call.sources[:, 0, 0].abs().max() == 0
    assert found.remainder.abs().max() < 1e-6 * before.abs().max()


def test_heads_that_make_up_for_another_are_found_in_one_call() -> None:
    """The sum of all changes of parts is the change of the logit; edits outside and inside of another `with` too."""
    torch.manual_seed(1)
    model = Ends(lambda x: x).eval().double()
    plain = ch.models.logit_attribution(model, IDS, token=7)
    with ch.edit(model, ch.edits.Ablate(0, 1)), ch.edit(model, ch.edits.Knockout(1, 2, keys=1)):
        found = ch.models.logit_attribution(model, IDS, token=7)
        assert torch.allclose(found.logit, model(IDS)[:, -1, 7].detach())
    assert found[0].heads[:, 1].abs().max() == 0 and not torch.allclose(found[1].heads, plain[1].heads)
    assert found.remainder.abs().max() < 1e-9
    with pytest.raises(ch.ClearheadError, match="changed nothing"), ch.edit(model, ch.edits.Ablate(0, queries=90)):
        ch.models.logit_attribution(model, IDS, token=7)


@pytest.mark.parametrize(
    ("token", "against", "said"),
    [
        (7, 7, "both 7 in sequence 0"),
        ([7, 3], 3, "both 3 in sequence 1"),
        (torch.tensor([5, 6]), torch.tensor([6, 6]), "both 6 in sequence 1"),
    ],
)
def test_a_token_against_itself_is_an_error(token: Any, against: Any, said: str) -> None:
    model = Ends(lambda x: x).eval()
    metric = ch.models.logit_difference(token, against)
    zero = lambda layer, head: ch.edits.Ablate(layer, head)
    for ask in (
        lambda: ch.models.logit_attribution(model, IDS, token, against=against),
        lambda: metric(model(IDS)),
        lambda: ch.models.sweep(model, zero, IDS, metric),
        lambda: ch.models.attribution_patching(model, zero, IDS, metric),
    ):
        with pytest.raises(ch.ClearheadError, match=f"token and against are {said}"):
            ask()


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("count", [1, 2])
def test_an_attribution_reads_as_its_sum(cap: float | None, count: int) -> None:
    found = ch.models.logit_attribution(gemma(cap), {"input_ids": IDS[:count]}, token=7)
    text = repr(found)
    assert ("before the softcap" in text) == (cap is not None) and ("mean of 2 sequences" in text) == (count == 2)
    numbers = re.findall(r"(L\d+H\d+|5 other heads|other layers|remainder) ([+-][\d.e-]+)", text)
    assert len(numbers) == 6 and len(text) < 200
    whole = float(re.findall(r"LogitAttribution\((-?[\d.]+)", text)[0])
    assert whole == pytest.approx(float(found.logit.mean()), rel=1e-3)
    assert sum(float(number) for _, number in numbers) == pytest.approx(whole, abs=0.02 * (1 + abs(whole)))
    rows = sorted((row for row in found.table() if row["head"] != ""), key=lambda row: -abs(row["attribution"]))
    assert [name for name, _ in numbers[:3]] == [f"L{row['layer']}H{row['head']}" for row in rows[:3]]
    assert [one.calls for one in found.runs] == [found.calls]


@pytest.mark.parametrize("normed", [[1], [0, 1]])
def test_heads_behind_a_norm_are_told_and_count_among_the_others(normed: list[int]) -> None:
    torch.manual_seed(0)
    model = moved(LlamaForCausalLM(LlamaConfig(**SAME)))
    for n in normed:
        attend = model.model.layers[n].self_attn
        attend.o_proj = nn.Sequential(nn.LayerNorm(WIDTH, dtype=torch.float64), attend.o_proj).eval()
    with pytest.warns(UserWarning, match=rf"heads of {', '.join(repr(f'L{n}') for n in normed)} are not told apart"):
        found = ch.models.logit_attribution(model, {"input_ids": IDS}, token=7)
    assert [call.layer.number for call in found] == [n for n in (0, 1) if n not in normed]
    writers = [model.model.layers[n].self_attn.o_proj[1] for n in normed]
    output, given, gave = kept_of(model, [*writers, model.model.norm], {"input_ids": IDS})
    size = (given[-1][:, -1].square().mean(-1, keepdim=True) + model.model.norm.variance_epsilon).rsqrt()
    toward = model.lm_head.weight[7].detach() * model.model.norm.weight.detach()
    for n, written in zip(normed, gave, strict=False):
        part = found.others[f"model.layers.{n}.self_attn.o_proj.1"]
        assert (part - written[:, -1] * size @ toward).abs().max() < 1e-10
    assert (found.logit - output.logits[:, -1, 7]).abs().max() < 1e-10
    assert found.remainder.abs().max() < 1e-6  # Llama's norms compute in float32
    numbers = [float(number) for number in re.findall(r" ([+-][\d.e-]+)", repr(found))]
    assert sum(numbers) == pytest.approx(float(found.logit.mean()), abs=0.02)
    if len(normed) == 2:
        for read in (lambda: found.values, found.plot):
            with pytest.raises(ch.ClearheadError, match="no head of this model is told apart"):
                read()


SEVERAL: dict[str, tuple[Any, Any, Any]] = {
    "positions": (7, None, [[0, 3, 5]]),
    "positions of each sequence": ([7, 2], None, torch.tensor([[0, 3, 5], [-1, 2, 1]])),
    "tokens": ([[7, 3, 8]], None, -1),
    "the next tokens": (IDS[:, 1:], None, [range(5)]),
    "pairs": ([[7, 3]], [[1, 2], [4, 9]], [2, 3]),
    "one": ([[7]], 3, -1),
}


def each_of(given: Any, count: int) -> torch.Tensor:
    """The numbers of an argument, (2, count)."""
    numbers = torch.as_tensor(given)
    return (numbers if numbers.ndim == 2 else numbers.reshape(-1, 1)).expand(2, count)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("name", SEVERAL)
def test_several_answers_are_those_one_by_one(name: str, cap: float | None) -> None:
    """Beside parts by hand, and to the bit beside an attribution of each answer."""
    token, against, position = SEVERAL[name]
    model, inputs = gemma(cap), {"input_ids": IDS}
    found = ch.models.logit_attribution(model, inputs, token, against=against, position=position)
    given = [torch.as_tensor(one) for one in (token, against, position) if one is not None]
    count = max(one.shape[1] for one in given if one.ndim == 2)
    tokens, places = each_of(token, count), each_of(position, count)
    others = None if against is None else each_of(against, count)
    by_hand = [parts_of_gemma(model, inputs, place)[1:] for place in range(IDS.shape[1])]
    assert found.logit.shape == found.remainder.shape == (2, count) and found[0].heads.shape == (2, count, HEADS)
    assert found[1].sources.shape == found[1].positions.shape == (2, count, HEADS, 6)
    for n in range(count):
        for b in range(2):
            logits, heads = by_hand[int(places[b, n])]
            less = lambda of, b=b, n=n: of[..., tokens[b, n]] - (0.0 if others is None else of[..., others[b, n]])
            assert torch.allclose(found.logit[b, n], less(logits[b]), rtol=1e-9, atol=1e-12)
            for layer in range(2):
                assert torch.allclose(found[layer].heads[b, n], less(heads[layer, b]), rtol=1e-6, atol=1e-9)
        versus = None if others is None else others[:, n]
        one = ch.models.logit_attribution(model, inputs, tokens[:, n], against=versus, position=places[:, n])
        for other in (one, found.answers[n]):
            assert torch.equal(found.logit[:, n], other.logit) and torch.equal(found.remainder[:, n], other.remainder)
            assert (found.capped is None) == (cap is None) and (
                cap is None or torch.equal(found.capped[:, n], other.capped)
            )
            for mine, theirs in zip(found, other, strict=True):
                for part in ("heads", "positions", "sources"):
                    assert torch.equal(getattr(mine, part)[:, n], getattr(theirs, part))
            assert all(torch.equal(found.others[each][:, n], part) for each, part in other.others.items())
        rows = [row for row in found.table() if row["answer"] == n]
        assert [row["attribution"] for row in rows] == one.table()["attribution"].tolist()
    assert found.remainder.abs().max() < 1e-6 * found.logit.abs().max()
    assert torch.allclose(found.values, torch.stack([one.values for one in found.answers]).mean(0))


def test_a_table_says_what_the_answers_are() -> None:
    model, inputs = gemma(None), {"input_ids": IDS}
    several = ch.models.logit_attribution(model, inputs, [[7, 3]], against=[1, 2], position=[[0, -1]])
    first = several.table()[0]
    assert (
        list(first)[:3] == ["answer", "token", "position"] and "against" not in first
    )  # it is another in each sequence
    assert set(zip(*(several.table()[c].tolist() for c in ("answer", "token", "position")), strict=True)) == {
        (0, 7, 0),
        (1, 3, -1),
    }
    assert "mean of 2 sequences and 2 answers" in repr(several)
    alone = ch.models.logit_attribution(model, {"input_ids": IDS[:1]}, 7)
    assert alone.answers == [alone] and "answer" not in alone.table()[0] and "mean of" not in repr(alone)
    assert "mean of 2 answers" in repr(ch.models.logit_attribution(model, {"input_ids": IDS[:1]}, [[7, 3]]))


@pytest.mark.parametrize(
    ("token", "position", "said"),
    [
        ([[1, 2, 3]], [[0, 1]], r"shapes .*\(1, 3\).*\(1, 2\).*; expected \(B, K\)"),
        (torch.zeros(2, 0, dtype=torch.long), -1, r"\(2, 0\).*; expected \(B, K\)"),
        (
            [[1], [2], [3]],
            -1,
            r"token is .* or one for each of the 2 sequences, \(2,\)",
        ),
        (1, torch.ones(3, 4).long(), r"position is .* each of the 2 sequences, \(2,\)"),
        (
            [1, 2, 3],
            -1,
            r"token is \[1, 2, 3\]; expected a whole number from 0 to 39, or one for each of the 2 sequences, \(2,\)",
        ),
        ([[1, 40]], -1, "token is .*40.*; expected a whole number from 0 to 39"),
        (1, [[0.5]], "position is .* expected a whole number from -6 to 5"),
        ([[1, 2], [3]], -1, "token is .* expected a whole number"),
        ([[[1]]], -1, r"\(1, 1, 1\).*; expected \(B, K\)"),
    ],
)
def test_answers_that_do_not_fit_are_an_error(token: Any, position: Any, said: str) -> None:
    with pytest.raises(ch.ClearheadError, match=said):
        ch.models.logit_attribution(Ends(lambda x: x).eval(), IDS, token, position=position)


def test_several_answers_take_two_runs_of_the_model() -> None:
    model, runs = Ends(lambda x: x).eval(), []
    model.choose.register_forward_hook(lambda module, args, result: runs.append(result.shape))
    ch.models.logit_attribution(model, IDS, IDS[:, 1:], position=[range(5)])
    assert runs == [(2, 6, 40)] * 2


def test_numbers_of_heads_are_drawn() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="the extra [plot] is not installed")
    model = gemma(2.0)
    parts = ch.models.logit_attribution(model, {"input_ids": IDS}, token=7)
    changed = seen(model, IDS).compare(seen(model, IDS.flip(1)))
    for found, cmap, words in (
        (parts, "RdBu", "part of the logit before the softcap, "),
        (changed, "GnBu", "divergence, nats"),
    ):
        axes = found.plot(title="heads")
        (image,) = axes.images
        assert torch.allclose(torch.from_numpy(image.get_array().data), found.values.double())
        assert image.get_cmap().name == cmap and axes.get_title() == "heads"
        assert [label.get_text() for label in axes.get_yticklabels()] == ["L0", "L1"]
        assert axes.figure.axes[1].get_ylabel().startswith(words)
        assert found.plot(ax=axes, bar=False) is axes
        pyplot.close(axes.figure)
