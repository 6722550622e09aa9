"""Properties of the HTML text itself, without a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from rendered import page_of, render

from clearhead.report._blocks import Blocks, plain

Make = Callable[..., Any]


def block(html: str, number: int) -> bytes:
    found = re.search(rf'id="block-{number}">([^<]*)</script>', html)
    assert found
    return zlib.decompress(base64.b64decode(found[1]))


def meta_of(html: str) -> Any:
    found = re.search(r'<script type="application/json" id="meta">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_policy_names_each_script_and_style_by_hash(make_case: Make) -> None:
    html = render([make_case().layer], "A report")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    for source in re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", html, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]
    assert "unsafe" not in policy[1]
    assert " style=" not in html


def test_no_token_name_or_title_can_end_its_element(make_case: Make) -> None:
    bad = "</script><!--</title>&\u2028\u2029\ud800"
    layer = make_case(1, query_tokens=[bad], name=bad).layer
    html = render([layer], bad)
    benign = render([make_case(1, query_tokens=["a"], name="b").layer], "c")
    for tag in ("<script", "</script", "<!--", "</title"):
        assert html.count(tag) == benign.count(tag)
    data = html.split('id="meta">')[1].split("</script>")[0]
    assert not set("<>&\u2028\u2029") & set(data)
    meta = meta_of(html)
    assert meta["texts"] == [[bad]]
    assert meta["layers"][0]["name"] == bad
    html.encode("utf-8")


def array(html: str, place: int, dtype: str) -> Any:
    """The array that stands at a place, of a plain kind."""
    values = block(html, place // 8)
    for _ in range(place % 8):
        size = int(np.frombuffer(values[4:8], "<i4")[0])
        values = values[8 + size + -size % 8 :]
    size = int(np.frombuffer(values[4:8], "<i4")[0])
    return np.frombuffer(values[8 : 8 + size], dtype)


def test_numbers_survive_the_trip(make_case: Make) -> None:
    for key_heads in (2, 4):
        layer = make_case(500, heads=4, key_heads=key_heads, features=128).layer
        html = render([layer], "A report")
        head = meta_of(html)["layers"][0]["heads"][3]
        query, key = (head[name] if key_heads == 4 else head[name][0] for name in ("query", "key"))
        assert np.array_equal(array(html, query, "<f4"), layer.query[3].ravel())
        assert np.array_equal(array(html, key, "<f4"), layer.key[layer.key_head(3)].ravel())
        assert np.array_equal(array(html, head["logsumexp"], "<f8"), layer.logsumexp[3])


def test_what_layers_share_is_stored_once(make_case: Make) -> None:
    bias = np.where(np.tri(40) > 0, 0.5, -np.inf)[None]
    layers = [make_case(40, bias=bias, seed=seed, name=f"l{seed}").layer for seed in (0, 1)]
    meta = meta_of(render(layers, "A report"))
    for name in ("tiles", "start", "stop", "counts", "expected"):
        one, other = (layer["shared"][name] for layer in meta["layers"])
        assert one == other
    assert len({head["query"] for layer in meta["layers"] for head in layer["heads"]}) == 4
    assert len(meta["texts"]) == 1


def test_equal_bytes_of_another_type_are_another_block() -> None:
    blocks = Blocks()
    assert [blocks.one(plain(np.zeros(3), dtype)) for dtype in ("int32", "float32", "int32")] == [0, 8, 0]


def test_the_head_that_the_page_opens_on_stands_before_the_others(make_case: Make) -> None:
    page = page_of([make_case(5, heads=3, seed=seed).layer for seed in (0, 1)], "A report")
    page.distinctive = {"layer": 1, "head": 2, "sentence": "", "measure": "", "nearUniform": False}
    html = "".join(page.parts())
    layer = meta_of(html)["layers"][1]
    parts = layer["shared"] | layer["heads"][2]
    wanted = {parts[name] // 8 for name in ("start", "stop", "counts", "expected", "query", "key")}
    order = [int(number) for number in re.findall(r'id="block-(\d+)"', html[html.index('id="program"') :])]
    assert set(order[: len(wanted)]) == wanted
    assert sorted(order) == sorted(set(order)) and len(order) > len(wanted)


def test_rendering_loads_no_torch() -> None:
    code = (
        "import sys, types\n"
        "root = types.ModuleType('clearhead'); root.__path__ = [sys.argv[1]]\n"
        "sys.modules['clearhead'] = root\n"  # without the package's own __init__
        "import clearhead.report\n"
        "sys.exit('torch' in sys.modules)"
    )
    from clearhead import report

    package = str(report.__path__[0]).removesuffix("report")
    subprocess.run([sys.executable, "-c", code, package], check=True)
