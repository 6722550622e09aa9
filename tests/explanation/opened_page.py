"""What the tests of an explanation's page share: what they open, and how they read and change it."""

import json

import torch
from drawn import draw

import clearhead as ch


def small(**given):
    return ch.explain(draw(3, 4), draw(4, 4, seed=1), draw(4, 2, seed=2), **given)


def heads(**given):
    return ch.explain(*(draw(1, 4, 6, 8, seed=n) for n in range(3)), mask=ch.Causal(), **given)


EXAMPLES = {
    "dot": small,
    "heads": heads,
    "additive": lambda: ch.explain(
        draw(2, 3, 4), draw(2, 5, 6, seed=1), draw(2, 5, 3, seed=2), score=ch.Additive(4, 6, 5), mask=ch.Lengths([3, 5])
    ),
    "regression": lambda: ch.explain(draw(5, 1), draw(9, 1, seed=1), draw(9, 1, seed=2), score=ch.Gaussian(0.7)),
    "sinks": lambda: ch.explain(
        draw(2, 2, 3, 4), draw(2, 2, 5, 4, seed=1), draw(2, 2, 5, 2, seed=2), score=ch.Dot(softcap=2.0), sinks=draw(2)
    ),
    "wide": lambda: ch.explain(draw(8, 32), draw(40, 32, seed=1), draw(40, 16, seed=2)),
}


def all_numbers(opened, names, hook="numbers"):
    """The numbers of steps as the page has them now, in their own shapes."""
    found = opened.page.evaluate(
        f"(names) => JSON.stringify(names.map((name) => [clearhead.{hook}(name), clearhead.sizes(name)]))", list(names)
    )
    return {
        name: torch.tensor([float(x) for x in flat], dtype=torch.float64).reshape(sizes)
        for name, (flat, sizes) in zip(names, json.loads(found), strict=True)
    }


def numbers(opened, name, hook="numbers"):
    """Those of one step."""
    return all_numbers(opened, [name], hook)[name]


def same(opened, explanation, tolerance=1e-6, hook="numbers"):
    """Every step of the page is that of this explanation, to `tolerance`, relative for numbers above 1."""
    names = opened.page.evaluate("clearhead.names()")
    assert names == [step.name for step in explanation.steps]
    mine = all_numbers(opened, names, hook)
    for step in explanation.steps:
        theirs = step.value.detach().double()
        torch.testing.assert_close(
            mine[step.name], theirs, rtol=tolerance, atol=tolerance, equal_nan=True, msg=step.name
        )


def fits(opened, width):
    """No step makes the page wider than its screen: one after another, by the key j, then all at once."""
    widths = opened.page.evaluate("""() => {
      const { dataset } = document.documentElement;
      const press = (key) => document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
      const widths = {};
      for (press("Home"); !(dataset.shown in widths); press("j")) {
        widths[dataset.shown] = document.documentElement.scrollWidth;
      }
      return widths;
    }""")
    assert len(widths) == int(opened.page.locator("#count").inner_text().split()[-1])
    assert max(widths.values()) <= width, widths
    opened.page.get_by_role("button", name="all steps").click()
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width


def cell(opened, step, row, column, result=True):
    """A number of the chosen card, by its table's name and its place."""
    table = f"#cards > section:not([hidden]) figure{':not(.operand)' if result else '.operand'}"
    named = opened.page.locator(table).filter(has=opened.page.locator(f"figcaption b:text-is({json.dumps(step)})"))
    return named.locator("tbody tr").nth(row).locator("td").nth(column)


def open_step(opened, step, head=0, sequence=0):
    opened.page.evaluate(f"location.hash = '#step={step}&at=B.{sequence}_H.{head}'")
    opened.until("document.documentElement.dataset.shown", step)


def edit(opened, step, row, column, value):
    """Type a number into an input's cell, on the card of that input."""
    opened.page.evaluate(f"location.hash = '#step={step}'")
    opened.until("document.documentElement.dataset.shown", step)
    cell(opened, step, row, column).click()
    opened.page.keyboard.type(value)
    opened.page.keyboard.press("Enter")


LUMINANCE = """
(all) => all.map((one) => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (colour) => colour.slice(0, 3).map((x) => x / 255)
    .map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, n) => sum + x * [0.2126, 0.7152, 0.0722][n], 0);
  let behind = one;
  while (behind && (rgb(getComputedStyle(behind).backgroundColor)[3] ?? 1) === 0) behind = behind.parentElement;
  const [a, b] = [light(rgb(getComputedStyle(one).color)), light(rgb(getComputedStyle(behind).backgroundColor))];
  return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), one.outerHTML.slice(0, 80)];
})
"""
TEXTS = "h1, h2, button:not(:disabled), a, .formula, .shape, .why, figcaption *, th, td.cell:not(.allowed), pre, .quiet"
TEXTS += ", #written *"
HOSTILE = (
    "<script>window.bad = 1</script>",
    "</script><img src=x onerror='window.bad=1'>",
    "\"'`&lt;{{data}}",
    "\u202eשלום\u0000\u0007",
    "w" * 3000,
    "\ud800",
)
