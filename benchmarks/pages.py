"""The page of the report: its size, the time of writing it beyond the model's pass, and the memory of a long one."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead as ch
from benchmarks.measure import interleaved
from benchmarks.result import Result, times
from clearhead.models import bundled, load

TEXT = (
    "The animal did not cross the street because it was tired, and the wide street was full of cars while rain fell on "
    "old houses near a quiet river where children played with small red boats until evening came. "
)
LONG = 131072


class Head(nn.Module):
    """One causal head of 64."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, key, is_causal=True)


@cache
def of_text(length: int) -> tuple[ch.models.Recording, list[str]]:
    """The bundled BERT, 6 × 12 heads, on a text of so many tokens."""
    model, tokenizer = load(bundled())
    ids = tokenizer(TEXT * 20, return_tensors="pt")["input_ids"][:, :length]
    with torch.no_grad(), ch.watch(model) as seen:
        model(input_ids=ids)
    return seen, tokenizer.convert_ids_to_tokens(ids[0].tolist())


@cache
def of_head(length: int) -> ch.models.Recording:
    block = Head()
    with torch.no_grad(), ch.watch(block) as seen:
        block(torch.randn(1, 1, length, 64), torch.randn(1, 1, length, 64))
    return seen


def written(seen: ch.models.Recording, tokens: list[str] | None = None) -> float:
    """The megabytes of its page."""
    with tempfile.TemporaryDirectory() as folder:
        return seen.view(tokens=tokens).write(Path(folder) / "page.html").stat().st_size / 1e6


def size(what: str, mb: float, most: float) -> Result:
    return Result(f"the page of {what}", mb, "MB", f"≤ {most}", mb <= most, {})


def of_bert(length: int, most: float) -> Callable[[], Result]:
    return lambda: size(f"the bundled BERT, 6 × 12 heads, {length} tokens", written(*of_text(length)), most)


def code() -> Result:
    """The page's own code: a page without what it holds as data."""
    with tempfile.TemporaryDirectory() as folder:
        page = of_head(2).view().write(Path(folder) / "page.html").read_text(encoding="utf-8")
    data = re.findall(r'<script[^>]*id="(?:meta|block-\d+)"[^>]*>(.*?)</script>', page, re.DOTALL)
    kb = (len(page.encode()) - len("".join(data).encode())) / 1000
    return Result("the page's own code: program, style and markup, deflated", kb, "KB", "≤ 100", kb <= 100, {})


def timed(what: str, made: Callable[[], object], most: float, times_: int) -> Result:
    seconds = interleaved({"writing": made}, times_, 1)
    return Result(what, seconds["writing"], "s", f"≤ {most}", seconds["writing"] <= most, times(seconds))


def writing_bert() -> Result:
    seen, tokens = of_text(512)
    return timed("writing the page of BERT, 512 tokens, beyond its pass", lambda: written(seen, tokens), 1.5, 5)


def writing_long() -> Result:
    seen = of_head(16384)
    return timed("writing the page of one head of 16,384 tokens", lambda: written(seen), 4.0, 3)


def far() -> tuple[float, float, float]:
    """Megabytes, seconds and the process's peak in GB of the page of one head of 131,072 tokens."""
    seen, start = of_head(LONG), time.perf_counter()
    mb = written(seen)
    return mb, time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def writing_far() -> Result:
    program = "from benchmarks.pages import far; print(*far())"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    mb, seconds, peak = map(float, done.stdout.split())
    what = f"peak of a process that writes the page of one head of {LONG:,} tokens ({mb:.1f} MB in {seconds:.0f} s)"
    return Result(what, peak, "GB", "≤ 1.5, the page ≤ 46 MB", peak <= 1.5 and mb <= 46, {})


CASES: dict[str, Callable[[], Result]] = {
    "page-code": code,
    "page-32": of_bert(32, 0.7),
    "page-128": of_bert(128, 1.9),
    "page-512": of_bert(512, 6.6),
    "page-16384": lambda: size("one head of 16,384 tokens", written(of_head(16384)), 6.2),
    "page-write-512": writing_bert,
    "page-write-16384": writing_long,
    "page-write-131072": writing_far,
}
