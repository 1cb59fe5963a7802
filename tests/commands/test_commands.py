"""manage.py rlaas: what all subcommands have in common."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest
import redis
from django.core.management import CommandError, call_command
from rlaas_django import check, login_failed, rate_limit

from tests.support.commands import rlaas
from tests.support.internals import (
    ALGORITHMS,
    SCRIPTS,
    SUBCOMMANDS,
    TOKEN_BUCKET,
    CommandOutput,
    RlaasCommand,
    Styled,
    parse_policy,
)

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_says_what_a_subcommand_does_with_an_example(name, capsys):
    result = rlaas(name, "--help")
    shown = capsys.readouterr().out
    assert result.code == 0
    assert SUBCOMMANDS[name].help.split()[0] in shown
    assert f"Example:\n  manage.py rlaas {name}" in shown
    assert "--json" in shown


def test_a_typo_in_a_subcommand_names_the_nearest():
    result = rlaas("restor")
    assert result.code == 2
    assert "There is no subcommand 'restor'; did you mean 'restore'?" in result.err


def test_a_typo_in_an_option_names_the_nearest(capsys):
    result = rlaas("restore", "--jsn")
    assert result.code == 2
    assert "there is no argument '--jsn'; did you mean '--json'?" in capsys.readouterr().err


def test_a_typo_is_an_error_for_call_command():
    with pytest.raises(CommandError, match="did you mean '--json'"):
        call_command("rlaas", "restore", "--jsn")


def test_django_s_own_options_stand_before_or_after_the_subcommand():
    assert rlaas("restore", "--no-color", "--verbosity", "2").code == 0
    assert rlaas("--no-color", "restore").code == 0


def test_restore_prints_what_it_restored():
    assert rlaas("restore").out == "Restored the overrides of 0 identities.\n"
    assert rlaas("restore", "--json").json == {"identities": 0}


@pytest.mark.usefixtures("redis_unavailable")
def test_an_unavailable_redis_is_an_error():
    result = rlaas("restore")
    assert result.code == 1
    assert "Redis is unavailable" in result.err


def test_wrong_settings_are_an_error(settings):
    settings.RATE_LIMITER = {"MAX_REQUEST": 5}
    result = rlaas("restore")
    assert result.code == 1
    assert "did you mean 'MAX_REQUESTS'?" in result.err


EVERY = [
    ("status",),
    ("policies",),
    ("show", "alice"),
    ("top",),
    ("watch", "--times", "1"),
    ("refusals", "alice", "--since", "1h"),
    ("block", "alice", "--anyway", "--for", "1h", "--reason", "spam"),
    ("end", "alice"),
    ("exempt", "203.0.113.0/24", "--for", "1h", "--reason", "office"),
    ("limit", "alice", "--anyway", "--factor", "2", "--for", "1h", "--reason", "busy"),
    ("overrides",),
    ("reset", "alice"),
    ("history",),
    ("scripts", "--load"),
    ("doctor",),
    ("memory", "--sample", "100"),
    ("replay", "/dev/null", "--policy", "5/m by ip"),
    ("restore",),
]


@pytest.mark.usefixtures("no_views")
def test_no_subcommand_uses_keys(own):
    check("alice")
    for arguments in EVERY:
        assert rlaas(*arguments).code == (1 if arguments[0] == "replay" else 0), arguments
    assert {arguments[0] for arguments in EVERY} | {"token"} == set(SUBCOMMANDS)
    used = redis.Redis.from_url(own.url).info("commandstats")
    assert "cmdstat_scan" in used
    assert "cmdstat_keys" not in used


class TestPolicies:
    @pytest.fixture(autouse=True)
    def _views(self, no_views):
        """List the test's own views only."""

    def test_rules_views_and_settings_are_listed_with_their_limits(self, configure):
        configure(
            POLICIES={
                "login": {"rate": "5/m", "key": "ip"},
                "search": {"rate": "30/10s", "algo": TOKEN_BUCKET, "burst": 60, "shadow": True},
                "own": {"rate": "5/m", "key": "tests.support.commands.rlaas"},
                "unused": {"rate": "1/h", "on_failure": "closed"},
            },
            MIDDLEWARE=[
                {"path": "/healthz", "exempt": True},
                {"path": "/api/", "methods": ["GET"], "policies": ["search"]},
                {"regex": "^/v[12]/", "policies": ["own"]},
            ],
        )

        @rate_limit("login")
        @rate_limit("9/m", key=rlaas, group="by-function")
        @rate_limit(rate=lambda request: "5/m", key="global", group="dynamic")
        def view(request): ...

        found = rlaas("policies", "--json").json
        rows = [tuple(row.values()) for row in found]
        name = f"{view.__module__}.{view.__qualname__}"
        assert ("rule /healthz", "exempt", "", "") in rows
        search = "30/10s by user_or_ip, token bucket, burst 60"
        assert ("rule /api/", "search", search, "method GET,HEAD, shadow") in rows
        assert ("rule ^/v[12]/", "own", "5/m by tests.support.commands.rlaas, sliding window", "") in rows
        assert (name, "login", "5/m by ip, sliding window", "") in rows
        assert (name, "by-function", "9/m by rlaas, sliding window", "") in rows
        assert (name, "dynamic", "a function by global, sliding window", "") in rows
        assert ("settings", "unused", "1/h by user_or_ip, sliding window", "on failure closed") in rows
        assert ("settings", "default", "5/m by user_or_ip, sliding window", "") in rows
        shown = rlaas("policies").out.splitlines()
        assert shown[0].split() == ["where", "policy", "limit", "options"]
        assert len(shown) == len(rows) + 1

    def test_method_and_charge_when_of_rules_and_views_are_listed(self, configure):
        configure(
            POLICIES={"login": {"rate": "5/m", "key": "ip"}},
            MIDDLEWARE=[
                {
                    "path": "/login/",
                    "method": "POST",
                    "charge_when": "rlaas_django.login_failed",
                    "policies": ["login"],
                }
            ],
        )

        @rate_limit("9/m", group="form", method=["POST", "PUT"], charge_when=login_failed, block=False)
        def view(request): ...

        options = {row["policy"]: row["options"] for row in rlaas("policies", "--json").json}
        assert options["login"] == "method POST, charge when rlaas_django.login_failed"
        assert options["form"] == "method POST,PUT, charge when login_failed, block=False"
        assert "charge when login_failed" in rlaas("policies", "form").out

    @pytest.mark.parametrize("algo", ALGORITHMS)
    @pytest.mark.parametrize("key", ["user", "ip", "user_or_ip", "token", "global", "header:X-Api-Key", "post:name"])
    def test_a_limit_is_written_as_replay_takes_it(self, configure, algo, key):
        burst = {"burst": 60} if algo == TOKEN_BUCKET else {}
        configure(POLICIES={"search": {"rate": "30/10s", "key": key, "algo": algo, **burst}})
        (row,) = rlaas("policies", "search", "--json").json
        policy = parse_policy(row["limit"], {})
        assert (str(policy.rate), policy.key, policy.algo, policy.burst) == ("30/10s", key, algo, burst.get("burst"))

    def test_a_throttle_that_no_view_has_is_not_listed(self):
        script = """
import django
django.setup()
import rlaas_django.integrations.drf
from django.core.management import call_command
call_command("rlaas", "policies", "--json")
"""
        environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert "PolicyThrottle" not in {row["where"] for row in json.loads(done.stdout)}

    def test_without_rules_the_middleware_applies_the_default_everywhere(self, settings):
        settings.MIDDLEWARE = ["rlaas_django.middleware.RateLimitMiddleware"]
        assert rlaas("policies", "default", "--json").json[0]["where"] == "rule /"

    def test_one_policy_is_listed_by_its_name(self, configure):
        configure(POLICIES={"login": {"rate": "5/m"}})
        assert [row["policy"] for row in rlaas("policies", "login", "--json").json] == ["login"]
        result = rlaas("policies", "logn")
        assert result.code == 1
        assert "There is no policy 'logn'; did you mean 'login'?" in result.err

    def test_they_are_listed_while_redis_is_unavailable(self, redis_unavailable):
        assert rlaas("policies").code == 0


class TestScripts:
    def test_they_are_listed_with_version_and_hash(self, client):
        client.script_flush()
        found = rlaas("scripts", "--json").json
        assert [(row["name"], row["version"], row["sha1"]) for row in found] == [
            (script.name, script.version, script.sha) for script in SCRIPTS
        ]
        assert not any(loaded for row in found for loaded in row["loaded"].values())
        assert "not loaded" in rlaas("scripts").out

    def test_they_can_be_loaded(self, client):
        client.script_flush()
        assert "not loaded" not in rlaas("scripts", "--load").out
        assert all(client.script_exists(*(script.sha for script in SCRIPTS)))

    def test_an_unavailable_redis_is_an_error(self, redis_unavailable):
        assert rlaas("scripts").code == 1


class TestOutput:
    def printed(self, *, color=False, encoding="utf-8") -> tuple[CommandOutput, io.TextIOWrapper]:
        raw = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
        command = RlaasCommand(stdout=raw, stderr=raw, no_color=not color, force_color=color)
        return CommandOutput(command, as_json=False), raw

    def text(self, raw) -> str:
        return raw.buffer.getvalue().decode()

    def test_control_characters_are_escaped_in_lines_tables_and_json(self):
        output, raw = self.printed()
        dangerous = "\x1b[31mred\x07\r\n\x9b2J\u202e\x7f"
        output.line("name: ", dangerous)
        output.table(("who", ">number"), [(dangerous, 1)])
        output.json({"who": dangerous})
        shown = self.text(raw)
        assert not set(shown) & set("\x1b\x07\r\x9b\u202e\x7f")
        assert "name: \\x1b[31mred\\x07\\r\\n\\x9b2J\\u202e\\x7f\n" in shown
        assert json.loads(shown[shown.index("{") :]) == {"who": dangerous}

    def test_columns_are_aligned_whatever_is_styled(self):
        output, raw = self.printed(color=True)
        output.table(("name", ">used", "state"), [("a", 5, Styled("ok", "SUCCESS")), ("long name", 1234, "")])
        shown = self.text(raw)
        assert "\x1b[" in shown
        plain, raw = self.printed()
        plain.table(("name", ">used", "state"), [("a", 5, Styled("ok", "SUCCESS")), ("long name", 1234, "")])
        assert self.text(raw) == "name       used  state\na             5  ok\nlong name  1234\n"

    def test_what_the_terminal_cannot_show_is_escaped(self):
        output, raw = self.printed(encoding="ascii")
        output.line("Zoë")
        assert self.text(raw) == "Zo\\xeb\n"
