"""A picture that moves: every frame as Python drew it; the player, by mouse and keyboard; print; without a program."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Opened
from moving import drawn, expected
from opened_page import HOSTILE, LUMINANCE

from clearhead.base.output.pages import write_page
from clearhead.explanation.motion import Motion, Picture, short

SHOWN = "document.documentElement.dataset.shown"
COLOURS = """() => ["ink", "cell", "minus", "shade", "panel"]
  .map((name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`))"""


def some(pause: float = 0.05, count: int = 4, words: str = "Frame {} of some.") -> Motion:
    """Shapes that move, turn, change, appear and go."""
    frames = []
    for n in range(count):
        picture = Picture(120)
        picture.rect("box", 10 + 60 * n, 20, 40, 30, opacity=(n + 1) / count)
        picture.path("line", [(10, 80), (100, 80 - 10 * n), (200, 90)])
        picture.line("hand", 180, 60, 220, 60, look="first", transform=f"rotate({-100 * n} 180 60)")
        picture.text("number", 300, 40, f"{n / 2:.1f}", look="strong" if n % 2 else "faint")
        if n != 1:
            picture.add("dot", "circle", "dot" if n else "bar", cx=50, cy=100, r=4 + n)
        if n > 1:
            picture.rect("late", 100, 90, 30, 20, look="ground")
        frames.append((words.format(n), picture))
    return Motion("Some shapes", frames, pause, still=2)


@pytest.fixture
def play(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """`play(motion, less=True, **context)` opens its page from disk; `less`: the reader wants less motion."""
    everything: list[Opened] = []

    def open_one(motion: Motion, less: bool = True, **context: Any) -> Opened:
        path = write_page(tmp_path / f"motion{len(everything)}.html", [motion.html()])
        opened: Opened = browser.open(path, Opened, **context)
        opened.page.emulate_media(reduced_motion="reduce" if less else "no-preference")
        everything.append(opened)
        return opened

    yield open_one
    for opened in everything:
        opened.page.emulate_media(media="null", reduced_motion="no-preference")
        browser.close(opened)


def test_every_frame_is_as_python_drew_it(play: Any) -> None:
    motion = some()
    opened = play(motion)
    for n, (words, _) in enumerate(motion.frames):
        opened.until(SHOWN, str(n))
        assert drawn(opened.page) == expected(motion, n)
        assert opened.page.locator("#words").inner_text() == words
        assert opened.page.get_by_role("img", name=words).count() == 1
        assert opened.page.locator("#at").get_attribute("aria-valuetext") == f"{n + 1} of 4"
        opened.page.keyboard.press("ArrowRight")
    assert opened.page.evaluate(SHOWN) == "3"  # there is nothing after the last frame
    opened.page.keyboard.press("Home")
    assert drawn(opened.page) == expected(motion, 0)
    opened.page.keyboard.press("End")
    opened.page.keyboard.press("ArrowLeft")
    assert drawn(opened.page) == expected(motion, 2)


def test_nothing_plays_by_itself_and_playing_ends_at_the_last_frame(play: Any) -> None:
    opened = play(some(), less=False)
    opened.page.wait_for_timeout(200)
    assert opened.page.evaluate(SHOWN) == "0"
    button = opened.page.get_by_role("button", name="play")
    button.click()
    opened.until("document.getElementById('play').textContent", "pause")
    opened.until(SHOWN, "3")
    assert button.inner_text() == "play"
    assert drawn(opened.page) == expected(some(), 3)
    assert opened.page.get_by_role("button", name="Next frame").is_disabled()
    button.click()  # from the beginning again
    opened.until(f"['0', '1'].includes({SHOWN})")
    opened.page.get_by_role("button", name="pause").click()
    opened.until(f"{SHOWN} !== ''")
    stays = opened.page.evaluate(SHOWN)
    opened.page.wait_for_timeout(200)
    assert opened.page.evaluate(SHOWN) == stays != "3"


def test_between_two_frames_what_differs_in_numbers_moves(play: Any) -> None:
    motion = some()
    opened = play(motion, less=False)
    opened.page.evaluate("""() => {
      window.seen = [];
      const box = document.querySelector("#drawing rect");
      new MutationObserver(() => window.seen.push(Number(box.getAttribute("x")))).observe(box, { attributes: true });
    }""")
    opened.page.get_by_role("button", name="Next frame").click()
    opened.until(SHOWN, "1")
    seen = opened.page.evaluate("window.seen")
    assert len(seen) > 4 and seen == sorted(seen) and seen[-1] == 70
    assert sum(10 < x < 70 for x in seen) > 3
    opened.page.get_by_role("button", name="Previous frame").click()
    opened.until(SHOWN, "0")
    assert drawn(opened.page) == expected(motion, 0)


def test_readers_who_want_less_motion_see_whole_frames_alone(play: Any) -> None:
    opened = play(some())
    opened.page.evaluate("""() => {
      window.seen = [];
      const box = document.querySelector("#drawing rect");
      new MutationObserver(() => window.seen.push(Number(box.getAttribute("x")))).observe(box, { attributes: true });
    }""")
    opened.page.get_by_role("button", name="play").click()
    opened.until(SHOWN, "3")
    assert set(opened.page.evaluate("window.seen")) <= {10, 70, 130, 190}


def test_the_slider_leads_to_a_frame_and_the_keyboard_to_every_control(play: Any) -> None:
    motion = some()
    opened = play(motion)
    opened.page.get_by_role("slider", name="Frame").fill("2")
    assert drawn(opened.page) == expected(motion, 2)
    opened.page.locator("#theme").focus()
    names = []
    for _ in range(4):
        opened.page.keyboard.press("Tab")
        names.append(opened.page.evaluate("document.activeElement.id"))
    assert names == ["play", "previous", "at", "next"]
    opened.page.keyboard.press("Shift+Tab")
    opened.page.keyboard.press("ArrowLeft")  # the slider's own
    assert opened.page.evaluate(SHOWN) == "1"


def test_print_and_a_page_without_its_program_show_the_still_frame(play: Any) -> None:
    motion = some()
    words, picture = motion.frames[2]
    for opened in (play(motion), play(motion, java_script_enabled=False)):
        for media in ("print", "screen"):
            opened.page.emulate_media(media=media)
            still = opened.page.locator("#still svg").is_visible()
            assert still == (media == "print" or opened.alone)
            assert opened.page.locator("#player").is_visible() == (not still)
            assert opened.page.locator("#stage").is_visible() == (not still)
    assert picture.svg(words) in motion.html()


@pytest.mark.parametrize("width", (390, 900))
@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_it_fits_its_frame_and_every_word_reads(width: int, scheme: str, browser: Any, tmp_path: Path) -> None:
    motion = some(
        words="A sentence that says of frame {} what there is to see, in so many words that it takes two lines."
    )
    path = tmp_path / "chapter.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{motion._repr_html_()}", encoding="utf-8")
    opened = browser.open(path, Opened, viewport={"width": width, "height": 600}, color_scheme=scheme)
    opened.until("frames.length")
    inside = opened.page.frames[1]
    inside.wait_for_selector("#player")
    box = inside.evaluate("[document.documentElement.scrollWidth, innerWidth, motion.offsetHeight, innerHeight]")
    assert box[0] <= box[1] and box[2] <= box[3] <= box[2] + 80
    contrasts = inside.locator("h1, button:enabled, #words, #count").evaluate_all(LUMINANCE)
    assert len(contrasts) > 4 and [found for found in contrasts if found[0] < 4.5] == []
    ink, *grounds = inside.evaluate(COLOURS)
    assert all(contrast(ink, ground) >= 4.5 for ground in grounds)
    browser.close(opened)


def contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        found = (int(part, 16) / 255 for part in re.findall("[0-9a-f]{2}", colour))
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in found]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(map(light, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_hostile_words_are_words(play: Any) -> None:
    frames = []
    for words in HOSTILE[:4]:
        picture = Picture(40)
        picture.text("text", 20, 20, words)
        frames.append((words, picture))
    opened = play(Motion(HOSTILE[1], frames, still=1))
    assert not opened.page.evaluate("window.bad")
    assert opened.page.locator("#drawing text").text_content() == HOSTILE[0]
    assert opened.page.title() == HOSTILE[1]


@pytest.mark.parametrize(
    ("number", "text"), [(1.0, "1"), (-0.001, "0"), (0.126, "0.13"), (-2.5, "-2.5"), (100.0, "100")]
)
def test_numbers_are_short(number: float, text: str) -> None:
    assert short(number) == text
