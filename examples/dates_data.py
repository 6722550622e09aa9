"""Dates as people write them, in four languages, with the field that each character belongs to.

>>> from datetime import date
>>> from dates_data import FORMATS, written
>>> item = written(date(2027, 11, 2), FORMATS[4])
>>> print(item.text, item.fields, item.iso, sep="\\n")
Tue 2 Nov 27
www-d-mmm-yy
2027-11-02
>>> written(date(1998, 3, 1), FORMATS[13]).text
'1er mars 1998'
"""

import random
from datetime import date, timedelta
from string import Formatter
from typing import NamedTuple

FIRST, LAST = date(1950, 1, 1), date(2049, 12, 31)  # 100 years: two figures name one of them
EVERY_DAY = [FIRST + timedelta(n) for n in range((LAST - FIRST).days + 1)]

_MONTHS = {
    "en": "january february march april may june july august september october november december",
    "de": "januar februar märz april mai juni juli august september oktober november dezember",
    "fr": "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
    "es": "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre",
}
_WEEKDAYS = {
    "en": "monday tuesday wednesday thursday friday saturday sunday",
    "de": "montag dienstag mittwoch donnerstag freitag samstag sonntag",
    "fr": "lundi mardi mercredi jeudi vendredi samedi dimanche",
    "es": "lunes martes miércoles jueves viernes sábado domingo",
}
MONTHS, WEEKDAYS = ({language: names.split() for language, names in given.items()} for given in (_MONTHS, _WEEKDAYS))

# (language, template): the names in braces are keys of `parts`. Of two numbers the day comes before the month.
FORMATS = [
    ("en", "{day} {month} {year}"),
    ("en", "{Month} {day}, {year}"),
    ("en", "{Weekday}, {dayth} of {Month} {year}"),
    ("en", "{dayth} {Mon} {year}"),
    ("en", "{Wkd} {day} {Mon} {yy}"),
    ("en", "{dd}/{mm}/{yy}"),
    ("en", "{dd}/{mm}/{year}"),
    ("de", "{dd}.{mm}.{year}"),
    ("de", "{day}.{m}.{yy}"),
    ("en", "{year}/{mm}/{dd}"),
    ("en", "{year}{mm}{dd}"),
    ("de", "{day}. {Month} {year}"),
    ("de", "{Weekday}, den {day}. {Month} {year}"),
    ("fr", "{jour} {month} {year}"),
    ("fr", "{weekday} {day} {month} {year}"),
    ("es", "{day} de {month} de {year}"),
    ("es", "{weekday}, {day} de {month} de {year}"),
]


class Item(NamedTuple):
    """A date: its text, the field of each character of the text (y, m, d, w, - for none), and the date in ISO 8601."""

    text: str
    fields: str
    iso: str


def parts(day: date, language: str) -> dict[str, tuple[str, str]]:
    """The parts that a template can name: for each its field, and its text."""
    month, weekday = MONTHS[language][day.month - 1], WEEKDAYS[language][day.weekday()]
    ending = "th" if day.day in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(day.day % 10, "th")
    return {
        "day": ("d", str(day.day)),
        "dd": ("d", f"{day.day:02}"),
        "dayth": ("d", f"{day.day}{ending}"),
        "jour": ("d", "1er" if day.day == 1 else str(day.day)),
        "m": ("m", str(day.month)),
        "mm": ("m", f"{day.month:02}"),
        "month": ("m", month),
        "Month": ("m", month.capitalize()),
        "Mon": ("m", month[:3].capitalize()),
        "year": ("y", str(day.year)),
        "yy": ("y", f"{day.year % 100:02}"),
        "weekday": ("w", weekday),
        "Weekday": ("w", weekday.capitalize()),
        "Wkd": ("w", weekday[:3].capitalize()),
    }


def written(day: date, form: tuple[str, str]) -> Item:
    """A day in one of the formats."""
    language, template = form
    named, text, fields = parts(day, language), "", ""
    for between, name, _, _ in Formatter().parse(template):
        field, part = named[name] if name else ("-", "")
        text, fields = text + between + part, fields + "-" * len(between) + field * len(part)
    return Item(text, fields, day.isoformat())


def split(held_out: float = 0.1) -> tuple[list[date], list[date]]:
    """The days to learn from and the days kept for the test. No day is in both, and the two are always the same."""
    days = random.Random(0).sample(EVERY_DAY, len(EVERY_DAY))
    count = int(len(days) * held_out)
    return days[count:], days[:count]


def sample(days: list[date], count: int, seed: int) -> list[Item]:
    """`count` items: days drawn from `days`, each in a format drawn at random."""
    draw = random.Random(seed)
    return [written(draw.choice(days), draw.choice(FORMATS)) for _ in range(count)]


# every character that can occur: two years have every part of every template
CHARACTERS = "".join(sorted({c for day in EVERY_DAY[:731] for form in FORMATS for c in written(day, form).text}))
