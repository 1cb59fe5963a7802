"""Attacks that once succeeded, as their authors would run them: over HTTP, with real frameworks and servers.

Clients that hang up are in tests/http/test_end_to_end.py, which runs uvicorn.
"""

from __future__ import annotations

import asyncio
import base64
from datetime import timedelta

import pytest
import redis
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.test import AsyncRequestFactory
from django.urls import reverse
from django.utils import timezone
from rest_framework.authentication import BaseAuthentication, BasicAuthentication, get_authorization_header
from rest_framework.decorators import api_view, authentication_classes, permission_classes
from rest_framework.permissions import IsAuthenticated
from rest_framework.response import Response
from rlaas_django import check, rate_limit
from rlaas_django.models import Override
from rlaas_django.operators import actions
from rlaas_django.runtime import background

from tests.support.http import AUTHENTICATION
from tests.support.internals import TOKEN_BUCKET, set_override

LIMIT = 5


# Spelling of credentials


class TokenAuthentication(BaseAuthentication):
    """As that of Django REST framework, with one token."""

    def authenticate(self, request):
        words = get_authorization_header(request).split()
        return (User(pk=1, username="ann"), None) if words == [b"Token", b"0123456789abcdef"] else None


class OnePassword(BasicAuthentication):
    def authenticate_credentials(self, userid, password, request=None):
        assert (userid, password) == ("ann", "s3cret")
        return User(pk=1, username="ann"), None


def protected(authentication):
    """A view that its framework authenticates below the limit."""

    @api_view(["GET"])
    @authentication_classes([authentication])
    @permission_classes([IsAuthenticated])
    def view(request):
        return Response("secret")

    return rate_limit(f"{LIMIT}/h", key="token", group="api")(view)


BASIC = base64.b64encode(b"ann:s3cret").decode()


@pytest.mark.parametrize(
    ("authentication", "spellings"),
    [
        pytest.param(
            TokenAuthentication,
            [f"Token{space * n}0123456789abcdef" for n in range(1, 26) for space in (" ", "\t")],
            id="white space",
        ),
        pytest.param(
            OnePassword, [f"Basic {BASIC[:n]}{mark}{BASIC[n:]}" for n in range(10) for mark in "!*-_~"], id="base64"
        ),
        pytest.param(OnePassword, [f"{word} {BASIC}" for word in ("Basic", "basic", "BASIC", "bAsIc")] * 12, id="case"),
    ],
)
@pytest.mark.parametrize("site", ["wsgi, def", "asgi, def"], indirect=True)
def test_no_spelling_of_a_credential_gives_a_further_counter(site, authentication, spellings):
    """50 of 50 passed a limit of 5: the framework accepts what we took for another credential."""
    site.serve(protected(authentication))
    statuses = [site.get(headers={"Authorization": spelling}).status_code for spelling in spellings]
    admitted = statuses.count(200)
    # What is not written as a credential counts by address: two counters, however many spellings there are.
    assert LIMIT <= admitted <= 2 * LIMIT
    assert set(statuses) <= {200, 401, 403, 429}
    assert statuses.count(429) >= len(spellings) - 2 * LIMIT - statuses.count(401) - statuses.count(403)


# Slow refunds


def is_wrong(response):
    return response.status_code == 401


async def test_refunds_that_come_late_buy_no_guesses(clock):
    """55 passed at once where 5 are allowed: each refund gave back what time had refilled already."""
    begun, ends = [asyncio.Event() for _ in range(50)], [asyncio.Event() for _ in range(50)]

    @rate_limit("10/s", key="ip", group="login", algo=TOKEN_BUCKET, burst=LIMIT, charge_when=is_wrong)
    async def login(request):
        if "own" in request.GET:
            begun[int(request.GET["own"])].set()
            await ends[int(request.GET["own"])].wait()
            return HttpResponse("welcome")
        return HttpResponse(status=401)

    async def guess() -> int:
        return (await login(AsyncRequestFactory().get("/"))).status_code

    slow = []
    for n in range(50):  # log-ins to an account of the attacker's own, which are refunded when they end
        slow.append(asyncio.create_task(login(AsyncRequestFactory().get("/", {"own": n}))))
        await begun[n].wait()
        clock.tick(100)  # the bucket is full again
    guesses = [await guess() for _ in range(LIMIT + 1)]
    for task, end in zip(slow, ends, strict=True):
        end.set()
        assert (await task).status_code == 200
        guesses.append(await guess())
    assert guesses == [401] * LIMIT + [429] * 51


# Blocks that get lost


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("policy", ["allkeys-random", "allkeys-lru", "volatile-ttl"])
def test_blocks_survive_a_redis_that_evicts(start, use, monkeypatch, policy):
    """9 or 10 of 20 were lost, and nothing restored them, because the marker was still there."""
    server = start("--maxmemory", "8mb", "--maxmemory-policy", policy, "--maxmemory-samples", "10")
    use(server.url)
    client = redis.Redis.from_url(server.url)
    until = timezone.now() + timedelta(hours=1)
    for n in range(20):
        set_override(f"spammer-{n}", "", "block", until, by="operator", reason="spam")
    for n in range(20_000):  # visitors of the site, or an attacker with many addresses
        client.set(f"cache:{n}", "x" * 1_000, ex=7_200)
        if n % 500 == 0 and client.exists(*[f"rlaas:override:spammer-{m}" for m in range(20)]) <= 12:
            break
    lost = 20 - client.exists(*[f"rlaas:override:spammer-{n}" for n in range(20)])
    assert lost
    for n in range(20_000):
        client.unlink(f"cache:{n}")
    monkeypatch.setattr(actions.state, "next_comparison", 0.0)
    background.run(20)
    assert not any(check(f"spammer-{n}").allowed for n in range(20))


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("action", ["block", "exempt"])
def test_an_action_that_is_rolled_back_leaves_no_override(client, settings, admin_client, monkeypatch, action):
    """An override stayed in Redis without a record, so nobody could see or end it."""
    settings.ROOT_URLCONF = "tests.urls"
    settings.MIDDLEWARE = [*AUTHENTICATION, "django.contrib.messages.middleware.MessageMiddleware"]

    def fail(*args, **kwargs):
        raise RuntimeError("the log is full")

    monkeypatch.setattr(LogEntry, "save", fail)
    data = {"identity": "alice", "action": action, "policy": "", "hours": "1", "reason": "spam", "confirmed": "on"}
    with pytest.raises(RuntimeError, match="the log is full"):
        admin_client.post(reverse("admin:rlaas_django_ratelimit_act"), data)
    assert not Override.objects.exists()
    assert not client.exists("rlaas:override:alice")
    assert [check("alice").allowed for _ in range(6)] == [True] * 5 + [False]
