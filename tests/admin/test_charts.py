"""Charts: what is drawn, and what is said of it."""

from __future__ import annotations

import re

import pytest
from django.utils import timezone, translation
from rlaas_django.admin import charts
from rlaas_django.stats.reader import Counts

START = 1_700_000_000 // 3600 * 3600


def series(*numbers: int) -> list[Counts]:
    return [Counts(START + 60 * i, allowed=number) for i, number in enumerate(numbers)]


@pytest.mark.parametrize(
    ("peak", "ticks"),
    [
        (0, ["1", "0"]),
        (1, ["1", "0"]),
        (3, ["3", "2", "1", "0"]),
        (5, ["6", "4", "2", "0"]),
        (17, ["20", "15", "10", "5", "0"]),
        (42, ["60", "40", "20", "0"]),
        (1234, ["1500", "1000", "500", "0"]),
        (20_000, ["20000", "15000", "10000", "5000", "0"]),
    ],
)
def test_the_numbers_of_the_axis_are_round_and_at_most_five(peak, ticks):
    drawn = charts.chart(charts.bars(series(peak, 0), "H:i"), "label")
    axis = drawn.split('<div class="rlaas-y" aria-hidden="true">')[1].split("</div>")[0]
    assert [each.replace(",", "") for each in re.findall("<span>(.*?)</span>", axis)] == ticks


def test_a_bar_for_each_part_has_its_numbers_in_words():
    counts = Counts(START, allowed=1234, refused=2, other=3, over=4, degraded=5)
    with timezone.override("UTC"), translation.override("en"):
        first, second = charts.bars([counts, Counts(START + 60)], "H:i")
    time = "22:00"
    parts = "2 refused, 3 refused by another policy, 4 over the limit, not refused, 5 decided without Redis"
    assert first.title.replace(",", "") == f"{time}: 1234 allowed, {parts}".replace(",", "")
    assert second.title == "22:01: no requests"
    drawn = charts.chart([first, second], "label")
    assert drawn.count("<rect") == 2
    assert f'<p class="rlaas-readout">{second.title}</p>' in drawn


def test_parts_are_added_up():
    added = charts.add_up(series(1, 2, 3, 4), 2)
    assert [(counts.start - START, counts.allowed) for counts in added] == [(0, 3), (120, 7)]


def test_one_refusal_among_thousands_is_seen():
    drawn = charts.sparkline([Counts(START, allowed=1_000_000, refused=1)])
    (path,) = re.findall('<path class="rlaas-refused" d="(.*?)"', drawn)
    assert float(re.search(r"v-([\d.]+)", path)[1]) > 1


def test_a_label_is_escaped():
    assert "<b>" not in charts.chart(charts.bars(series(1), "H:i"), "<b>")
