"""manage.py rlaas token: a token that is printed once, and an entry for the settings that works."""

from __future__ import annotations

import ast
import re

from rlaas_django.testing import reset

from tests.support.commands import rlaas
from tests.support.internals import conf
from tests.support.service import Service, digest, urlconf


def use(configure, settings, entry):
    settings.ROOT_URLCONF = urlconf()
    configure(SERVICE={"TOKENS": ast.literal_eval(f"{{{entry}}}")}, POLICIES={"search": {"rate": "5/m"}})
    reset()


def printed(result):
    assert result.code == 0, result.err
    return re.search(r"^  (rlaas_\S{43})$", result.out, re.MULTILINE)[1], result.out.strip().splitlines()[-1].strip()


def test_a_new_token_works_with_the_printed_entry(configure, settings):
    configure(POLICIES={"search": {"rate": "5/m"}})
    token, entry = printed(rlaas("token", "new", "billing", "--verbs", "check", "usage", "--policies", "search"))
    assert token not in entry
    use(configure, settings, entry)
    caller = Service("wsgi", token)
    assert caller.get("usage?userId=alice&policy=search").status_code == 200
    assert caller.get("usage?userId=alice").status_code == 404
    assert caller.get("info").status_code == 403


def test_tokens_are_never_the_same():
    assert len({printed(rlaas("token", "new", "billing"))[0] for _ in range(5)}) == 5


def test_a_known_caller_gets_a_further_token(configure, settings):
    known = {"digests": [digest("old")], "verbs": ["check", "info"], "policies": ["search"], "limit": "search"}
    configure(POLICIES={"search": {"rate": "5/m"}}, SERVICE={"TOKENS": {"billing": known}})
    token, entry = printed(rlaas("token", "new", "billing"))
    use(configure, settings, entry)
    assert [Service("wsgi", each).get("info").status_code for each in ("old", token)] == [200, 200]
    (caller,) = {caller for _, caller in conf.config().service.digests}
    assert (caller.policies, caller.limit) == (frozenset({"search"}), "search")


def test_json():
    made = rlaas("token", "new", "billing", "--json").json
    assert made["digest"] == digest(made["token"])
    assert made["entry"] == {"verbs": ["check"], "digests": [made["digest"]]}


def test_mistakes_are_named():
    for arguments, message in (
        (["--verbs", "chek"], "no verb 'chek'; did you mean 'check'?"),
        (["--policies", "serach"], "no policy 'serach'"),
        (["--limit", "none"], "no policy 'none'"),
    ):
        result = rlaas("token", "new", "billing", *arguments)
        assert result.code == 1
        assert message in result.err
    assert "write a name" in rlaas("token", "new", "a b").err
