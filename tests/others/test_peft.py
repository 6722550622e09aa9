"""Adapters of PEFT: the tools read the weights of the merged model."""

import copy

import pytest
import torch
from merged import assert_same_numbers, llama
from small_models import IDS

import clearhead as ch

pytestmark = [pytest.mark.others, pytest.mark.filterwarnings("ignore")]

ALL = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize("targets", [["o_proj"], ["q_proj"], ALL], ids=",".join)
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}], ids=["LoRA", "DoRA", "rsLoRA"])
def test_numbers_are_those_of_the_merged_model(targets, options):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=targets, r=4, lora_dropout=0.5, init_lora_weights=False, **options)
    adapted = get_peft_model(llama(), config).eval()
    merged = copy.deepcopy(adapted).merge_and_unload().eval()
    with torch.no_grad():
        assert not torch.allclose(adapted(input_ids=IDS).logits, llama()(input_ids=IDS).logits)
    assert_same_numbers(adapted, merged)


def test_an_adapted_model_is_audited():
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(llama(), LoraConfig(target_modules=ALL, r=4, init_lora_weights=False)).eval()
    batch = {"input_ids": IDS, "use_cache": False}
    assert ch.audit(adapted, batch, ch.Causal(), level="all").ok
    report = ch.audit(adapted, batch, ch.Causal() & ch.SlidingWindow(before=1))
    assert {"given", "computed", "influence", "layer"} == {finding.test for finding in report.findings}
