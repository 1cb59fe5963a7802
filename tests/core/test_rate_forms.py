"""The parser of rates against another one: what is written well is accepted, and nothing else is."""

from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st
from rlaas_django import PolicyError, Rate

SECONDS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3_600),
    **dict.fromkeys(("d", "day", "days"), 86_400),
}


@st.composite
def spelled(draw, least: int, most: int) -> tuple[str, int]:
    """Return a number as Python takes it, with underscores between some of its digits, and its value."""
    number = draw(st.integers(least, most))
    digits = [*str(number)]
    gaps = draw(st.lists(st.sampled_from(["", "_"]), min_size=len(digits), max_size=len(digits)))
    return "".join(digit + gap for digit, gap in zip(digits[:-1], gaps, strict=False)) + digits[-1], number


units = st.sampled_from([*SECONDS])
some_text = st.one_of(
    st.text(max_size=20),
    st.lists(st.sampled_from([*"0159_/ \n-.\u0665x", " per ", "per", *SECONDS]), max_size=7).map("".join),
)


@given(limit=spelled(1, 1_000_000), number=spelled(1, 9), unit=units, form=st.sampled_from(["/", " per "]))
def test_every_way_to_write_a_rate_is_understood(limit, number, unit, form):
    (limit_text, units_per_window), (number_text, count) = limit, number
    gap = " " if form == " per " else ""
    assert Rate.parse(f"{limit_text}{form}{unit}") == Rate(units_per_window, SECONDS[unit])
    assert Rate.parse(f"{limit_text}{form}{number_text}{gap}{unit}") == Rate(units_per_window, count * SECONDS[unit])


@given(limit=spelled(1, 1_000_000), seconds=spelled(1, 100_000))
def test_a_number_alone_is_seconds(limit, seconds):
    assert Rate.parse(f"{limit[0]}/{seconds[0]}") == Rate(limit[1], seconds[1])


@given(some_text)
@example("5 per 60")
@example("5/_")
@example("9" * 5000 + " per day")
@example("5 per " + "9" * 5000 + " days")
def test_other_text_is_refused_with_the_text_and_the_accepted_form(text):
    rate, message = parse(text)
    expected = understood(text)
    if rate is not None:
        assert (rate.limit, rate.window) == expected
        return
    reason = '"5/m", "5 per minute", "30/10s"' if expected is None else "below 1|over a year|too large"
    assert repr(text) in message
    assert re.search(reason, message)


def parse(text: str) -> tuple[Rate | None, str]:
    """Return the rate, or None and why."""
    try:
        return Rate.parse(text), ""
    except PolicyError as error:
        return None, str(error)


def understood(text: str) -> tuple[int, int] | None:
    """Return the limit and the seconds that a text names, read word by word."""
    limit, slash, period = text.partition("/")
    words = [period]
    if not slash:
        limit, _, period = text.partition(" per ")
        words = period.split(" ")
    if len(words) == 1:  # "minute", "10s", and with a slash "60"
        digits = re.match("[0-9_]*", period)[0]
        words = [digits, period[len(digits) :]] if digits else [period]
    if len(words) == 1:
        words = ["1", *words]
    number, unit = words if len(words) == 2 else ("", "")
    if slash and not unit:
        unit = "s"
    if unit not in SECONDS or not (is_number(limit) and is_number(number)):
        return None
    return int(limit), int(number) * SECONDS[unit]


def is_number(text: str) -> bool:
    """Return whether a text is a whole number as Python writes it, of at most 16 digits."""
    digits = text.split("_")
    return all(part.isdecimal() and part.isascii() for part in digits) and len("".join(digits)) <= 16
