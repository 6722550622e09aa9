"""Layers computed plainly in float64, and reports opened in the browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Opened, Windows
from rendered import render

from clearhead.report import Layer
from clearhead.report.layer import PageBias, tiled
from clearhead.report.why import with_steps


@dataclass
class Case:
    """A layer, and its weights (H, Lq, Lk) in float64 as the page should show them."""

    layer: Layer
    weights: np.ndarray[Any, np.dtype[np.float64]]


def compute_case(
    queries: int = 7,
    keys: int | None = None,
    heads: int = 2,
    key_heads: int | None = None,
    features: int = 8,
    *,
    name: str = "encoder.layer.0.attention",
    kind: str = "self",
    scale: float = 0.35,
    softcap: float | None = None,
    start: Any = 0,
    stop: Any = None,
    bias: Any = None,
    query_tokens: list[str] | None = None,
    key_tokens: list[str] | None = None,
    spread: float = 1.5,
    seed: int = 0,
) -> Case:
    """A layer with random queries and keys. `start`, `stop` broadcast to (1 or H, Lq)."""
    keys = queries if keys is None else keys
    rng = np.random.default_rng(seed)
    query = (spread * rng.standard_normal((heads, queries, features))).astype(np.float32)
    key = (spread * rng.standard_normal((key_heads or heads, keys, features))).astype(np.float32)
    start = np.broadcast_to(np.atleast_2d(start), (len(np.atleast_2d(start)), queries))
    stop = np.atleast_2d(keys if stop is None else stop)
    stop = np.broadcast_to(stop, (len(stop), queries))

    repeated = np.repeat(key.astype(np.float64), heads // len(key), axis=0)
    score = scale * query.astype(np.float64) @ repeated.transpose(0, 2, 1)  # (H, Lq, Lk)
    if softcap is not None:
        score = softcap * np.tanh(score / softcap)
    if bias is not None:
        score = score + bias.astype(np.float32).astype(np.float64)
    j = np.arange(keys)
    seen = (start[..., None] <= j) & (j < stop[..., None])
    score = np.where(seen, score, -np.inf)
    with np.errstate(divide="ignore"):
        highest = np.where(np.isfinite(score.max(-1)), score.max(-1), 0)
        logsumexp = highest + np.log(np.exp(score - highest[..., None]).sum(-1))
    total = np.where(np.isfinite(logsumexp), logsumexp, 0)
    weights = np.exp(score - total[..., None])
    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)
    apart = np.abs(np.arange(queries)[:, None] - j)
    rows, columns = (np.array_split(np.arange(n), min(n, 32)) for n in (queries, keys))
    thumbnail = np.stack([[[w[np.ix_(r, c)].max() for c in columns] for r in rows] for w in weights])
    layer = Layer(
        name=name,
        kind=kind,
        query=query,
        key=key,
        scale=scale,
        softcap=softcap,
        start=start.astype(np.int32),
        stop=stop.astype(np.int32),
        bias=None if bias is None else bias_of_matrix(bias),
        logsumexp=logsumexp,
        entropy=entropy,
        received=weights.sum(1),
        distance=(weights * apart).sum(-1) if kind == "self" else None,
        thumbnail=thumbnail,
        query_tokens=query_tokens or [f"w{i}" for i in range(queries)],
        key_tokens=key_tokens or query_tokens or [f"w{i}" for i in range(keys)],
    )
    return Case(with_steps(layer), weights)


def bias_of_matrix(matrix: np.ndarray) -> PageBias:
    """The bias with one number for each pair, (H or 1, Lq, Lk)."""
    wide = matrix.astype(np.float32)
    return PageBias(tiles=tuple(tiled(lambda a, b, m=m: m[a:b], *m.shape) for m in wide))


@pytest.fixture(scope="session")
def make_case() -> Callable[..., Case]:
    return compute_case


class Report(Opened):
    """A report in the browser."""

    def settle(self) -> None:
        """Wait until everything asked for is drawn."""
        self.until("Boolean(document.getElementById('clearhead').dataset.shown)")  # else it is from afar
        self.until("document.getElementById('clearhead').dataset.overview", "drawn")
        self.until("document.getElementById('clearhead').dataset.map", "drawn")

    @property
    def shown(self) -> str:
        """What the panes show: layer/head/view/token/pair."""
        return str(self.page.evaluate("document.getElementById('clearhead').dataset.shown"))


@pytest.fixture
def open_report(browser: Windows, tmp_path: Path) -> Iterator[Callable[..., Report]]:
    """`open_report(layers, hash="", wait=True, html=None, **context)` opens a report from disk, or an `address`.

    The whole page is opened; with `simple=True` the page opens as it does for a reader.
    """
    everything: list[Report] = []

    def open_one(
        layers: list[Layer],
        hash: str = "",
        wait: bool = True,
        html: str | None = None,
        init: str | None = None,
        address: str | None = None,
        simple: bool = False,
        **context_options: Any,
    ) -> Report:
        path = tmp_path / f"report{len(everything)}.html"
        if address is None:
            path.write_text(html or render(layers, "A report"), encoding="utf-8")
        if not simple and "all=" not in hash:
            hash = f"{hash or '#'}&all=1"
        opened = browser.open(address or path, Report, hash, init, **context_options)
        everything.append(opened)
        if wait:
            opened.settle()
        return opened

    yield open_one
    for opened in everything:
        browser.close(opened)
