"""What is left of a limit: the template tag, and the view that a page can poll."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from django.template import Context, Template, engines
from django.test import AsyncClient, Client, RequestFactory
from django.urls import path
from rlaas_django import check, peek, rate_limit

from tests.support.observation import commands_sent

PAGE = (Path(__file__).parents[2] / "docs" / "templates.md").read_text()
SHOWN = '{% load rate_limits %}{% rate_limit_status "search" as quota %}{{ quota.remaining }}/{{ quota.limit }}'
ADDRESS = "127.0.0.1"


@pytest.fixture(autouse=True)
def _policies(configure, clock):
    configure(POLICIES={"search": {"rate": "3/m", "key": "ip"}, "site": {"rate": "9/m", "key": "global"}})


def render(text: str = SHOWN, request=None) -> str:
    return engines["django"].from_string(text).render({}, request or RequestFactory().get("/"))


def test_the_tag_shows_what_is_left_and_charges_nothing(client):
    assert render() == "3/3"
    assert not client.keys("rlaas:rate_limit:*")
    check(ADDRESS, "search")
    assert [render(), render()] == ["2/3", "2/3"]


def test_the_tag_shows_what_was_decided_about_the_request_without_asking_again(own):
    @rate_limit("search")
    def view(request):
        with commands_sent(own.url) as names:
            text = render(request=request)
        return HttpResponse(f"{text} {names}")

    assert view(RequestFactory().get("/")).content == b"2/3 []"


def test_of_several_policies_the_strictest_is_shown():
    check(ADDRESS, "search")
    several = SHOWN.replace('"search"', '"site" "search"')
    assert render(several) == "2/3"
    assert render(SHOWN.replace('"search"', "")) == "5/5"  # the default policy


def test_a_rate_of_a_function_is_that_of_the_request(configure):
    rate = {"alice": "7/m", "bob": None}
    configure(POLICIES={"search": {"rate": lambda request: rate[request.GET["u"]], "key": "ip"}})
    assert render(request=RequestFactory().get("/?u=alice")) == "7/7"
    assert render(SHOWN + "{{ quota.allowed }}", request=RequestFactory().get("/?u=bob")).endswith("True")


def test_while_rate_limiting_is_off_or_redis_unavailable_everything_is_left(configure, redis_unavailable):
    assert render(SHOWN + " {{ quota.degraded }}") == "3/3 True"
    configure(ENABLED=False)
    assert render(SHOWN + " {{ quota.degraded }}") == "3/3 False"


def test_mistakes_are_told():
    with pytest.raises(ImproperlyConfigured, match=r"context_processors\.request"):
        Template(SHOWN).render(Context())
    with pytest.raises(ImproperlyConfigured, match="no policy 'serach'; did you mean 'search'"):
        render(SHOWN.replace("search", "serach"))


@pytest.fixture
def site(settings, tmp_path):
    """The site of the documentation."""
    names: dict = {}
    exec(re.search(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[1], names)
    shown, partial, page = re.findall(r"^```html\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "quota.html").write_text(partial)
    (tmp_path / "page.html").write_text(page)
    (tmp_path / "shown.html").write_text(shown)
    settings.TEMPLATES = [{**settings.TEMPLATES[0], "DIRS": [tmp_path]}]

    def show(name):
        def view(request):
            return HttpResponse(engines["django"].get_template(name).render({}, request))

        return view

    patterns = [*names["urlpatterns"], path("page/", show("page.html")), path("shown/", show("shown.html"))]
    settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": patterns})
    return Client()


def test_a_page_can_poll_json(site):
    check(ADDRESS, "search")
    response = site.get("/quota.json")
    assert response.json() == {"allowed": True, "limit": 3, "remaining": 2, "retry_after": 0.0, "reset_after": 60.0}
    assert response["RateLimit"] == '"search";r=2;t=60'
    assert "no-store" in response["Cache-Control"]
    check(ADDRESS, "search", cost=2)
    assert site.get("/quota.json").json()["retry_after"] == 60.0
    assert peek(ADDRESS, "search").current_count == 3
    assert site.post("/quota.json").status_code == 405


@pytest.mark.parametrize("unlimited", [{"ENABLED": False}, {"POLICIES": {"search": {"rate": lambda request: None}}}])
def test_where_nothing_limits_the_response_has_no_headers(site, configure, unlimited):
    configure(**unlimited)
    response = site.get("/quota.json")
    assert response.json()["allowed"]
    assert [name for name in response.headers if "ratelimit" in name.lower()] == []


async def test_a_page_can_poll_under_asgi(site):
    assert (await AsyncClient().get("/quota.json")).json()["remaining"] == 3


def test_the_partial_of_the_page_polls_itself(site):
    check(ADDRESS, "search")
    for url in ("/page/", "/quota/"):
        text = " ".join(site.get(url).content.decode().split())
        assert 'hx-get="/quota/" hx-trigger="every 10s"' in text
        assert "2 of 3 searches left" in text
    check(ADDRESS, "search", cost=2)
    text = " ".join(site.get("/shown/").content.decode().split())
    assert "<p>0 of 3 searches left.</p> <p>Try again in 60 seconds.</p>" in text
