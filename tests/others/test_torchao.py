"""Weights that torchao has quantised: the tools read what the layers compute."""

import pytest
import torch
from merged import INPUTS, assert_same_numbers, llama

import clearhead as ch

pytestmark = [pytest.mark.others, pytest.mark.filterwarnings("ignore")]


def test_int8_weights_are_read_as_the_model_multiplies_by_them():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model, merged = llama(), llama()
    quantize_(model, Int8WeightOnlyConfig())
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for name, module in linear.items():
        merged.get_submodule(name).weight.data = module.weight.dequantize()
    assert_same_numbers(model, merged)


def test_rounded_activations_are_recorded_and_have_no_weights_to_read():
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = llama()
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        model(**INPUTS)
    assert seen[1].weighted_value_norms.isfinite().all()
    with pytest.raises(ch.UnsupportedError, match="o_proj, a Linear with a weight of class Int8Tensor, gives"):
        _ = seen[1].result_norms
