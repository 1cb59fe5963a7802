"""Text for people: durations, times, and strings that a client chose."""

from __future__ import annotations

import math
from datetime import datetime

from django.utils import timezone
from django.utils.formats import number_format
from django.utils.translation import gettext, pgettext


def printable(text: str) -> str:
    r"""Return text with control and bidirectional characters escaped, such as `a\n`, `\x1b` and `\u202e`."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def duration(seconds: float) -> str:
    """Return seconds as `38 s`, `4 min 10 s`, `2 h 5 min` or `3 d 4 h`, rounded up; no line breaks before a unit."""
    if math.isinf(seconds):
        return gettext("never")
    left = math.ceil(seconds)
    parts = [
        (left // 86_400, pgettext("unit of time", "d")),
        (left // 3_600 % 24, pgettext("unit of time", "h")),
        (left // 60 % 60, pgettext("unit of time", "min")),
        (left % 60, pgettext("unit of time", "s")),
    ]
    first = next((i for i, (number, _unit) in enumerate(parts) if number), len(parts) - 1)
    shown = parts[first : first + 2]
    return " ".join(f"{number}\u00a0{unit}" for number, unit in shown if number or len(shown) == 1)


def local_time(timestamp: float) -> datetime:
    """Return seconds since the epoch as a datetime in the current time zone."""
    return datetime.fromtimestamp(timestamp, tz=timezone.get_current_timezone())


def grouped(number: int) -> str:
    """Return a number with thousands separators."""
    return number_format(number, force_grouping=True)
