"""manage.py rlaas for operators: status, show, top, watch, block, exempt, limit, end, reset, history."""

from __future__ import annotations

import getpass
import json
import signal
import subprocess
import sys
from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.utils import timezone
from rlaas_django import Policy, check, peek
from rlaas_django.models import OperatorAction, Override

from tests.support.commands import OnTerminal, process, rlaas
from tests.support.internals import flush_statistics

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def policies(configure):
    configure(POLICIES={"search": {"rate": "3/m"}, "by-address": {"rate": "3/m", "key": "ip"}})


def use_up(identity: str, policy: str = "search", times: int = 4) -> None:
    for _ in range(times):
        check(identity, policy)
    flush_statistics()


def test_a_block_refuses_until_it_ends():
    result = rlaas("block", "alice", "--anyway", "--reason", "spam", "--for", "2h")
    assert result.code == 0
    assert result.out.startswith("alice: blocked under every policy until ")
    assert not check("alice", "search").allowed
    assert rlaas("end", "alice").out.startswith("Ended: alice: blocked under every policy until ")
    assert check("alice", "search").allowed


def test_an_exemption_of_a_network_allows_all_of_its_addresses():
    use_up("203.0.113.9", "by-address")
    assert rlaas("exempt", "203.0.113.0/24", "--reason", "office", "--json").json["kind"] == "exempt"
    assert check("203.0.113.9", "by-address").allowed
    assert not rlaas("end", "203.0.113.0/24").code


def test_a_custom_limit_is_a_number_for_one_policy_or_a_factor():
    assert rlaas("limit", "alice", "--anyway", "--policy", "search", "--limit", "5", "--reason", "more").code == 0
    assert peek("alice", "search").limit == 5
    result = rlaas("limit", "alice", "--anyway", "--policy", "search", "--factor", "2", "--reason", "more")
    assert "Ended: alice: custom limit 5 under search until " in result.out
    assert peek("alice", "search").limit == 6


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("limit", "alice", "--anyway", "--limit", "5", "--reason", "r"), "factor"),
        (("limit", "alice", "--anyway", "--factor", "lots", "--reason", "r"), "“lots” value must be a decimal number."),
        (("limit", "alice", "--anyway", "--policy", "search", "--limit", "0", "--reason", "r"), "below 1"),
        (("block", "alice", "--anyway", "--policy", "serch", "--reason", "r"), "did you mean 'search'?"),
        (("block", "203.0.113.0/99", "--reason", "r"), "203.0.113.0/99"),
        (("block", " ", "--reason", "r"), "empty"),
        (("reset", "alice", "--policy", "serch"), "did you mean 'search'?"),
        (("top", "--policy", "serch"), "did you mean 'search'?"),
    ],
)
def test_a_mistake_is_an_error_in_words_and_changes_nothing(arguments, error):
    result = rlaas(*arguments)
    assert result.code == 1
    assert error in result.err
    assert not Override.objects.exists()
    assert not OperatorAction.objects.exists()


@pytest.mark.parametrize("text", ["soon", "0d", "99999w"])
def test_a_duration_that_is_none_is_an_error(text, capsys):
    assert rlaas("block", "alice", "--anyway", "--reason", "r", "--for", text).code == 2
    assert text in capsys.readouterr().err


def test_a_reset_starts_from_zero():
    use_up("alice")
    assert not check("alice", "search").allowed
    assert rlaas("reset", "alice", "--policy", "search").out == "reset: alice under search.\n"
    assert peek("alice", "search").current_count == 0
    use_up("alice")
    assert "search" in rlaas("reset", "alice", "--json").json["policies"]
    assert peek("alice", "search").current_count == 0


def test_a_reset_names_the_policies_that_had_usage_or_says_that_there_is_nothing_to_reset():
    user = User.objects.create_user("alice")
    use_up(str(user.pk))
    assert rlaas("reset", "alice").out == "reset: alice under search.\n"
    assert rlaas("reset", "alice").out.startswith("nothing to reset: alice has no usage under any policy.")
    assert "no usage under search." in rlaas("reset", "alice", "--policy", "search").out
    assert rlaas("reset", "alice", "--json").json == {"identity": str(user.pk), "policies": []}


@pytest.fixture
def never_called_view(tmp_path, monkeypatch, settings):
    """The name of a limited view of the URLs, which this process has not imported yet."""
    (tmp_path / "late_urls.py").write_text(LATE_URLS)
    monkeypatch.syspath_prepend(tmp_path)
    settings.ROOT_URLCONF = "late_urls"
    yield "late_urls.contact"
    sys.modules.pop("late_urls", None)


LATE_URLS = """
from django.urls import path
from rlaas_django import rate_limit

@rate_limit("5/m", key="ip")
def contact(request): ...

urlpatterns = [path("contact/", contact)]
"""


def test_a_view_whose_statistics_were_not_written_is_shown_and_reset(never_called_view):
    """The server that counted was stopped before it wrote its statistics."""
    counted = Policy(never_called_view, "5/m", key="ip")
    check("203.0.113.9", counted)
    assert "late_urls" not in sys.modules
    shown = rlaas("show", "203.0.113.9", "--json").json
    assert [(each["policy"], each["used"]) for each in shown["policies"]] == [(never_called_view, 1)]
    assert rlaas("reset", "203.0.113.9").out == f"reset: 203.0.113.9 under {never_called_view}.\n"
    assert peek("203.0.113.9", counted).current_count == 0


def test_a_command_takes_the_name_of_a_view_that_was_never_called(never_called_view):
    assert rlaas("block", "203.0.113.9", "--policy", never_called_view, "--reason", "spam").code == 0
    assert rlaas("top", "--policy", never_called_view).code == 0


def test_top_watch_and_status_print_an_identity_as_reset_takes_it(configure):
    configure(
        POLICIES={"login_name": {"rate": "3/m", "key": "post:username"}, "site": {"rate": "3/m", "key": "global"}}
    )
    use_up("admin", "login_name")
    use_up("anybody", "site")
    User.objects.create_user("admin")
    for command in (("top",), ("watch", "--times", "1"), ("status",)):
        printed = rlaas(*command).out
        assert "post=admin" in printed
        assert "global" in printed
    assert "nothing to reset" in rlaas("reset", "admin").out
    assert rlaas("reset", "post=admin").out == "reset: post=admin under login_name.\n"
    assert rlaas("reset", "global").out == "reset: global under site.\n"


def test_the_active_overrides_are_listed():
    assert rlaas("overrides").out == "No override is active.\n"
    assert rlaas("overrides", "--json").json == []
    user = User.objects.create_user("ann")
    rlaas("block", "203.0.113.0/24", "--for", "7d", "--reason", "scraping\x1b[31m", "--every-client")
    rlaas("limit", "ann", "--policy", "search", "--limit", "500", "--reason", "partner")
    rlaas("exempt", "bob", "--anyway", "--reason", "staff")
    rlaas("end", "bob")
    heading, first, second = rlaas("overrides").out.splitlines()
    assert heading.split() == ["Identity", "Override", "Policy", "Until", "Operator", "Reason"]
    assert first.startswith("ann             custom limit 500  search  ")
    assert first.endswith("partner")
    assert second.startswith("203.0.113.0/24  blocked           all     ")
    assert "\x1b" not in second
    listed = rlaas("overrides", "--json").json
    assert [(each["identity"], each["kind"], each["amount"]) for each in listed] == [
        (str(user.pk), "limit", "500"),
        ("net=203.0.113.0%2F24", "block", ""),
    ]
    (blocked,) = rlaas("overrides", "--kind", "block", "--json").json
    assert (blocked["everyClient"], blocked["policy"], blocked["by"]) == (True, "", getpass.getuser())
    assert blocked["until"] == Override.objects.get(kind="block").until.isoformat()


def test_a_username_names_the_user():
    user = User.objects.create_user("ann")
    use_up(str(user.pk))
    shown = rlaas("show", "ann", "--json").json
    assert shown["identity"] == str(user.pk)
    assert [(each["policy"], each["used"], each["limit"]) for each in shown["policies"]] == [("search", 3, 3)]
    assert rlaas("show", "ann").out.startswith(f"ann  user, {user.pk}\n")


def test_the_overrides_of_one_policy_are_ended_alone():
    for policy in ("search", "by-address"):
        rlaas("limit", "alice", "--anyway", "--policy", policy, "--limit", "5", "--reason", "more")
    (ended,) = rlaas("end", "alice", "--policy", "search", "--json").json
    assert ended["policy"] == "search"
    assert [each.policy for each in Override.objects.active()] == ["by-address"]


def test_status_says_what_was_decided_without_redis(use, own):
    use("unix:///nowhere.sock")
    check("alice", "search")
    use(own.url)
    flush_statistics()
    assert "1 were decided without Redis" in rlaas("status").out


def test_an_end_without_an_override_says_so():
    User.objects.create_user("alice")
    result = rlaas("end", "alice")
    assert (result.code, result.err) == (1, "CommandError: alice has no active override.\n")


def test_what_commands_do_is_in_the_history_with_the_user_of_the_operating_system():
    rlaas("block", "alice", "--anyway", "--reason", "spam")
    rlaas("end", "alice", "--reason", "sorry")
    use_up("bob")
    rlaas("reset", "bob")
    entries = rlaas("history", "--json").json
    done = [(each["by"], each["via"], each["action"], each["identity"], each["reason"]) for each in entries]
    user = getpass.getuser()
    assert done == [
        (user, "command", "reset", "bob", ""),
        (user, "command", "end", "alice", "sorry"),
        (user, "command", "block", "alice", "spam"),
    ]
    assert [each["action"] for each in rlaas("history", "alice", "--json").json] == ["end", "block"]
    assert "spam" in rlaas("history").out
    assert "No operator" in rlaas("history", "nobody").out


def test_show_has_usage_waits_and_overrides():
    use_up("alice")
    rlaas("limit", "alice", "--anyway", "--policy", "search", "--factor", "2", "--reason", "partner")
    printed = rlaas("show", "alice").out
    assert "search" in printed
    assert "limit times 2 under search until " in printed
    assert "partner" in printed
    assert "No current usage." in rlaas("show", "203.0.113.9").out


def test_top_lists_who_is_near_a_limit():
    use_up("alice")
    use_up("bob", times=1)
    found = rlaas("top", "--json").json
    assert [(each["identity"], each["policy"], each["used"]) for each in found] == [("alice", "search", 3)]
    assert "alice" in rlaas("top").out
    assert rlaas("top", "--policy", "by-address").out == "No identity is near a limit.\n"


def test_status_is_one_screen():
    use_up("alice")
    state = rlaas("status", "--json").json
    assert state["lastHour"]["refused"] == 1
    assert state["mostRefusedToday"] == {"alice": 1}
    printed = rlaas("status").out
    assert len(printed.splitlines()) < 24
    assert "4 requests, 1 refused (25.0 %)" in printed
    assert printed.endswith("alice  1 time today\n")
    use_up("alice", times=1)
    assert rlaas("status").out.endswith("alice  2 times today\n")


def test_watch_prints_a_line_per_look_when_it_is_piped():
    use_up("alice")
    lines = rlaas("watch", "--times", "2", "--interval", "0.1").out.splitlines()
    assert len(lines) == 2
    assert "alice 100 % of search" in lines[0]
    first = json.loads(rlaas("watch", "--times", "1", "--json").out)
    assert first["top"][0]["identity"] == "alice"


@pytest.mark.usefixtures("redis_unavailable")
def test_watch_goes_on_while_redis_is_unavailable():
    result = rlaas("watch", "--times", "2", "--interval", "0.1")
    assert result.code == 0
    assert result.out.count("Redis is unavailable") == 2


def test_a_reader_that_goes_away_ends_a_command_without_a_traceback(own):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with process("watch", "--interval", "0.1", redis_url=own.url, **pipes) as running:
        running.stdout.readline()
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait(30) == 1


def test_watch_on_a_terminal_redraws_until_ctrl_c(own):
    with OnTerminal("watch", "--interval", "0.1", redis_url=own.url) as terminal:
        terminal.read_until("No identity is near a limit.")
        assert "\x1b[H" in terminal.shown
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(30) == 130


def test_times_are_printed_without_time_zones_too(settings):
    settings.USE_TZ = False
    rlaas("block", "alice", "--anyway", "--reason", "spam")
    until = f"{Override.objects.get().until:%Y-%m-%d %H:%M}"
    assert until in rlaas("history").out
    assert until in rlaas("overrides").out
    assert until in rlaas("show", "alice").out
    assert rlaas("watch", "--times", "1").code == 0


def test_nothing_a_client_chose_reaches_the_terminal_unescaped():
    for _ in range(3):
        check("\x1b[31mred\n<b>", "search", cost=3)
    flush_statistics()
    for command in (("top",), ("status",), ("watch", "--times", "1"), ("show", "\x1b[31mred\n<b>")):
        assert "\x1b" not in rlaas(*command).out


@pytest.mark.usefixtures("redis_unavailable")
@pytest.mark.parametrize("arguments", [("status",), ("top",), ("show", "alice"), ("reset", "alice")])
def test_an_unavailable_redis_is_an_error_in_words(arguments):
    result = rlaas(*arguments)
    assert result.code == 1
    assert "Redis is unavailable" in result.err


WITHOUT_ADMIN = """
import sys, django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "rlaas_django"],
    CACHES={"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": sys.argv[1]}},
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
)
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
call_command("rlaas", "status")
call_command("rlaas", "show", "203.0.113.9")
"""


def test_the_commands_need_no_admin(own):
    done = subprocess.run([sys.executable, "-c", WITHOUT_ADMIN, own.url], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "No current usage." in done.stdout


# In the words that were typed


@pytest.fixture
def alice():
    return User.objects.create_user("alice", pk=4711)


@pytest.mark.parametrize(
    "arguments",
    [("block", "alice"), ("exempt", "127.0.0.0/8"), ("limit", "alice", "--policy", "search", "--factor", "2")],
)
def test_what_was_typed_is_printed_and_not_the_key(alice, arguments):
    name = arguments[1]
    printed = [rlaas(*arguments, "--reason", "r").out for _ in range(2)]  # the second ends the first
    shown = rlaas("show", name).out
    printed.append(shown.partition("\n")[2])  # its heading has both
    printed.append(rlaas("end", name).out)
    printed.append(rlaas("history").out)
    for text in printed:
        assert name in text
        assert "net=" not in text
        assert "%2F" not in text
        assert "4711:" not in text
        assert " 4711 " not in text


def test_a_reset_is_printed_in_the_words_that_were_typed(alice):
    use_up("4711")
    assert rlaas("reset", "alice").out == "reset: alice under search.\n"
    assert rlaas("reset", "alice").out.startswith("nothing to reset: alice has")
    assert rlaas("end", "alice").err == "CommandError: alice has no active override.\n"


def test_a_reset_of_nothing_is_not_in_the_history(alice):
    assert rlaas("reset", "alice").code == 0
    assert not OperatorAction.objects.exists()
    use_up("4711")
    rlaas("reset", "alice")
    assert [each.action for each in OperatorAction.objects.all()] == ["reset"]


# Every client


@pytest.mark.parametrize("network", ["0.0.0.0/0", "::/0", "::ffff:0:0/96"])
@pytest.mark.parametrize("kind", [("block",), ("exempt",), ("limit", "--factor", "2")], ids=lambda kind: kind[0])
def test_an_override_of_every_client_has_to_be_meant(network, kind):
    arguments = (kind[0], network, *kind[1:], "--reason", "r")
    result = rlaas(*arguments)
    assert result.code == 1
    assert "--every-client" in result.err
    assert not Override.objects.exists()
    assert rlaas(*arguments, "--every-client").code == 0
    assert Override.objects.get().every_client


def test_half_of_the_internet_may_be_blocked_for_visitors_only():
    assert rlaas("block", "0.0.0.0/1", "--reason", "r").code == 0


# While Redis is unavailable, or too slow


OVERRIDES = [
    ("block", "203.0.113.9", "--reason", "spam"),
    ("exempt", "203.0.113.0/24", "--reason", "office"),
    ("limit", "alice", "--factor", "2", "--reason", "partner"),
    ("end", "203.0.113.7"),
]


@pytest.mark.parametrize("arguments", OVERRIDES, ids=lambda arguments: arguments[0])
@pytest.mark.parametrize("outage", ["unavailable", "slow"])
def test_an_override_that_is_not_in_force_yet_is_said_to_be_saved_only(
    alice, use_url, target, caplog, outage, arguments
):
    use_url(target.proxy.url, timeout=0.1)
    rlaas("block", "203.0.113.7", "--reason", "spam")
    if outage == "slow":
        target.proxy.delay(3)  # longer than a page waits
    else:
        target.proxy.refuse()
        target.proxy.cut()

    caplog.clear()
    result = rlaas(*arguments)
    saved = "CommandError: Saved, but Redis is unavailable: not in force yet; it will be once Redis is back.\n"
    assert (result.code, result.out, result.err) == (1, "", saved)
    assert not [record for record in caplog.records if record.exc_info]
    assert Override.objects.active().count() == (0 if arguments[0] == "end" else 2)

    target.restore()
    use_url(target.node.url)
    assert rlaas("restore").code == 0
    assert check("203.0.113.7", "by-address").allowed == (arguments[0] == "end")


def test_an_override_says_whether_it_is_published(use_url, target):
    use_url(target.proxy.url, timeout=0.1)
    override = Override(identity="alice", kind="block", until=timezone.now() + timedelta(hours=1), reason="r")
    override.activate("operator")
    assert override.is_published
    target.proxy.refuse()
    target.proxy.cut()
    override.end("operator")
    assert not override.is_published
