"""Each letter of the course stands for one thing: its table holds for every formula, shape and picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PLANTED = {
    "a letter of another chapter": (
        "04_additive_attention.md",
        (r"w_v \cdot \tanh(", r"\sum_h w_v \cdot \tanh("),
        r"04_additive_attention.md: h, in 's_{ij} = \\sum_h w_v",
    ),
    "a letter with another index": (
        "11_writing_your_own.md",
        (r"\sum_{d} r_d\,", r"\sum_{d} w_d\,"),
        "11_writing_your_own.md: w with the index d, in",
    ),
    "a letter with another accent": (
        "06_positions.md",
        (r"o_i = \sum_j w_{ij}\, v_j", r"\hat o_i = \sum_j w_{ij}\, v_j"),
        "06_positions.md: hat o with the index i, in",
    ),
    "a prime that has no meaning": (
        "08_a_transformer.md",
        ("$x + f(x)$", "$x + f(x')$"),
        "08_a_transformer.md: x', in",
    ),
    "a letter that is nowhere": (
        "02_dot_product_as_a_kernel.md",
        ("$\\sqrt E$", "$\\sqrt N$"),
        r"02_dot_product_as_a_kernel.md: N, in '\\sqrt N', is not in the table",
    ),
    "a shape": ("04_additive_attention.md", ("(B, M, 128)", "(N, M, 128)"), "04_additive_attention.md: N, in a shape"),
    "a shape of a letter of another chapter": (
        "08_a_transformer.md",
        ("# (B, L, E)", "# (B, L, D)"),
        "08_a_transformer.md: D, in 'a shape', has a meaning",
    ),
    "an axis of a picture": (
        "01_weighted_average.md",
        ('xlabel="bandwidth σ"', 'xlabel="bandwidth h"'),
        "01_weighted_average.md: h, in 'a picture', has a meaning that the table gives to other chapters",
    ),
    "a title of a picture": (
        "01_weighted_average.md",
        ('title=f"σ = {width}"', 'title=f"g = {width}"'),
        "01_weighted_average.md: g, in a picture, is not in the table",
    ),
    "a letter with two meanings": (
        "notation.md",
        ("| $t$ | the moment", "| $c$ | a corner | 2 |\n| $t$ | the moment"),
        "notation.md: c has two rows",
    ),
    "a letter with another index and meaning": (
        "notation.md",
        ("| $t$ | the moment", "| $w_d$ | a relevance | 11 |\n| $t$ | the moment"),
        "notation.md: w has two rows",
    ),
    "a chapter that has no such letter": (
        "notation.md",
        ("of a sequence that repeats itself | 7 |", "of a sequence that repeats itself | 6, 7 |"),
        "notation.md: T is not used in chapter 6",
    ),
}


@pytest.fixture(scope="module")
def program() -> Any:
    spec = importlib.util.spec_from_file_location("letters", DOCS / "letters.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_course_keeps_its_table(program: Any) -> None:
    assert [*program.faults()] == []
    assert len(program.used((DOCS / "course" / "05_self_cross_causal_multihead.md").read_text())) > 15


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str, program: Any, tmp_path: Path) -> None:
    file, (old, new), said = PLANTED[fault]
    for page in (DOCS / "course").glob("*.md"):
        (tmp_path / page.name).write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    text = (tmp_path / file).read_text(encoding="utf-8")
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new, 1), encoding="utf-8")
    assert any(line.startswith(said) for line in program.faults(tmp_path)), [*program.faults(tmp_path)]


@pytest.mark.parametrize(
    ("formula", "found"),
    [
        (r"w_{ij'} = \exp(s_{ij})", {"w with the index ij", "i", "j", "j'", "s with the index ij"}),
        (r"W_q^h x_1", {"W_q", "h", "x"}),
        (r"\hat y(t)^2 \approx \mathrm{keep}_{ij}\, 10^{-2n/E}", {"hat y", "t", "i", "j", "n", "E"}),
        (r"\lVert q'_{id} \rVert \leq \sqrt{L_q}", {"q' with the index id", "i", "d", "L_q"}),
        (r"\text{if } i \text{ may see } j, \quad \lambda_1", {"i", "j", "lambda"}),
    ],
)
def test_letters_are_read_with_their_primes_and_indices(formula: str, found: set[str], program: Any) -> None:
    assert {str(letter) for letter in program.letters(formula)} == found


def test_code_is_no_formula(program: Any) -> None:
    page = "A price of `$x$`, and $y$.\n```{code-cell} ipython3\nz = '$z$'\n```\n```{math}\nv\n```\n$$\nu + t\n$$\n"
    assert {str(letter) for letter in program.used(page)} == {"y", "v", "u", "t"}
