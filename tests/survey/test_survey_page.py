"""The page of a survey in Chromium."""

import torch
from browser import Opened
from test_survey_state import Reader, corpus, letters

import clearhead as ch
from clearhead.inspection.measures import MEASURES
from clearhead.report.heads_page import Statistic, heads_page
from clearhead.report.layer import About


class Hostile(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("<img src=x onerror=alert(1)>", Reader())

    def forward(self, input_ids, attention_mask):
        return next(iter(self.children()))(input_ids, attention_mask)


def inside(expression):
    return f"(() => {{ const root = document.getElementById('clearhead').shadowRoot; return {expression}; }})()"


def test_the_page_shows_each_head_by_each_statistic(tmp_path, browser):
    kept = ["first", "previous", "distance", ch.reductions.Entropy()]
    survey = ch.models.survey(Hostile().eval(), corpus(20), letters, keep=kept)
    path = survey.write(tmp_path / "p.html", title="<b>Heads</b> & texts")
    opened = browser.open(path, Opened, viewport={"width": 390, "height": 800}, color_scheme="dark")
    opened.until(inside("root.querySelectorAll('.head').length"), 2)
    assert opened.page.evaluate(inside("root.getElementById('title').textContent")) == "<b>Heads</b> & texts"
    assert opened.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    names = opened.page.evaluate(inside("[...root.getElementById('measure').options].map((one) => one.value)"))
    assert names == ["first", "previous", "distance", "Entropy (nats)"]
    row = survey.table()[1]
    for name, shown in (
        ("previous", f"{100 * row['previous']:.0f}%"),
        ("distance", f"{row['distance']:.1f} positions"),
        ("Entropy (nats)", f"{row['Entropy (nats)']:.3g}"),
    ):
        choose = f"(root.getElementById('measure').value = '{name}', "
        opened.page.evaluate(inside(choose + "root.getElementById('measure').dispatchEvent(new Event('change')))"))
        said = opened.page.evaluate(inside("root.querySelectorAll('.head')[1].getAttribute('aria-label')"))
        assert said.startswith("L0H1, self, ") and shown in said
    opened.page.evaluate(inside("root.querySelectorAll('.head')[1].click()"))
    assert "<img src=x" in opened.page.evaluate(inside("root.getElementById('one').textContent"))
    opened.page.evaluate(inside("root.querySelector('[value=list]').click()"))
    opened.until(inside("root.querySelectorAll('.ranked').length"), 2)
    opened.page.evaluate(inside("root.querySelector('[value=scatter]').click()"))
    opened.until(inside("root.querySelectorAll('.dot').length"), 2)
    assert not opened.faults


def test_it_opens_on_a_measure_that_tells_heads_apart(tmp_path, browser):
    """Of all heads the entropy is below uniform attention's, so that every square would have one hue."""
    about = {one.name: About(one.name, one.says, one.formula, one.range, one.does) for one in MEASURES}
    names = ("normalised entropy", "first", "previous")
    statistics = [Statistic(about[name], f"{name} uniform", share=True) for name in names]
    uniform = {"normalised entropy uniform": 1.0, "first uniform": 0.2, "previous uniform": 0.2}
    shares = [(0.4, 0.1, 0.9), (0.7, 0.5, 0.05), (0.9, 0.3, 0.2)]
    rows = [
        {"layer": 0, "module": "m", "head": n, **uniform, **dict(zip(names, each, strict=True))}
        for n, each in enumerate(shares)
    ]
    (tmp_path / "p.html").write_text(heads_page("Heads", "", statistics, rows), encoding="utf-8")
    opened = browser.open(tmp_path / "p.html", Opened)
    opened.until(inside("root.getElementById('measure').value"), "previous")
    colour = "getComputedStyle(one).backgroundColor.match(/\\d+/g).map(Number)"
    more, less, _ = opened.page.evaluate(inside(f"[...root.querySelectorAll('.head')].map((one) => {colour})"))
    assert more[2] > more[0] and less[0] > less[2]  # blue, brown
    assert not opened.faults
