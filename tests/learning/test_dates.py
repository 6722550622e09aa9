"""The dates example: its data are exact, its model is the one described, and it learns."""

import datetime

import pytest
import torch
from dates import FIELDS, Rewriter, encoded, exact, in_field, rewritten, train
from dates_data import CHARACTERS, EVERY_DAY, FORMATS, Item, sample, split, written

import clearhead as ch

DAYS, HELD_OUT = split()


def fresh(seed=0):
    torch.manual_seed(seed)
    return Rewriter()


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_each_character_of_a_date_has_its_field(form):
    for day in EVERY_DAY[::97]:
        item = written(day, form)
        assert len(item.text) == len(item.fields)
        assert item.iso == day.isoformat()
        assert set(item.text) <= set(CHARACTERS)
        year, number = ("".join(c for c, f in zip(item.text, item.fields, strict=True) if f == of) for of in "yd")
        assert str(day.year).endswith(year) and len(year) in (2, 4)
        assert int("".join(c for c in number if c.isdigit())) == day.day
        assert "m" in item.fields


def test_two_days_are_never_written_alike_in_one_format():
    for form in FORMATS:
        assert len({written(day, form).text for day in EVERY_DAY[::5]}) == len(EVERY_DAY[::5])


def test_no_day_is_both_learnt_from_and_held_out():
    assert not set(DAYS) & set(HELD_OUT)
    assert sorted(DAYS + HELD_OUT) == EVERY_DAY
    assert split() == (DAYS, HELD_OUT)
    assert sample(DAYS, 20, seed=3) == sample(DAYS, 20, seed=3) != sample(DAYS, 20, seed=4)


def test_items_become_numbers_padded_with_0():
    text, lengths, iso = encoded([written(datetime.date(1998, 3, 1), FORMATS[i]) for i in (10, 13)])
    assert lengths.tolist() == [8, 13]
    assert (text > 0).sum(1).tolist() == [8, 13]
    assert iso.tolist() == [[11, 1, 9, 9, 8, 10, 0, 3, 10, 0, 1]] * 2


def test_thirty_steps_lower_the_loss():
    losses = train(fresh(), sample(DAYS, 500, seed=0), steps=30)
    assert sum(losses[-5:]) < 0.85 * sum(losses[:5])


def test_an_alignment_gives_padding_nothing_and_each_written_character_1():
    items = sample(HELD_OUT, 40, seed=1)
    found = rewritten(fresh(), items)
    lengths = torch.tensor([len(item.text) for item in items])
    padding = torch.arange(int(lengths.max())) >= lengths[:, None]
    assert padding.any()
    assert found.weights.shape == (40, len(FIELDS), int(lengths.max()))
    assert (found.weights.transpose(1, 2)[padding] == 0).all()
    assert torch.allclose(found.weights.sum(-1), torch.ones(40, len(FIELDS)))


def test_one_item_is_rewritten_as_it_is_among_others():
    model, items = fresh(), sample(HELD_OUT, 12, seed=2)
    together = rewritten(model, items)
    for i, item in enumerate(items):
        alone = rewritten(model, [item])
        assert alone.iso == [together.iso[i]]
        assert torch.allclose(alone.weights[0], together.weights[i, :, : len(item.text)], atol=1e-5)


def test_the_decoder_knows_the_text_by_its_attention_alone():
    model = fresh()
    text, lengths, iso = encoded(sample(HELD_OUT, 6, seed=2))
    with torch.no_grad():
        logits = model(text, lengths, iso[:, :1])
        with ch.edit(model, ch.edits.ScaleHeads(factor=0.0)):
            without = model(text, lengths, iso[:, :1])
    assert (logits != logits[:1]).any()
    assert (without == without[:1]).all()


def test_measures_of_an_alignment():
    items = [Item("1 may 1950", "d-mmm-yyyy", "1950-05-01"), Item("19500501", "yyyymmdd", "1950-05-01")]
    places = torch.tensor([[6, 7, 8, 9, 5, 2, 5, 5, 0, 1], [0, 1, 2, 3, 3, 4, 5, 5, 6, 4]])
    weights = torch.nn.functional.one_hot(places, 10).float()
    assert in_field(weights, items) == {"y": 1.0, "m": 0.75, "d": 0.5}
    assert in_field(weights, items, near=1) == {"y": 1.0, "m": 1.0, "d": 0.75}


def test_exact_counts_whole_answers():
    items = sample(HELD_OUT, 4, seed=0)
    found = rewritten(fresh(), items)
    assert exact(found._replace(iso=[item.iso for item in items]), items) == 1
    assert exact(found._replace(iso=[items[0].iso, "", "1950", items[3].iso[:-1] + "x"]), items) == 0.25
