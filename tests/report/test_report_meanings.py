"""The numbers of a pair that the page shows beside weights, beside plain PyTorch in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.models.views.meanings import effects_of

Make = Callable[..., Any]
SHOWN = "document.getElementById('clearhead').dataset.shown"
LAYERS, HEADS, LENGTH, WIDTH = 3, 2, 9, 8
WORDS = [f"w{i}" for i in range(LENGTH)]


class Layers(torch.nn.Module):
    """Causal attention, layer after layer, with projections of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.writers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 2 * WIDTH) for _ in range(LAYERS))

    def forward(self, x: Any) -> Any:
        for layer, writer in zip(self.layers, self.writers, strict=True):
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in layer(x).chunk(3, -1))
            found = torch.nn.functional.scaled_dot_product_attention(3 * q, k, v, is_causal=True)
            x = x + writer(found.transpose(1, 2).flatten(-2))[..., :WIDTH]
        return x


class Known(NamedTuple):
    """The recording, its page, and by layer the weights, values, those times W_O, and gradients, in float64."""

    seen: Any
    page: str
    weights: list[Any]
    values: list[Any]
    written: list[Any]
    gradients: list[Any]


@pytest.fixture(scope="module")
def known(tmp_path_factory: Any) -> Known:
    torch.manual_seed(2)
    model, x = Layers(), torch.randn(2, LENGTH, WIDTH)
    with ch.watch(model, values=True, gradients=True) as seen:
        model(x)[1].pow(3).sum().backward()
    plain = Layers().double()
    plain.load_state_dict(model.state_dict())
    now, weights, values, written = x[1].double(), [], [], []
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for layer, writer in zip(plain.layers, plain.writers, strict=True):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(0, 1) for t in layer(now).chunk(3, -1))
        w = (3 * q @ k.mT / (WIDTH // HEADS) ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        w.retain_grad()
        weights.append(w)
        values.append(v)
        written.append(v @ writer.weight.T.unflatten(0, (HEADS, -1)))
        now = now + writer((w @ v).transpose(0, 1).flatten(-2))[..., :WIDTH]
    now.pow(3).sum().backward()
    cells = itertools.product(range(LAYERS), range(HEADS))
    effects = ch.models.Sweep({"layer": n, "head": h, "effect": n - 2.5 * h} for n, h in cells)
    effects.plain, effects.metric, effects.unit = 4.0, "<b>drop</b>", "nats"
    view = seen.view(tokens=WORDS, sequence=1, error=1e-6, effects=[effects])
    path: Path = view.write(tmp_path_factory.mktemp("meanings") / "page.html")
    found = [[t.detach().numpy() for t in each] for each in (weights, values, written, [w.grad for w in weights])]
    return Known(seen, path.read_text(), *found)


def of_values(known: Known, layer: int, vectors: str = "values") -> Any:
    lengths = np.linalg.norm(getattr(known, vectors)[layer], axis=-1)
    return known.weights[layer] * (lengths / lengths.mean(-1, keepdims=True))[:, None]


def of_gradients(known: Known, layer: int, sign: int) -> Any:
    product = known.weights[layer] * known.gradients[layer]
    return np.maximum(0, sign * product) * LENGTH / np.abs(product).sum((1, 2), keepdims=True)


def rollout(known: Known, layer: int) -> Any:
    found = np.eye(LENGTH)
    for weights in known.weights[: layer + 1]:
        found = (weights.mean(0) + np.eye(LENGTH)) / 2 @ found
    return np.broadcast_to(found, (HEADS, LENGTH, LENGTH))


WANTED: dict[str, Callable[[Known, int], Any]] = {
    "values": of_values,
    "outputs": lambda known, layer: of_values(known, layer, "written"),
    "raises": lambda known, layer: of_gradients(known, layer, 1),
    "lowers": lambda known, layer: of_gradients(known, layer, -1),
    "rollout": rollout,
}


def test_each_number_is_that_of_the_formula(known: Known, open_report: Make) -> None:
    opened = open_report([], html=known.page)
    choose = "name => { const m = document.getElementById('clearhead').shadowRoot.getElementById('meaning');"
    choose += " m.value = name; m.dispatchEvent(new Event('change')); }"
    for name, of in WANTED.items():
        opened.page.evaluate(choose, name)
        for layer, head, token in ((1, 1, 7), (2, 0, 4)):
            opened.page.evaluate(f"location.hash = '#layer={layer}&head={head}&token={token}&meaning={name}'")
            opened.until(f"{SHOWN}.startsWith('{layer}/{head}/out/{token}/')")
            opened.settle()
            want = of(known, layer)[head]
            np.testing.assert_allclose(opened.page.evaluate("clearhead.look()"), want[token], atol=2e-5, err_msg=name)
            cells = np.reshape(opened.page.evaluate("clearhead.cells()"), (LENGTH, LENGTH))
            seen = np.arange(LENGTH) <= np.arange(LENGTH)[:, None]
            times = want * np.arange(1, LENGTH + 1)[:, None]
            np.testing.assert_allclose(cells, np.where(seen, times, -1), atol=2e-4, err_msg=name)
            assert opened.page.inner_text("#meaning-says")


def test_the_page_says_which_number_it_shows(known: Known, open_report: Make) -> None:
    opened = open_report([], html=known.page, hash="#layer=1&head=1&token=7&meaning=values&pair=3")
    assert opened.page.inner_text("#map-title") == "Weights × value norms of L1H1"
    number = 100 * of_values(known, 1)[1][7, 3]
    assert opened.page.inner_text("#pair-title").endswith(f"{number:.1f}% of a mean value")
    assert opened.page.input_value("#meaning") == "values"
    opened.page.select_option("#meaning", "rollout")
    opened.until(
        "document.getElementById('clearhead').shadowRoot.getElementById('map-title').textContent", "Rollout up to L1"
    )
    assert "meaning=rollout" in opened.page.evaluate("location.hash")
    assert not opened.page.is_visible("#why")
    opened.page.select_option("#meaning", "weights")
    opened.until(
        "document.getElementById('clearhead').shadowRoot.getElementById('map-title').textContent", "The weights of L1H1"
    )


def test_a_number_that_was_not_recorded_says_how_to_record_it(make_case: Make, open_report: Make) -> None:
    opened = open_report([make_case().layer], hash="#meaning=raises")
    options = opened.page.locator("#meaning option")
    disabled = options.evaluate_all("all => all.filter(one => one.disabled).map(one => one.textContent)")
    assert disabled[0] == "weights × value norms: watch with values=True"
    assert disabled[2] == "gradients: raise the loss: watch with gradients=True and call loss.backward()"
    assert disabled[-1].startswith("rollout up to this layer: needs all self-attention layers of one run")
    assert len(disabled) == 5 and opened.page.input_value("#meaning") == "weights"


def test_the_effect_of_an_edit_is_a_measure_of_heads(known: Known, open_report: Make) -> None:
    opened = open_report([], html=known.page)
    assert opened.page.input_value("#measure") == "effect on the <b>drop</b>"  # the page opens on what was passed
    assert opened.page.evaluate(SHOWN).startswith("0/1/")  # of 0, −2.5, 1, −1.5, 2, −0.5 the largest
    labels = opened.page.locator(".head").evaluate_all("all => all.map(one => one.getAttribute('aria-label'))")
    assert [label.split("</b> ")[1] for label in labels] == ["0", "-2.5", "1", "-1.5", "2", "-0.5"]
    assert opened.page.inner_text("#heads-ticks").split() == ["-3", "0", "3"]
    assert opened.page.locator("#measure option").last.inner_text() == "effect on the <b>drop</b>"
    said = "The change of the <b>drop</b> by the edits of this head alone; without an edit it is 4 nats."
    assert opened.page.inner_text("#measure-says") == said
    headline = f"L0H1 has the largest effect on the <b>drop</b>: -2.5. {said}"
    assert opened.page.inner_text("#distinctive") == headline
    opened.page.keyboard.press("m")  # the simple view says it too
    opened.until("document.getElementById('clearhead').hasAttribute('data-simple')")
    assert opened.page.inner_text("#distinctive") == headline and opened.page.locator("#distinctive").is_visible()
    opened.page.evaluate("location.hash = '#layer=2&head=0'")
    opened.until(f"{SHOWN}.startsWith('2/0/')")
    assert opened.page.inner_text("#distinctive") == "Go to L0H1, which has the largest effect on the <b>drop</b>"


def test_a_page_opens_on_the_first_effect_that_a_shown_head_has(known: Known) -> None:
    nothing = {"layer": 0, "head": 0, "effect": float("nan")}
    sweeps = [
        ch.models.Sweep([nothing]),
        ch.models.Sweep({"layer": 2, "head": h, "effect": 0.5 - h} for h in (0, 1, 7)),
    ]
    for one, name in zip(sweeps, ("first", "second"), strict=True):
        one.plain, one.metric = 1.0, name

    def opens(**options: Any) -> Any:
        found = known.seen.view(tokens=WORDS, **options).page.distinctive
        return found["layer"], found["head"], found["measure"]

    assert opens(effects=sweeps) == (2, 0, "effect on the second")  # |0.5| and |−0.5|: the first of equal ones
    assert opens(effects=sweeps, layer=2, heads=[1]) == (0, 0, "effect on the second")
    assert opens(effects=sweeps, beside=known.seen) == (2, 0, "effect on the second")
    assert opens(effects=sweeps, layer=0)[2] == opens(layer=0)[2] != "effect on the second"
    assert opens(beside=known.seen)[2] == "divergence"


def test_effects_of_one_name_are_told_apart() -> None:
    source = random.Random(0)
    for _ in range(10):
        sweeps = []
        for n in range(source.randint(1, 6)):
            cells = itertools.product(range(LAYERS), range(HEADS))
            one = ch.models.Sweep({"layer": layer, "head": h, "effect": n + layer - h} for layer, h in cells)
            one.plain, one.metric, one.edited = 1.0, source.choice("ab"), source.choice(["", "Patch", "Ablate"])
            sweeps.append(one)
        found = {about.name: of[1, 0] for about, of in effects_of(sweeps)}
        assert list(found.values()) == [n + 1.0 for n in range(len(sweeps))]
        for name, one in zip(found, sweeps, strict=True):
            alone = [other.metric for other in sweeps].count(one.metric) == 1
            assert name.startswith(one.name) and (not alone or name == one.name)
            assert alone or f"by {one.edited}" in name or not one.edited


def test_a_part_of_the_layers_or_heads_has_no_rollout(known: Known) -> None:
    assert known.seen.view().page.flows == [[0, 1, 2]]
    for choice in ({"layer": [0, 1]}, {"layer": slice(None), "heads": 0}):
        assert known.seen.view(**choice).page.flows == []


def test_effects_that_are_no_sweep_are_an_error(known: Known) -> None:
    for wrong in (3, [{"layer": 0, "value": 1.0}], {"drop": {"layer": 0}}):
        with pytest.raises(ch.ClearheadError, match="expected a number for each layer and head"):
            known.seen.view(effects=wrong)
