"""What a message says to write is written, runs, and gives what was meant."""

import warnings
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from ranks.processes import on_ranks
from remedies.causes import CASES as OF_CAUSES
from remedies.files import CASES as OF_FILES
from remedies.keywords import CASES as OF_KEYWORDS
from remedies.looking import CASES as OF_LOOKING
from remedies.modules import CASES as OF_MODULES
from remedies.sources import sites
from remedies.table import CASES as TABLE
from remedies.untried import UNTRIED

import clearhead as ch

CASES = TABLE + OF_MODULES + OF_FILES + OF_LOOKING + OF_CAUSES + OF_KEYWORDS
OWN = ("attention", "Causal", "Padding", "DenseMask", "Lengths", "Documents", "MaskFunction", "Dot", "Bilinear")
OWN += ("Gaussian", "ALiBi", "RelativeBias", "DenseBias", "BiasFunction")


class Block(torch.nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def soft(query, key, keep=None, added=None, scale=None):
    """softmax(QKᵀ · scale + added), in plain PyTorch; a query that sees nothing gives 0."""
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if added is None else scores + added
    scores = scores if keep is None else scores.masked_fill(~keep, -torch.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0)


def plain(query, key, value, keep=None, added=None, scale=None):
    return soft(query, key, keep, added, scale) @ value


def warned(make):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        make()
    raise Warning(str(said[0].message))


def names():
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    rows = torch.arange(4) < torch.tensor([[4], [2], [3], [1]])  # (B, Lk), B = Lk

    def of_torch(x, padding=None, matrix=None):
        """torch's own module, whose True is 'may not'."""
        padding = None if padding is None else padding.reshape(4, 4)
        return module(x, x, x, key_padding_mask=padding, attn_mask=matrix, need_weights=False)[0].detach()

    found = {name: getattr(ch, name) for name in OWN}
    found |= {"ch": ch, "torch": torch, "np": __import__("numpy"), "SimpleNamespace": SimpleNamespace, "Block": Block}
    found |= {"plain": plain, "soft": soft, "warned": warned, "of_torch": of_torch, "rows": rows}
    found |= {"x": torch.rand(4, 4, 8), "q": torch.rand(2, 2, 5, 8), "added": torch.rand(4, 4) + 0.5}
    found |= {"low": torch.ones(4, 4).tril().bool(), "five": torch.ones(5, 5).tril().bool()}
    found |= {"matrix": torch.eye(4).bool() | (torch.rand(4, 4) < 0.5)}
    entropy = soft(found["q"], found["q"], found["five"])
    found["entropy"] = -(entropy * entropy.clamp(min=1e-30).log()).sum(-1)

    def watched(**options):
        model = Block()
        with ch.watch(model, **options) as seen:
            model(found["q"])
        return seen

    def reduced(**options):
        model = Block()
        with ch.models.statistics(model, [ch.reductions.Entropy()], **options) as seen:
            model(found["q"])
        return seen

    found["watched"], found["reduced"] = watched, reduced
    found["attend"] = ch.nn.MultiHeadAttention.from_torch(module).eval()
    found["as_torch"] = ch.nn.TorchMultiheadAttention.from_torch(module).eval()
    return found


def message(code, scope):
    try:
        given = eval(code, scope)
    except (ValueError, Warning, TypeError, RuntimeError, AssertionError) as error:
        return str(error)
    assert isinstance(given, ch.explanation.Diagnosis), f"{code} raised nothing"
    return "\n".join(finding.remedy for finding in given)


def ready(case):
    scope = names()
    exec(case.setup, scope)
    return scope


@cache
def said_of(number):
    return message(CASES[number].wrong, ready(CASES[number]))


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: f"{n}: {CASES[n].wrong[:60]}")
def test_the_remedy_is_right(number):
    case, said = CASES[number], said_of(number)
    assert case.remedies
    for fragment, put, meant in case.remedies:
        assert fragment in said, said
        scope = ready(case)
        with torch.no_grad():
            got, expected = eval(put.replace("@", fragment), scope), eval(meant, scope)
        assert isinstance(got, torch.Tensor) and got.shape == expected.shape, (got, expected)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


@cache
def of_ranks():
    return on_ranks(2, "remedies.ranks:everything")


@pytest.mark.parametrize("rank", range(2))
def test_the_remedies_of_ranks_are_right(rank):
    found = of_ranks()[rank]
    assert len(found) > 25
    for name, case in found.items():
        assert not case["lacks"], (name, case)
        assert isinstance(case["apart"], float) and case["apart"] < 1e-5, (name, case)


@cache
def tried():
    """The sites of the sources whose messages the cases provoke."""
    said = [said_of(number) for number in range(len(CASES))]
    said += [case["said"] for found in of_ranks() for case in found.values()]
    return {site.where for site in sites() if any(map(site.said_in, said))}


def test_every_message_with_a_remedy_is_tried_or_says_why_not():
    every = {site.where for site in sites()}
    assert len(every) > 200  # the walk sees them
    left = every - tried()
    listed = {where for wheres in UNTRIED.values() for where in wheres}
    assert all(len(reason) > 20 for reason in UNTRIED)
    assert left - listed == set(), "messages with a remedy that no case tries: add a case to tests/remedies/table.py"
    assert listed - left == set(), "these are tried, or gone: take them from tests/remedies/untried.py"


def test_the_walk_sees_a_message_and_no_docstring():
    texts = [site.text for site in sites()]
    assert any("Pass all as NumPy arrays or all as tensors" in text for text in texts)
    assert not any(">>>" in text for text in texts)
