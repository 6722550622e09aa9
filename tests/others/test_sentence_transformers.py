"""A SentenceTransformer, which calls its model's `forward` itself."""

import pytest
import torch

import clearhead as ch
from clearhead.models import bundled, load

pytestmark = [pytest.mark.others, pytest.mark.filterwarnings("ignore")]

TEXTS = ["Snow asked.", "A longer sentence about the map that a doctor once drew of a street and of its only pump."]


def test_padding_and_statistics_are_those_of_the_model_itself():
    from sentence_transformers import SentenceTransformer

    model, tokenizer = load(bundled())
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    pipeline = SentenceTransformer(str(bundled()))
    with torch.no_grad(), ch.watch(model) as wanted:
        model(**inputs)
    with ch.watch(pipeline) as seen:
        pipeline.encode(TEXTS)
    assert len(seen.runs) == 1 and len(seen) == len(wanted)
    words = inputs["attention_mask"].bool()
    found = words if torch.equal(seen[0].padding.keys, words) else words.flip(0)  # it may sort its texts by length
    order = [0, 1] if found is words else [1, 0]
    means = ch.models.Means()
    with ch.models.statistics(pipeline, [ch.reductions.Entropy()], merge=means):
        pipeline.encode(TEXTS)
    for call, want in zip(seen, wanted, strict=True):
        assert torch.equal(call.padding.keys, found) and torch.equal(call.padding.queries, found)
        weights = want.weights.dense()[order].double()
        rows = torch.special.entr(weights).sum(-1).masked_fill(~found[:, None], 0.0)
        torch.testing.assert_close(means[call.name][0], rows.sum((0, 2)) / words.sum(), atol=1e-5, rtol=0)
