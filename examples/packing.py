"""Do packed examples stay apart? Three ways of packing, each audited on a small Llama.

>>> from packing import EXAMPLES, PACKERS, make_model, pack_by_hand
>>> import clearhead as ch
>>> ch.models.audit_collator(make_model(), PACKERS["by-hand"], EXAMPLES).ok
True
>>> ch.models.audit_collator(make_model(), PACKERS["transformers"], EXAMPLES).ok
True
>>> def pack_with_ones(examples):                               # as a data loader that adds an attention mask
...     batch = pack_by_hand(examples)
...     return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
>>> report = ch.models.audit_collator(make_model(), pack_with_ones, EXAMPLES)
>>> report.ok, report.findings[0].code
(False, 'packed-mask-ignored')
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import clearhead as ch

Examples = Sequence[dict[str, Any]]
EXAMPLES = [{"input_ids": list(range(3, 8))}, {"input_ids": list(range(20, 31))}, {"input_ids": list(range(40, 44))}]
LENGTH = 16  # of TRL's rows


def pack_by_hand(examples: Examples) -> dict[str, Tensor]:
    """One row (1, L): positions restart, and the first token of each example has no label."""
    rows = [torch.as_tensor(example["input_ids"]) for example in examples]
    labels = [torch.cat([torch.tensor([-100]), row[1:]]) for row in rows]
    return {
        "input_ids": torch.cat(rows)[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None],
    }


def pack_with_transformers(examples: Examples, return_position_ids: bool = True) -> dict[str, Tensor]:
    """The same by transformers."""
    from transformers import DataCollatorWithFlattening

    collate = DataCollatorWithFlattening(return_position_ids=return_position_ids)
    batch: dict[str, Tensor] = collate(list(examples))
    return batch


def pack_with_trl(examples: Examples, strategy: str = "bfd", padding_free: bool = True) -> dict[str, Any]:
    """The same by TRL, as its `SFTTrainer` packs: rows of `LENGTH` tokens, then a collator."""
    from datasets import Dataset
    from trl import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    rows = pack_dataset(Dataset.from_list(list(examples)), LENGTH, strategy)
    batch: dict[str, Any] = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=padding_free)(list(rows))
    return batch


PACKERS: dict[str, Callable[[Examples], dict[str, Any]]] = {
    "by-hand": pack_by_hand,
    "transformers": pack_with_transformers,
    "trl": pack_with_trl,
}


def make_model() -> Any:
    """A small Llama with random weights."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaModel(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("packer", choices=list(PACKERS))
    print(ch.models.audit_collator(make_model(), PACKERS[options.parse_args().packer], EXAMPLES))
