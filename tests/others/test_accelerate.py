"""Models whose weights accelerate keeps elsewhere: the tools say the same as of the model itself."""

from itertools import pairwise

import pytest
import torch
from merged import assert_same_numbers, llama
from transformers import LlamaConfig, LlamaForCausalLM

import clearhead as ch

pytestmark = [pytest.mark.others, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_an_offloaded_model_has_its_own_numbers(where, tmp_path):
    import accelerate

    model = llama()
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert_same_numbers(model, llama())


@pytest.mark.parametrize("packs", [True, False])
def test_a_trainer_ends_where_its_first_batch_does_not_attend_as_expected(packs, tmp_path):
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    def expect(batch):
        borders = [*(batch["position_ids"][0] == 0).nonzero()[:, 0].tolist(), batch["position_ids"].shape[1]]
        return ch.Causal() & ch.Documents.from_lengths([stop - start for start, stop in pairwise(borders)])

    def collate(examples):
        batch = DataCollatorWithFlattening()(examples)
        return batch if packs else {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}

    examples = [{"input_ids": [5 + i, 6, 7, 8 + i]} for i in range(6)]
    options = TrainingArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, seed=1)
    callback = ch.models.make_audit_callback(expect)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    trainer = Trainer(LlamaForCausalLM(config), options, collate, examples, callbacks=[callback])
    if packs:
        trainer.train()
        assert trainer.state.global_step == 1
    else:
        with pytest.raises(AssertionError, match="packed-mask-ignored"):
            trainer.train()
        assert trainer.state.global_step == 0
