"""Weights that torchao has quantised: the tools read what the layers compute."""

import pytest
import torch
from merged import assert_same_numbers, llama

pytestmark = [pytest.mark.others, pytest.mark.filterwarnings("ignore")]


def test_int8_weights_are_read_as_the_model_multiplies_by_them():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model, merged = llama(), llama()
    quantize_(model, Int8WeightOnlyConfig())
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for name, module in linear.items():
        merged.get_submodule(name).weight.data = module.weight.dequantize()
    assert_same_numbers(model, merged)
