"""Packing by TRL: the example audits it, and a trainer with the audit's callback trains or stops."""

import pytest
import torch
from packing import EXAMPLES, make_model, pack_with_trl

import clearhead as ch

pytestmark = [pytest.mark.others, pytest.mark.filterwarnings("ignore")]


def audit_codes(**options):
    report = ch.models.audit_collator(make_model(), lambda examples: pack_with_trl(examples, **options), EXAMPLES)
    return {finding.code for finding in report.findings}


def test_packed_rows_are_kept_apart():
    assert audit_codes() == set()


def test_an_attention_mask_of_ones_mixes_documents_and_labels():
    assert audit_codes(padding_free=False) >= {"packed-mask-ignored", "documents-mix", "label-crosses-border"}


@pytest.mark.parametrize("use_cache", [False, True])
def test_a_trainer_stops_where_documents_mix(use_cache, tmp_path):
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    torch.manual_seed(0)
    words = {f"w{number}": number for number in range(98)} | {"[PAD]": 98, "[UNK]": 99}
    special = {"pad_token": "[PAD]", "eos_token": "[PAD]", "unk_token": "[UNK]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "[UNK]")), **special)
    options = {"packing": True, "max_length": 16, "per_device_train_batch_size": 2, "max_steps": 1}
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": False}
    args = SFTConfig(output_dir=str(tmp_path), use_cache=use_cache, gradient_checkpointing=False, **options, **quiet)
    callback = ch.models.make_audit_callback(
        lambda batch: ch.Causal() & ch.Documents((batch["position_ids"] == 0).cumsum(1))
    )
    model = LlamaForCausalLM(make_model().config)
    data = Dataset.from_list(EXAMPLES * 2)
    trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer, callbacks=[callback])
    if use_cache:
        with pytest.raises(AssertionError, match="packed-mask-ignored"):
            trainer.train()
    else:
        trainer.train()
