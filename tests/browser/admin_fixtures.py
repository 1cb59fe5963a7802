"""A site with the panel under a strict content security policy, its users, and its traffic."""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from django.conf import settings as django_settings
from django.contrib.auth.models import Permission, User
from django.test import Client
from pytest_django.live_server_helper import LiveServer
from rlaas_django import backend, check
from rlaas_django.runtime.observers import ALLOWED, OVER, REFUSED
from rlaas_django.runtime import background
from rlaas_django.stats import recorder, schema

from tests.browser import admin_urls  # noqa: F401  (before any test: its policies are the site's, and no test's own)
from tests.browser.conftest import LOOKS

if TYPE_CHECKING:
    from playwright.sync_api import Page

os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"  # playwright has a loop in the thread of the tests

PANEL = "/admin/rlaas_django/ratelimit/"
CSP = "default-src 'self'"


def strict_csp(get_response: Any) -> Any:
    def middleware(request: Any) -> Any:
        response = get_response(request)
        response["Content-Security-Policy"] = CSP
        return response

    return middleware


@pytest.fixture(name="site")
def _site(settings, transactional_db) -> Iterator[str]:
    """Serve a site with the panel; the live_server of pytest-django would keep the middleware of the first test."""
    settings.ALLOWED_HOSTS = ["localhost", "testserver"]
    settings.ROOT_URLCONF = "tests.browser.admin_urls"
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    settings.LOGIN_URL = "/admin/login/"
    settings.MIDDLEWARE = [
        "tests.browser.admin_fixtures.strict_csp",
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.middleware.locale.LocaleMiddleware",
        "django.middleware.common.CommonMiddleware",
        "django.middleware.csrf.CsrfViewMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ]
    settings.RATE_LIMITER = {
        "TIMEOUT": 20,  # seconds: the machine may be busy
        "POLICIES": {
            "login": {"rate": "5/m", "key": "ip"},
            "search": {"rate": "30/m", "algo": "token-bucket-algo", "burst": 60},
            "trial": {"rate": "3/h", "shadow": True},
        },
    }
    recorder.reset()
    server = LiveServer("localhost")
    yield server.url
    for thread in threading.enumerate():  # a refresh may be under way, and needs the database of this thread
        if "process_request_thread" in thread.name:
            thread.join(10)
    server.stop()


@pytest.fixture(name="users")
def _users(site) -> dict[str, User]:
    """Return an operator, a viewer who may not act, and a customer."""
    viewer = User.objects.create_user("viewer", password="password", is_staff=True)
    viewer.user_permissions.add(
        *Permission.objects.filter(codename__in=["view_ratelimit", "view_user"]),
    )
    return {
        "operator": User.objects.create_superuser("operator", "operator@example.com", "password"),
        "viewer": viewer,
        "carol": User.objects.create_user("carol", "carol@example.com", "password", first_name="Carol", last_name="Ng"),
    }


@pytest.fixture(name="open_page")
def _open_page(chromium, site) -> Iterator[Any]:
    """Open a page in a browser context of its own, logged in; its console must show no error and no violation."""
    contexts, errors = [], []

    def open_page(user: User | None = None, path: str = PANEL, look: str = "light", **options: Any) -> Page:
        context = chromium.new_context(base_url=site, **{**LOOKS[look], **options})
        contexts.append(context)
        context.set_default_timeout(15_000)
        if user is not None:
            browser = Client()
            browser.force_login(user)
            cookie = browser.cookies[django_settings.SESSION_COOKIE_NAME].value
            context.add_cookies([{"name": django_settings.SESSION_COOKIE_NAME, "value": cookie, "url": site}])
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: _is_error(message) and errors.append(message.text))
        page.goto(path)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []


def _is_error(message: Any) -> bool:
    """Return whether a console message is an error that no test provokes."""
    expected = ("status of 4", "status of 5", "net::ERR_FAILED")
    provoked = "Failed to load resource" in message.text and any(words in message.text for words in expected)
    return message.type in ("error", "warning") and not provoked


def send(user: User | None, path: str = "/checkout/", times: int = 1, address: str = "203.0.113.9") -> list[int]:
    """Send requests as a user, and return the status of each."""
    browser = Client(REMOTE_ADDR=address)
    if user is not None:
        browser.force_login(user)
    statuses = [browser.get(path).status_code for _ in range(times)]
    background.run()
    return statuses


def crowd(number: int = 200) -> list[User]:
    """Create many users with usage, some of them over their limits."""
    chance = random.Random(4)
    first = ["alice", "bruno", "chloe", "dmitri", "elif", "farah", "goran", "hana", "ines", "jonas"]
    last = ["almeida", "brandt", "costa", "dubois", "eriksen", "fischer", "garcia", "haddad", "ito", "jansen"]
    names = [f"{first[i % 10]}.{last[i // 10 % 10]}{i // 100 or ''}" for i in range(number)]
    users = User.objects.bulk_create([User(username=name, email=f"{name}@example.com") for name in names])
    for i, user in enumerate(users):
        check(user.pk, "search", cost=chance.choice([1, 2, 4, 8, 15, 30, 55]))
        if i % 6 == 0:
            send(user, "/checkout/", chance.choice([1, 3, 4, 5, 6, 8]))
        if i % 9 == 0:
            send(user, "/search/", chance.choice([1, 2, 4, 6]))
        if i % 20 == 0:
            send(None, "/login/", chance.choice([2, 5, 7, 9]), address=f"198.51.100.{i}")
    for odd in ('<b>"bold"</b>', "a\n\x1b[31mred", "😀 emoji/slash", "x" * 8000):
        check(odd, "search", cost=5)
    background.run()
    return users


def past(policies: dict[str, tuple[int, float]]) -> None:
    """Write a day of decisions: per policy the most per minute, and the share that was refused."""
    chance = random.Random(7)
    now, site = int(time.time()) // 60 * 60, recorder.Tally()
    for name, (most, share) in policies.items():
        kind = OVER if name == "trial" else REFUSED
        tally = recorder.Tally()
        for minute in range(1, 1440):
            at = now - minute * 60
            level = most * (0.55 + 0.45 * math.cos(minute / 1440 * 2 * math.pi)) * chance.uniform(0.6, 1)
            spike = 6 if minute in range(22, 27) else 1
            refused = round(level * share * spike * chance.random())
            for each in (tally, site):
                each.counts[at // 60, ALLOWED] += round(level)
                each.counts[at // 60, kind] += refused
        backend.execute(backend.topology(), tally.call(name))
    backend.execute(backend.topology(), site.call(schema.SITE))
