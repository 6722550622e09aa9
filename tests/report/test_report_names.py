"""The names of layers, heads and tokens on the page are the model's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead as ch

Make = Callable[..., Any]
SOURCE, TARGET = [f"s{i}" for i in range(8)], [f"t{i}" for i in range(4)]


@pytest.fixture(scope="module")
def seen() -> Any:
    transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": None}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=30, **sizes, **ids)).eval()
    with torch.no_grad(), ch.watch(model) as seen:
        model.generate(torch.arange(4, 12)[None], max_new_tokens=4, do_sample=False)
    return seen


def page_of(seen: Any, path: Path, **words: Any) -> tuple[str, Any]:
    html = seen.view(**words).write(path / "page.html").read_text()
    found = re.search(r'id="meta">(.*?)</script>', html, re.S)
    assert found
    return html, json.loads(found[1])


def words_of(meta: Any) -> dict[str, tuple[list[str], list[str]]]:
    texts = meta["texts"]
    return {layer["label"]: (texts[layer["queryText"]], texts[layer["keyText"]]) for layer in meta["layers"]}


def test_a_step_of_a_generation_has_its_own_words(seen: Any, tmp_path: Path) -> None:
    found = words_of(page_of(seen, tmp_path, tokens=TARGET, source_tokens=SOURCE)[1])
    assert found["encoder 1"] == (SOURCE, SOURCE)
    for step in range(4):
        assert found[f"decoder 1, step {step}"] == ([TARGET[step]], TARGET[: step + 1])
        assert found[f"decoder 1, cross, step {step}"] == ([TARGET[step]], SOURCE)


def test_words_of_the_source_name_no_token_of_the_decoder(seen: Any, tmp_path: Path) -> None:
    found = words_of(page_of(seen, tmp_path, source_tokens=SOURCE)[1])
    assert found["encoder 0"] == (SOURCE, SOURCE)
    for step in range(4):
        places = [str(place) for place in range(step + 1)]
        assert found[f"decoder 0, step {step}"] == ([str(step)], places)
        assert found[f"decoder 0, cross, step {step}"] == ([str(step)], SOURCE)


def test_a_prompt_is_named_by_its_first_words(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=30, **sizes, eos_token_id=None)).eval()
    with torch.no_grad(), ch.watch(model) as seen:
        model.generate(torch.arange(4, 9)[None], max_new_tokens=3, do_sample=False, pad_token_id=0)
    words = [f"w{i}" for i in range(7)]
    found = words_of(page_of(seen, tmp_path, tokens=words)[1])
    assert found["L0, step 0"] == (words[:5], words[:5])
    assert found["L0, step 2"] == (words[6:], words)


def test_heads_are_named_as_the_model_names_them(seen: Any, open_report: Make, tmp_path: Path) -> None:
    html, meta = page_of(seen, tmp_path, tokens=TARGET, source_tokens=SOURCE)
    labels = [layer["label"] for layer in meta["layers"]]
    at = labels.index("decoder 1, cross, step 2")
    name = "decoder 1, cross, head 3, step 2"
    opened = open_report([], f"#layer={at}&head=3&pins={at}.3&a={at}.3&b={at}.1", html=html)
    page = opened.page
    opened.until("document.getElementById('clearhead').dataset.compare", "drawn")
    assert page.inner_text("#where").startswith(f"{name} · decoder.block.1.layer.1.EncDecAttention · ")
    assert page.inner_text("#map-title") == f"The weights of {name}"
    assert page.inner_text("#pin") == f"Unpin {name}"
    assert page.inner_text("#compare-title") == f"{name} − decoder 1, cross, head 1, step 2"
    assert page.locator(".head[aria-current]").get_attribute("aria-label").startswith(f"{name}, cross, ")
    page.locator("#everywhere summary").click()
    page.wait_for_selector(".square")
    assert page.locator(".square[aria-current]").get_attribute("aria-label").startswith(f"{name}: ")
    rows = page.locator("#everywhere-grid .number").all_inner_texts()
    assert rows == ["decoder 0, cross, step 2", "decoder 1, cross, step 2"]  # those that read the same words


def test_of_chosen_layers_the_numbers_are_the_models(open_report: Make, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 4, "n_head": 2, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=30, **sizes)).eval()
    with torch.no_grad(), ch.watch(model) as seen:
        model(torch.arange(4, 10)[None])
    html, meta = page_of(seen, tmp_path, layer=[2, 3])
    assert [layer["label"] for layer in meta["layers"]] == ["L2", "L3"]
    page = open_report([], "#layer=0&head=1", html=html).page
    assert page.inner_text("#where").startswith("L2H1 · ")
    names = page.locator(".head").evaluate_all("all => all.map((one) => one.getAttribute('aria-label').split(',')[0])")
    assert names == ["L2H0", "L2H1", "L3H0", "L3H1"]
