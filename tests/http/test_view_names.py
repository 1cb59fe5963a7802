"""The names of a view's own policies: two that differ never share a counter."""

from __future__ import annotations

import re

import pytest
from django.http import HttpResponse
from django.test import RequestFactory
from hypothesis import assume, given
from hypothesis import strategies as st
from rlaas_django import rate_limit
from rlaas_django.core.policy import LABEL, NAME
from rlaas_django.http.view_names import policy_name

texts = st.text(max_size=130) | st.text("ab -/.ж", max_size=8)
endings = st.sampled_from(["", "-1s", "-60s", "-2", "-5.60s-GET", "-5.60s-DELETE-PATCH-POST-PUT"])
plain = st.from_regex(r"[A-Za-z0-9_.-]{1,100}", fullmatch=True)


@given(plain, endings)
def test_a_plain_name_is_its_own_policy_s(name, ending):
    assume(len(name + ending) <= 100)
    assert policy_name(name, ending) == name + ending


@given(st.tuples(texts, endings), st.tuples(texts, endings))
def test_different_names_give_different_policies(one, other):
    assume(one[0] + one[1] != other[0] + other[1])
    assert policy_name(*one) != policy_name(*other)


@given(texts, endings)
def test_a_name_is_one_that_a_policy_and_a_label_may_have(name, ending):
    assert NAME.fullmatch(policy_name(name, ending))
    assert LABEL.fullmatch(policy_name(name, ending))


@given(texts, endings)
def test_no_other_name_is_made_into_a_made_one(name, ending):
    made = policy_name(name, ending)
    assume(made != name + ending)
    assert policy_name(made) != made


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("поиск", ""), ("загрузка", "")),
        (("a b", ""), ("a/b", "")),
        (("a b", "-60s"), ("a b", "-3600s")),
        (("a b", "-60s"), ("a b-60s", "")),
        (("a b", ""), ("a-b", "")),
        (("x" * 200, ""), ("x" * 201, "")),
        (("x" * 200, "-60s"), ("x" * 200, "-61s")),
        (("x" * 90, "-1.60s-" + "Y" * 90), ("x" * 90, "-2.60s-" + "Y" * 90)),
        (("make.<locals>.view", ""), ("make.-locals-.view", "")),
    ],
)
def test_names_that_look_alike_are_told_apart(one, other):
    assert policy_name(*one) != policy_name(*other)


def test_a_made_name_is_readable_with_a_digest_behind_it():
    assert re.fullmatch("price-list-60s-blake2-[0-9a-f]{32}", policy_name("price list", "-60s"))
    assert re.fullmatch("blake2-[0-9a-f]{32}", policy_name("поиск"))
    assert re.fullmatch(r"[x.]*\.Cart\.post-blake2-[0-9a-f]{32}", policy_name("x." * 99 + "Cart.post"))


def statuses(*names):
    """Return the statuses of one request to a view of each group."""
    views = [rate_limit("1/m", key="ip", group=name)(lambda request: HttpResponse()) for name in names]
    return [view(RequestFactory().get("/")).status_code for view in views]


def test_groups_that_differ_only_outside_ascii_do_not_share_a_counter(clock):
    assert statuses("поиск", "загрузка", "a b", "a/b") == [200] * 4
    assert statuses("поиск", "загрузка", "a b", "a/b") == [429] * 4


def test_views_that_differ_only_outside_ascii_do_not_share_a_counter(clock):
    def поиск(request):
        return HttpResponse()

    def загрузка(request):
        return HttpResponse()

    views = [rate_limit("1/m", key="ip")(view) for view in (поиск, загрузка)]
    responses = [view(RequestFactory().get("/")) for view in views]
    assert [response.status_code for response in responses] == [200, 200]
    labels = {response.headers["RateLimit"].split('"')[1] for response in responses}
    assert len(labels) == 2
