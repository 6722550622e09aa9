"""Which inputs may influence which outputs, beside products of dense bool matrices."""

import pytest
import torch

import clearhead as ch
from clearhead.base.shapes import Sizes
from clearhead.models.audits.reachability import AllowedPairs, CrossReachability, Reachability

BATCH, LENGTH, ENCODED = 2, 9, 7
WINDOW = ch.Causal() & ch.SlidingWindow(before=2)
DOCUMENTS = ch.Causal() & ch.Documents.from_lengths([4, 5])
MASKS = {
    "causal": ch.Causal(),
    "window": WINDOW,
    "documents": DOCUMENTS,
    "padding": ch.Causal() & ch.Lengths(torch.tensor([6, 9])),
    "every second key": ch.MaskFunction(lambda b, h, i, j: (i - j) % 2 == 0),
    "both sides": ch.SlidingWindow(before=1, after=1),
}


def dense(mask, queries=LENGTH, keys=LENGTH):
    """The allowed pairs as numbers, (B, Lq, Lk)."""
    allowed = mask.dense(torch.zeros(BATCH, queries, 1), torch.zeros(BATCH, keys, 1), align="lower_right")
    return allowed.expand(BATCH, -1, -1).double()


def pairs(mask, queries=LENGTH, keys=LENGTH):
    return AllowedPairs.from_mask(mask, Sizes(BATCH, 1, queries, keys, align="lower_right"))


def closure(matrices):
    """The product of (1 + matrix) over the layers: what each output reads, (B, L, L)."""
    reached = torch.eye(LENGTH).double().expand(BATCH, -1, -1)
    for matrix in matrices:
        reached = ((matrix + torch.eye(LENGTH)) @ reached > 0).double()
    return reached > 0


def single_positions(length):
    """Sets of one position each: bool (length, B, length)."""
    return torch.eye(length, dtype=torch.bool)[:, None].expand(-1, BATCH, -1)


STACKS = [*((name,) * number for name in MASKS for number in (1, 3)), ("window", "causal"), ("documents", "both sides")]


@pytest.mark.parametrize("names", STACKS, ids="-".join)
def test_layers_are_followed_as_products_of_their_matrices(names):
    known = {name: pairs(MASKS[name]) for name in names}
    reach = Reachability([known[name] for name in names])
    want = closure([dense(MASKS[name]) for name in names])
    outputs, inputs = (find(single_positions(LENGTH)) for find in (reach.find_outputs, reach.find_inputs))
    assert torch.equal(outputs.permute(1, 2, 0), want)
    assert torch.equal(inputs.transpose(0, 1), want)


def test_an_unknown_number_of_layers_is_any_number():
    reach = Reachability([pairs(WINDOW)], unlimited=True)
    want = closure([dense(WINDOW)] * LENGTH)
    assert torch.equal(reach.find_outputs(single_positions(LENGTH)).permute(1, 2, 0), want)


def test_a_decoder_reads_the_encoder_through_its_own_layers():
    cross = ch.Lengths(torch.tensor([5, 7]))
    inside = ch.SlidingWindow(before=0, after=1)
    layers = [(pairs(WINDOW), pairs(cross, LENGTH, ENCODED))] * 2
    reach = CrossReachability(Reachability([pairs(inside, ENCODED, ENCODED)]), layers, (ENCODED, LENGTH))
    own, other = dense(WINDOW) + torch.eye(LENGTH), dense(cross, LENGTH, ENCODED)
    encoded = dense(inside, ENCODED, ENCODED) + torch.eye(ENCODED)
    want = ((own @ other + other) @ encoded) > 0
    assert torch.equal(reach.find_outputs(single_positions(ENCODED)).permute(1, 2, 0), want)
    assert torch.equal(reach.find_inputs(single_positions(LENGTH)).transpose(0, 1), want)
