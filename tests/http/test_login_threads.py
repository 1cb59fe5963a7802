"""`login_failed` in threads of the site's own: `authenticate()` is given the request, and the signal carries it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.contrib.auth import authenticate
from django.contrib.auth.models import User
from django.http import HttpResponse
from rest_framework.decorators import api_view, authentication_classes, permission_classes
from rlaas_django import login_failed, rate_limit

from tests.support.http import OURS, Site, both_ways

LIMIT = 2
pytestmark = pytest.mark.usefixtures("_one_backend")


class OneBackend:
    """Knows one password, and no database."""

    def authenticate(self, request, username=None, password=None):
        if password == "right":
            return User(username=username)
        return None


@pytest.fixture
def _one_backend(settings):
    settings.AUTHENTICATION_BACKENDS = ["tests.http.test_login_threads.OneBackend"]


def attempt(request) -> None:
    authenticate(request, username="ann", password=request.POST["password"])


def in_a_thread(request):
    thread = threading.Thread(target=attempt, args=[request])
    thread.start()
    thread.join()
    return HttpResponse("ok")


def in_a_pool(request):
    with ThreadPoolExecutor(1) as executor:
        executor.submit(attempt, request).result()
    return HttpResponse("ok")


async def in_the_loop_s_executor(request):
    await asyncio.get_running_loop().run_in_executor(None, attempt, request)
    return HttpResponse("ok")


def statuses(site, *passwords):
    return [site.post(data={"password": password}).status_code for password in passwords]


def limit(**options):
    return rate_limit(f"{LIMIT}/h", key="ip", group="g", charge_when=login_failed, **options)


@both_ways
@pytest.mark.parametrize("view", [in_a_thread, in_a_pool])
def test_a_failure_in_another_thread_is_charged(site, view):
    site.serve(limit()(site.view(view)))
    assert statuses(site, *["wrong"] * 4) == [200] * LIMIT + [429] * 2


def test_a_failure_in_the_executor_of_the_loop_is_charged(settings):
    site = Site("asgi, async def", settings)
    site.serve(limit()(in_the_loop_s_executor))
    assert statuses(site, *["wrong"] * 4) == [200] * LIMIT + [429] * 2


@both_ways
def test_a_success_in_another_thread_is_not_charged(site):
    site.serve(limit()(site.view(in_a_thread)))
    assert statuses(site, *["right"] * 4) == [200] * 4


@both_ways
def test_a_rule_s_limit_is_charged_for_a_failure_in_another_thread(site, configure):
    configure(
        POLICIES={"rule": {"rate": f"{LIMIT}/h", "key": "ip"}},
        MIDDLEWARE=[{"policies": ["rule"], "charge_when": login_failed}],
    )
    site.serve(site.view(in_a_thread), middleware=[OURS])
    assert statuses(site, *["wrong"] * 4) == [200] * LIMIT + [429] * 2


@both_ways
def test_a_failure_with_a_request_of_the_site_s_own_making_is_charged(site, rf):
    """Such a request is under no limit, so the one that is being served is charged, as without any."""

    def view(request):
        attempt(rf.post("/", request.POST))
        return HttpResponse("ok")

    site.serve(limit()(site.view(view)))
    assert statuses(site, *["wrong"] * 4) == [200] * LIMIT + [429] * 2


def test_rest_framework_s_request_stands_for_the_one_under_it(settings):
    @api_view(["POST"])
    @authentication_classes([])
    @permission_classes([])
    def view(request):
        return in_a_thread(request)

    site = Site("wsgi, def", settings)
    site.serve(limit()(view))
    assert statuses(site, *["wrong"] * 4) == [200] * LIMIT + [429] * 2


@both_ways
def test_two_failures_of_one_request_are_one_charge(site):
    def view(request):
        in_a_thread(request)
        return in_a_pool(request)

    site.serve(limit()(site.view(view)))
    assert statuses(site, *["wrong"] * 4) == [200] * LIMIT + [429] * 2
