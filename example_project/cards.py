"""The cards of the start page: which view each tries, and what it says about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.urls import reverse
from django.utils.safestring import SafeString

from . import api, settings, source, views

# How a panel is tried.
TRY = "try"
TRY_FORM = "form"
TRY_TOKENS = "tokens"
TRY_OUTAGE = "outage"
OPEN = "open"
CURL = "curl"


@dataclass(frozen=True)
class Panel:
    """One limited view, and how to try it."""

    view: Callable[..., Any]
    label: str = ""  # among the panels of a card
    text: str = ""
    control: str = TRY
    before: str = ""  # source that the view's own does not show
    route: str = ""  # the name of its URL, where it is not the view's own

    @property
    def name(self) -> str:
        return self.view.__name__

    @property
    def url(self) -> str:
        return reverse(self.route or self.name)

    @property
    def code(self) -> SafeString:
        code = source.of_function(self.view)
        if self.before:
            code = f"{self.before}\n\n{code}"
        return source.highlighted(code)

    @property
    def curl(self) -> str:
        """A command that checks over HTTP, for programs in other languages."""
        header = f"Authorization: Bearer {settings.DEMO_TOKEN}"
        return f'curl -H "{header}" "{{host}}{self.url}?userId=alice"'


@dataclass(frozen=True)
class Card:
    title: str
    text: str
    panels: tuple[Panel, ...]
    slug: str

    @classmethod
    def of(cls, title: str, text: str, *panels: Panel, slug: str = "") -> Card:
        return cls(title, text, panels, slug or panels[0].name)


@dataclass(frozen=True)
class Section:
    title: str
    cards: tuple[Card, ...]


SECTIONS = (
    Section(
        "On a view",
        (
            Card.of(
                "The default policy",
                "One word limits a view. The settings give the rate, five requests in "
                "20 seconds, and it is counted per user, or per address for anyone "
                "not logged in.",
                Panel(views.bare),
            ),
            Card.of(
                "A rate of its own",
                "A rate written on a view is that view's own counter. This one counts "
                "by address, so acting as somebody else does not help.",
                Panel(views.inline),
            ),
            Card.of(
                "Several limits, one decision",
                "Who, with which token, from where: three policies are checked in one "
                "round trip. All are charged, or none. Press ten times, a few times "
                "over, and watch another policy refuse.",
                Panel(views.several, control=TRY_TOKENS),
            ),
            Card.of(
                "An async view",
                "The same decorator. The limiter awaits Redis natively, without a "
                "thread.",
                Panel(views.asynchronous),
            ),
            Card.of(
                "A rate per plan",
                "A rate may be a function of the request. Act as alice, bob or carol: "
                "eight requests, three, or no limit at all.",
                Panel(views.by_plan, before=source.of_function(views.rate_of_plan)),
            ),
        ),
    ),
    Section(
        "What is charged",
        (
            Card.of(
                "Only failures",
                "Three wrong passwords in 30 seconds, and the door stays shut. A "
                "right one costs nothing, however often. The password of alice, bob "
                "and carol is “demo”. login_failed goes by Django's authenticate(), "
                "whatever the view answers: LoginView answers a wrong password with "
                "200. To limit every login of a site at once, the admin's too, name "
                "rlaas_django.auth.ModelBackend in AUTHENTICATION_BACKENDS.",
                Panel(views.log_in, control=TRY_FORM),
            ),
            Card.of(
                "An expensive request",
                "Each request takes three of ten units. The fourth does not fit, and "
                "takes nothing.",
                Panel(views.export),
            ),
        ),
    ),
    Section(
        "How it is counted",
        (
            Card.of(
                "Five algorithms",
                "The same rate, five ways to count. Press ten times and see how each "
                "one recovers.",
                Panel(
                    views.fixed_window,
                    "Fixed window",
                    "One number. It starts anew every ten seconds by the clock, so "
                    "twice the limit fits around a boundary.",
                ),
                Panel(
                    views.sliding_window,
                    "Sliding window",
                    "The default. Exact: in any ten seconds at most five. Each "
                    "request makes room again ten seconds after it came.",
                ),
                Panel(
                    views.sliding_window_compact,
                    "Compact",
                    "The sliding window's verdicts, to the millisecond, in a sixtieth "
                    "of the memory at 1000 requests a minute.",
                ),
                Panel(
                    views.sliding_window_counter,
                    "Counter",
                    "Two numbers, weighed by time: close to the sliding window, and "
                    "never larger than this.",
                ),
                Panel(
                    views.token_bucket,
                    "Token bucket",
                    "Eight at once, then one every two seconds: a burst is welcome, a "
                    "stream is not.",
                ),
                slug="algorithms",
            ),
        ),
    ),
    Section(
        "Gentler than a refusal",
        (
            Card.of(
                "A rehearsal",
                "In shadow a policy counts, logs and sends its signal, and refuses "
                "nobody. Nor does it show in the headers. So a new limit can be tried "
                "on real traffic.",
                Panel(views.shadow),
            ),
            Card.of(
                "The view decides",
                "With block=False the view always runs, and finds the decision on the "
                "request.",
                Panel(views.feed),
            ),
        ),
    ),
    Section(
        "With other frameworks",
        (
            Card.of(
                "Django REST framework",
                "Throttles with the names and settings of its own, exact, and all of "
                "a view in one round trip.",
                Panel(api.rest_framework, before=source.of_function(api.DemoThrottle)),
            ),
            Card.of(
                "django-ninja",
                "Its throttles, counted in Redis, per user even when requests come at "
                "the same time.",
                Panel(api.django_ninja, route="demo_api:django_ninja"),
            ),
            Card.of(
                "From another language",
                "Any program checks over HTTP: here the default policy, for a user "
                "called alice there. Counters, policies and the admin panel are "
                "shared with the views.",
                Panel(
                    views.service,
                    before=source.of_variable(settings, "DEMO_TOKENS"),
                    control=CURL,
                    route="rlaas_service:check",
                ),
            ),
        ),
    ),
    Section(
        "When Redis is unavailable",
        (
            Card.of(
                "Redis goes away",
                "Stop the demo's own Redis and go on pressing. The first request "
                "waits for one timeout at most; then the circuit breaker is open and "
                "each view does what its policy says. Start Redis again, and within "
                "two seconds it decides again.",
                Panel(
                    views.fail_open,
                    "Fail open",
                    "The default: allowed, without a limit.",
                    TRY_OUTAGE,
                ),
                Panel(
                    views.fail_closed,
                    "Fail closed",
                    "Refused with 503 and Retry-After.",
                    TRY_OUTAGE,
                ),
                Panel(
                    views.count_locally,
                    "Local fallback",
                    "Each process counts by itself until Redis is back. Recommended "
                    "for logins.",
                    TRY_OUTAGE,
                ),
                slug="outage",
            ),
        ),
    ),
    Section(
        "Around the views",
        (
            Card.of(
                "Without a decorator",
                "The middleware limits paths by the settings alone; the view knows "
                "nothing of it.",
                Panel(
                    views.report, before=source.of_variable(settings, "RATE_LIMITER")
                ),
            ),
            Card.of(
                "A page for people",
                "Programs get problem details as JSON; browsers get a page that "
                "counts down. A template of the site, rlaas_django/429.html, takes "
                "its place.",
                Panel(views.second_visit, control=OPEN),
            ),
        ),
    ),
)
PANELS = {
    panel.name: panel
    for section in SECTIONS
    for card in section.cards
    for panel in card.panels
}
