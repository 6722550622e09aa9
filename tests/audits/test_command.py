"""The command `clearhead audit`: its exit status, its expected masks, and its report."""

import json

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from clearhead import cli

TEXTS = ["--text", "the pump was closed", "--text", "the board closed the pump in broad street"]
WORDS = ["the", "pump", "was", "closed", "board", "street", "in", "broad", "[UNK]", "[PAD]"]


@pytest.fixture
def save(tmp_path):
    """Save a small model with a tokenizer of words; returns the folder."""

    def save_model(name, head="Model", **options):
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(vocab_size=len(WORDS), **options)
        getattr(transformers, f"{name}{head}")(config).save_pretrained(tmp_path)
        words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, "[UNK]"))
        words.pre_tokenizer = Whitespace()
        special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(tmp_path)
        return str(tmp_path)

    return save_model


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 64, "bos_token_id": None, "eos_token_id": None}


@pytest.mark.parametrize("packed", [[], ["--packed"]])
def test_a_decoder_is_expected_to_be_causal(packed, save, capsys):
    assert cli.main(["audit", "--model", save("Llama", **LLAMA), *TEXTS, *packed]) == 0
    out = capsys.readouterr().out
    assert out.startswith("attends as expected: Causal()") and ("Documents" in out) == bool(packed)


def test_an_encoder_is_expected_to_see_every_key(save, capsys):
    assert cli.main(["audit", "--model", save("Bert", **SIZES, intermediate_size=64), *TEXTS]) == 0
    assert capsys.readouterr().out.startswith("attends as expected: every key")


def test_a_finding_is_status_1_and_json_has_its_code(save, capsys):
    assert cli.main(["audit", "--model", save("Falcon", **SIZES), *TEXTS, "--packed", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert "packed-mask-ignored" in {finding["code"] for test in report["tests"] for finding in test["findings"]}


def test_a_window_that_the_model_lacks_is_a_finding(save, capsys):
    assert cli.main(["audit", "--model", save("Llama", **LLAMA), *TEXTS, "--window", "3"]) == 1
    assert "window-lost" in capsys.readouterr().out


def test_what_cannot_run_is_status_2(save, tmp_path, capsys):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    assert cli.main(["audit", "--model", save("T5", **sizes), *TEXTS]) == 2
    assert cli.main(["audit", "--model", str(tmp_path / "nowhere"), *TEXTS]) == 2
    assert cli.main(["audit", "--model", save("Llama", **LLAMA), *TEXTS, "--window", "0"]) == 2
    errors = capsys.readouterr().err
    assert "T5Model has two stacks" in errors and "no folder" in errors and "--window is 0" in errors
