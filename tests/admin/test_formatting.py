"""Durations and times as people read them."""

from __future__ import annotations

import math
from datetime import datetime, timedelta

import pytest
from django.utils import timezone, translation
from rlaas_django.operators.formatting import duration, duration_in_words, time_with_zone


@pytest.mark.parametrize(
    ("seconds", "short", "words"),
    [
        (0.4, "1 s", "1 minute"),
        (38, "38 s", "1 minute"),
        (59.2, "1 min", "1 minute"),
        (250, "4 min 10 s", "5 minutes"),
        (3_599.5, "1 h", "1 hour"),
        (7_500, "2 h 5 min", "2 hours, 5 minutes"),
        (7_501, "2 h 6 min", "2 hours, 6 minutes"),
        (86_399, "1 d", "1 day"),
        (273_600, "3 d 4 h", "3 days, 4 hours"),
        (365 * 86_400, "365 d", "365 days"),
    ],
)
def test_a_duration_has_two_units_and_is_rounded_up(seconds, short, words):
    with translation.override("en"):
        assert duration(seconds) == short.replace(" min", "\u00a0min").replace(" s", "\u00a0s").replace(
            " h", "\u00a0h"
        ).replace(" d", "\u00a0d")
        assert duration_in_words(seconds) == words


def test_a_duration_of_nothing_or_for_ever_is_said():
    with translation.override("en"):
        assert duration(0) == "0\u00a0s"
        assert duration(math.inf) == "never"


def test_durations_are_translated():
    with translation.override("de"):
        assert duration(90_000) == "1\u00a0T 1\u00a0h"
        assert duration_in_words(90_000) == "1 Tag, 1 Stunde"


@pytest.mark.parametrize("is_aware", [True, False])
def test_a_time_has_its_zone_and_its_date_unless_that_is_today(is_aware):
    with timezone.override("Europe/Berlin"), translation.override("en"):
        now = timezone.localtime()
        yesterday = now - timedelta(days=1)
        if not is_aware:
            now, yesterday = now.replace(tzinfo=None), yesterday.replace(tzinfo=None)
        assert time_with_zone(now) == f"{now:%H:%M:%S} {datetime.now(timezone.get_current_timezone()):%Z}"
        assert time_with_zone(yesterday).startswith(f"{yesterday:%m/%d/%Y} {yesterday:%H:%M} CE")
