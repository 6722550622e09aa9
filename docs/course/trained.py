"""The models of chapters 4, 7 and 8 as their training leaves them, so that a chapter need not train them.

    python docs/course/trained.py               # trains all four again, some two minutes, and writes them to data/
    python docs/course/trained.py dates         # one of them

A file holds the parameters in half precision, what was measured in training, and in its header the settings of
`SETTINGS`, with which it was made. On one machine two trainings give the same file. On another processor sums are
rounded in another order, and the parameters differ; the scores that the chapters ask for are reached all the same.

>>> from induction import AttentionOnly
>>> from trained import SETTINGS, load
>>> model = AttentionOnly()
>>> measured = load("induction", model)
>>> measured["step"].tolist()[:3], SETTINGS["induction"]["steps"]
([0, 20, 40], 600)
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
DATA = HERE / "data"
SETTINGS: dict[str, dict[str, Any]] = {
    "dates": {"seed": 0, "items": 20_000, "steps": 400},
    "induction": {"seed": 0, "periods": [4, 32], "steps": 600},
    "induction_16": {"seed": 0, "periods": [16, 16], "steps": 300},
    "sorting": {"seed": 0, "steps": 600},
}
MEASURED = "measured."  # before the names of what is no parameter


def load(name: str, model: nn.Module) -> dict[str, Tensor]:
    """Give the model the stored parameters. Returns what was measured while it was trained, by its name."""
    from safetensors import safe_open

    with safe_open(DATA / f"{name}.safetensors", "pt") as file:
        settings = json.loads(file.metadata()["settings"])
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    if settings != SETTINGS[name]:
        raise ValueError(f"{name} was trained with {settings}, and {SETTINGS[name]} is asked for: train it again.")
    model.load_state_dict({key: x.float() for key, x in stored.items() if not key.startswith(MEASURED)})
    model.eval()
    return {key.removeprefix(MEASURED): x for key, x in stored.items() if key.startswith(MEASURED)}


def history(measured: dict[str, Tensor]) -> list[Any]:
    """The measures of an induction model at each step, as `induction.train` gives them."""
    from induction import Seen

    return [
        Seen(int(step), float(new), float(again), previous, induction)
        for step, new, again, previous, induction in zip(*(measured[name] for name in Seen._fields), strict=True)
    ]


def train_dates() -> tuple[nn.Module, dict[str, Tensor]]:
    from dates import Rewriter, train
    from dates_data import sample, split

    settings = SETTINGS["dates"]
    torch.manual_seed(settings["seed"])
    model = Rewriter()
    losses = train(model, sample(split()[0], settings["items"], settings["seed"]), settings["steps"], settings["seed"])
    return model, {"losses": torch.tensor(losses)}


def train_induction(name: str = "induction") -> tuple[nn.Module, dict[str, Tensor]]:
    from induction import AttentionOnly, Seen, train

    settings = SETTINGS[name]
    torch.manual_seed(settings["seed"])
    model = AttentionOnly()
    seen = train(model, tuple(settings["periods"]), settings["steps"])
    return model, {name: torch.stack([torch.as_tensor(getattr(at, name)) for at in seen]) for name in Seen._fields}


def machine() -> dict[str, Any]:
    """What chapter 8 defines before its exercises, without its runs and pictures."""
    names: dict[str, Any] = {}
    page = (HERE / "08_a_transformer.md").read_text(encoding="utf-8").partition("## Exercises")[0]
    for cell in re.findall(r"^```\{code-cell\} ipython3\n(?:---\n.*?\n---\n)?(.*?)^```", page, re.S | re.M):
        defines = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
        kept = [n for n in ast.parse(cell).body if isinstance(n, defines) or ast.unparse(n).startswith("START")]
        exec(compile(ast.Module(kept, []), "chapter 8", "exec"), names)
    return names


def train_sorting() -> tuple[nn.Module, dict[str, Tensor]]:
    settings, names = SETTINGS["sorting"], machine()
    torch.manual_seed(settings["seed"])
    return names["train"](names["Transformer"](), settings["steps"]), {}


TRAINED: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "dates": train_dates,
    "induction": train_induction,
    "induction_16": lambda: train_induction("induction_16"),
    "sorting": train_sorting,
}


def write(name: str, folder: Path = DATA) -> Path:
    """Train a model as `SETTINGS` says, and write it."""
    from safetensors.torch import save_file

    model, measured = TRAINED[name]()
    kept = {key: x.half().contiguous() for key, x in model.state_dict().items()}
    kept |= {MEASURED + key: x.contiguous() for key, x in measured.items()}
    path = folder / f"{name}.safetensors"
    save_file(kept, path, {"settings": json.dumps(SETTINGS[name])})
    return path


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parents[1] / "examples")]
    torch.set_num_threads(1)
    for name in sys.argv[1:] or TRAINED:
        print(path := write(name), f"{path.stat().st_size:,} bytes")
