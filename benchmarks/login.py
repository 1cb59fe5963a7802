"""A login with `rlaas_django.auth.ModelBackend`, against one with Django's own."""

from __future__ import annotations

import time
from collections.abc import Callable

from django.contrib.auth import authenticate
from django.contrib.auth.hashers import make_password
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import connection
from django.test import RequestFactory, override_settings
from django.test.utils import CaptureQueriesContext

from . import server
from .measure import Effort, Spread, ratios, rounds
from .report import Cell, Findings, Table

DJANGO_S = "django.contrib.auth.backends.ModelBackend"
OURS = "rlaas_django.auth.ModelBackend"
# The default takes a third of a second, and hides all else; the other one shows it.
HASHERS = {"PBKDF2, the default": "PBKDF2PasswordHasher", "MD5, as in tests": "MD5PasswordHasher"}
WIDE = {"LOGIN": {"name_and_address": ["1000000/d"], "name": ["1000000/d"], "address": ["1000000/d"]}}


def login(effort: Effort) -> Findings:
    """Queries, round trips and time of `authenticate()`, with limits and without"""
    call_command("migrate", verbosity=0)
    columns = ("", "password hasher", "queries", "without", "round trips", "µs more", "÷ without")
    rows = [
        _row(case, name, effort(15, 3))
        for name in HASHERS
        for case in ("a wrong password", "a right one", "the same right one again")
    ]
    return Findings([Table("A login", columns, rows)])


def _row(case: str, hasher: str, number: int) -> list[Cell]:
    with override_settings(
        PASSWORD_HASHERS=[f"django.contrib.auth.hashers.{HASHERS[hasher]}"], RATE_LIMITER={"TIMEOUT": 5, **WIDE}
    ):
        User.objects.all().delete()
        password = make_password("right")
        names = [f"{hasher}, {n}" for n in range(_users(case, number))]
        users = iter([User.objects.create(username=name, password=password) for name in names])
        latest = next(users)

        def attempt() -> None:
            nonlocal latest
            if case == "a right one":
                latest = next(users)
            password = "wrong" if case == "a wrong password" else "right"
            request = RequestFactory(REMOTE_ADDR="198.51.100.7").post("/login/")
            authenticate(request, username=latest.username, password=password)

        limited, plain = [], []
        for _ in rounds(number, f"login: {case}, {hasher}"):
            plain.append(_time(DJANGO_S, attempt))
            limited.append(_time(OURS, attempt))
        more = Spread.of((a - b) * 1e6 for a, b in zip(limited, plain, strict=True))
        queries = [_queries(backend, attempt) for backend in (OURS, DJANGO_S)]
        # Not beside a slow password hasher: meanwhile the background thread writes statistics.
        round_trips = _round_trips(attempt) if hasher.startswith("MD5") else ""
        return [case, hasher, *queries, round_trips, more, ratios(limited, plain)]


def _users(case: str, number: int) -> int:
    """How many users log in: each once, where none must have logged in before."""
    return 2 * number + 8 if case == "a right one" else 1


def _time(backend: str, attempt: Callable[[], None]) -> float:
    with override_settings(AUTHENTICATION_BACKENDS=[backend]):
        began = time.perf_counter()
        attempt()
        return time.perf_counter() - began


def _queries(backend: str, attempt: Callable[[], None]) -> str:
    with override_settings(AUTHENTICATION_BACKENDS=[backend]), CaptureQueriesContext(connection) as queries:
        attempt()
    return str(len(queries))


def _round_trips(attempt: Callable[[], None]) -> str:
    client = server.client()
    with override_settings(AUTHENTICATION_BACKENDS=[OURS]):
        attempt()
        before = client.info("stats")["total_reads_processed"]
        attempt()
        after = client.info("stats")["total_reads_processed"]
    return str(after - before - 1)  # less the second INFO
