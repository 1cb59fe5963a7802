"""Durations, times and numbers as people read them, in the language of the site."""

from __future__ import annotations

import math
from datetime import datetime

from django.utils import timezone
from django.utils.formats import date_format, number_format
from django.utils.timesince import TIME_STRINGS
from django.utils.translation import gettext, pgettext

UNITS = {"day": 86_400, "hour": 3_600, "minute": 60, "second": 1}


def duration(seconds: float) -> str:
    """Return a duration in short form: `38 s`, `4 min 10 s`, `2 h 5 min` or `3 d 4 h`.

    The space before a unit does not break; an infinite duration is `never`.
    """
    if math.isinf(seconds):
        return gettext("never")

    symbols = {
        "day": pgettext("unit of time", "d"),
        "hour": pgettext("unit of time", "h"),
        "minute": pgettext("unit of time", "min"),
        "second": pgettext("unit of time", "s"),
    }

    parts = _two_units(seconds, smallest=1) or {"second": 0}

    return " ".join(f"{number}\u00a0{symbols[unit]}" for unit, number in parts.items())


def duration_in_words(seconds: float) -> str:
    """Return a duration of minutes or more in words: `1 hour, 30 minutes`, `2 days`.

    The words are Django's own, which it has in all its languages.
    """
    parts = _two_units(seconds, smallest=60)
    words = [TIME_STRINGS[unit] % {"num": number} for unit, number in parts.items()]
    return gettext(", ").join(words).replace("\u00a0", " ")


def _two_units(seconds: float, smallest: int) -> dict[str, int]:
    """Split seconds into the largest unit and the next, rounded up to the latter."""
    precision = smallest
    if seconds >= UNITS["day"]:
        precision = UNITS["hour"]
    elif seconds >= UNITS["hour"]:
        precision = UNITS["minute"]

    left = math.ceil(seconds / precision) * precision

    parts = {}
    for unit, length in UNITS.items():
        number, left = divmod(left, length)
        if number:
            parts[unit] = number

    return parts


def grouped(number: int) -> str:
    """Return a number with thousands separators."""
    return number_format(number, force_grouping=True)


def local_time(timestamp: float) -> datetime:
    """Return seconds since the epoch as a datetime in the current time zone."""
    return datetime.fromtimestamp(timestamp, tz=timezone.get_current_timezone())


def time_with_zone(at: datetime) -> str:
    """Return a time such as `10:31:09 CET`, with its date unless that is today."""
    if timezone.is_naive(at):  # of a site without USE_TZ
        at = timezone.make_aware(at)

    at = timezone.localtime(at)

    if at.date() == datetime.now(at.tzinfo).date():
        return date_format(at, "H:i:s T")

    return f"{date_format(at, 'SHORT_DATE_FORMAT')} {date_format(at, 'H:i T')}"
