"""The surroundings that a problem may be run in, how often, and which engines may refuse them, with the reason.

In all others, and on all other engines, a refusal is a failure. `None` is the engine that clearhead chooses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FUNC = {"native": "transforms follow only PyTorch's own operations", "sdpa": "PyTorch's fused kernel lacks the rule"}
DROPOUT = "dropout would be the same for all that vmap joins"
FAKE = "the values of masks, biases and seeds cannot be read"
HIDDEN = "a kernel needs the memory itself"
ALL = ("float64", "float32", "bfloat16", "float16")
WIDE = ("float64", "float32")


@dataclass(frozen=True)
class Surrounding:
    chance: float
    tiny: bool = False  # problems of a few numbers alone
    dtypes: tuple[str, ...] = ALL
    refusals: dict[str | None, str] = field(default_factory=dict)
    dropout: str | None = None  # why any engine may refuse it here


SURROUNDINGS = {
    "nothing": Surrounding(100),
    "default float64": Surrounding(3),
    "default bfloat16": Surrounding(3),
    "default meta": Surrounding(3),
    "set default meta": Surrounding(2),
    "inference mode": Surrounding(3),
    "no_grad": Surrounding(3),
    "autocast": Surrounding(3, dtypes=("float64", "float32", "bfloat16")),
    "poisoned memory": Surrounding(6),
    "threads": Surrounding(3),
    "calls from 8 threads": Surrounding(1),
    "checkpoint": Surrounding(3),
    "numpy": Surrounding(3, dtypes=("float64", "float32", "float16")),
    "unseen garbage": Surrounding(4),
    "wrapper subclass": Surrounding(3, refusals={"native": HIDDEN}),
    "plain subclass": Surrounding(2),
    "zero input": Surrounding(2),
    "zero gradient": Surrounding(2),
    "fake tensors": Surrounding(
        2, refusals=dict.fromkeys((None, "native", "flex", "sdpa", "tiled", "reference"), FAKE)
    ),
    "func.grad": Surrounding(2, dtypes=WIDE, refusals=FUNC),
    "func.vjp": Surrounding(2, refusals=FUNC),
    "func.jacrev": Surrounding(1, tiny=True, refusals=FUNC),
    "func.vmap": Surrounding(2, refusals=FUNC, dropout=DROPOUT),
    "func.vmap of grad": Surrounding(2, refusals=FUNC, dropout=DROPOUT),
    "func.jvp": Surrounding(2, refusals=FUNC),
    "func.hessian": Surrounding(0.5, tiny=True, dtypes=WIDE, refusals=FUNC),
    "forward_ad": Surrounding(2, refusals=FUNC),
    "twice": Surrounding(1, tiny=True, dtypes=WIDE),
    "batched gradients": Surrounding(2),
    "vectorized jacobian": Surrounding(1, tiny=True),
}

# Those that are of any device; the others are about the host's memory, or about code of one device.
ON_DEVICES = ("nothing", "default float64", "inference mode", "no_grad", "checkpoint", "zero input", "zero gradient")
