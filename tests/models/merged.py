"""What the tools read of a model's projections, compared with the same of a model whose weights are merged."""

import torch
from small_models import IDS, MODELS, made

import clearhead as ch

INPUTS = {"input_ids": IDS}


def llama(**options):
    """A random Llama whose heads differ."""
    return made("Llama", "ForCausalLM", times=10, **MODELS["Llama"], **options)


def numbers_of(model, inputs=INPUTS):
    """Everything that the tools compute with the weights of projections, as named tensors."""
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        model(**inputs)
    call, columns = seen[1], ("transformed norm", "weighted transformed norm", "result norm")
    found = ch.models.circuits(model, inputs)
    attributed = ch.models.logit_attribution(model, inputs, token=5, against=7)
    read = found.projections(1, 3)
    return {
        "transformed_norms": call.transformed_norms,
        "weighted_transformed_norms": call.weighted_transformed_norms,
        "result_norms": call.result_norms,
        "output_projection": call.output_projection.weight,
        **{name: torch.tensor([row[name] for row in seen.table()]) for name in columns if name in seen.table()[0]},
        "heads": torch.cat([attributed.values.flatten(), attributed.remainder]),
        "sources": attributed[1].sources,
        **{side: getattr(read, side).weight for side in ("query", "key", "value", "output")},
        "qk": found.qk(1, 3) @ torch.eye(read.query.weight.shape[1]),
        "ov": found.ov(1, 3) @ torch.eye(read.value.weight.shape[1]),
        "composition": torch.tensor([row["composition"] for row in found.composition("key")]),
    }


def assert_same_numbers(model, merged, rtol=1e-3, inputs=INPUTS):
    """`model` and `merged` compute the same function; the tools say the same of both."""
    found, right = numbers_of(model, inputs), numbers_of(merged, inputs)
    for name, wanted in right.items():
        off = (found[name].double() - wanted.double()).abs().max()
        assert off <= rtol * wanted.double().abs().max(), (name, float(off), float(wanted.abs().max()))
