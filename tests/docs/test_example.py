"""The example project: its own tests under its own settings, and the demo as a real process."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.browser.demo import ROOT, Demo, environment, free_port, running
from tests.support.deployments import wait_until

REFUSING = [
    *("bare", "inline", "several", "asynchronous", "by_plan", "log_in", "export", "report", "second_visit"),
    *("fail_open", "fail_closed", "count_locally"),
    *("fixed_window", "sliding_window", "sliding_window_compact", "sliding_window_counter", "token_bucket"),
]
NEVER_REFUSING = ["shadow", "feed"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def demo(directory):
    with running(directory) as demo:
        yield demo


@pytest.fixture
def browser(demo):
    """A client with a session, and the token that its POSTs need."""
    with httpx.Client(base_url=demo.url, headers={"Accept": "application/json"}, timeout=60) as client:
        client.get("/").raise_for_status()
        client.headers["X-CSRFToken"] = client.cookies["csrftoken"]
        yield client


def python(directory: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(directory, **more),
        capture_output=True,
        text=True,
        timeout=300,
    )


def use_card(client: httpx.Client, name: str) -> httpx.Response:
    if name == "log_in":
        return client.post(f"/try/{name}/", data={"username": "alice", "password": "wrong"})
    return client.get(f"/try/{name}/")


def servers(demo: Demo) -> list[str]:
    """Return the processes with the demo's Redis socket in their arguments, the only name that no other process has."""
    own = re.search(r"/tmp/rlaas-\w+/", demo.said())[0].encode()
    commands = [path for path in Path("/proc").glob("[0-9]*/cmdline") if own in _read(path)]
    return [path.parent.name for path in commands]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


def test_the_system_checks_report_nothing(directory):
    done = python(directory, "example_project/manage.py", "check", "--fail-level", "WARNING")
    assert (done.returncode, done.stdout) == (0, "System check identified no issues (0 silenced).\n"), done.stderr


@pytest.mark.slow
def test_its_own_tests_pass(directory):
    options = ("-q", "-p", "no:cacheprovider", "--ds", "example_project.settings")
    done = python(directory, "-m", "pytest", *options, "example_project/tests.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_greeting_has_the_addresses_and_the_passwords(demo):
    wait_until(lambda: "Ctrl-C" in demo.said(), "the greeting is printed")
    for words in (f"{demo.url}/", f"{demo.url}/admin/", "user admin, password admin", "alice, bob, carol", "Ctrl-C"):
        assert words in demo.said()


@pytest.mark.parametrize("name", REFUSING)
def test_a_card_responds_and_refuses_in_the_end(browser, name):
    first = use_card(browser, name)
    assert first.status_code in (200, 302)
    assert "RateLimit" in first.headers
    for _ in range(20):
        last = use_card(browser, name)
        if last.status_code == 429:
            break
    assert last.status_code == 429
    assert int(last.headers["Retry-After"]) >= 1
    assert last.headers["Content-Type"] == "application/problem+json"
    assert browser.post(f"/reset/{name}/").json()["keys"] >= 1


@pytest.mark.parametrize("name", NEVER_REFUSING)
def test_a_card_that_never_refuses(browser, name):
    responses = [use_card(browser, name) for _ in range(6)]
    assert {response.status_code for response in responses} == {200}
    assert not responses[-1].json()["figures"][0]["allowed"]


def test_redis_can_be_stopped_and_started_again(browser):
    assert browser.post("/redis/stop/").json() == {"running": False}
    assert [use_card(browser, "fail_open").json()["degraded"] for _ in range(5)] == [True] * 5
    assert use_card(browser, "fail_closed").status_code == 503
    assert [use_card(browser, "count_locally").status_code for _ in range(4)] == [200, 200, 200, 429]
    assert browser.post("/redis/start/").json() == {"running": True}
    wait_until(lambda: not use_card(browser, "fail_open").json().get("degraded", True), "Redis decides again")


def test_a_redis_that_a_tab_has_started_outlives_the_tab(demo, browser):
    """The kernel stops it with the thread that started it, and that of a request ends with its connection."""
    browser.post("/redis/stop/")
    with httpx.Client(base_url=demo.url, cookies=browser.cookies, headers=browser.headers, timeout=60) as tab:
        assert tab.post("/redis/start/").json() == {"running": True}
    (process,) = servers(demo)
    wait_until(lambda: not use_card(browser, "fail_open").json().get("degraded", True), "Redis decides again")
    for _ in range(20):
        time.sleep(0.05)
        assert servers(demo) == [process]


def test_acting_as_somebody_else_needs_no_new_page(browser):
    first = browser.post("/act-as/", data={"username": "bob"})
    assert first.json()["username"] == "bob"
    browser.headers["X-CSRFToken"] = first.json()["csrf"]
    assert browser.post("/act-as/", data={"username": ""}).json()["username"] == ""


def test_static_files_and_the_admin_are_there(browser):
    for path in ("/static/demo/demo.js", "/static/demo/demo.css", "/static/admin/css/base.css", "/admin/login/"):
        assert browser.get(path).status_code == 200


def test_a_port_in_use_is_an_error_of_one_sentence(directory):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = python(directory, "-m", "example_project", PORT=str(port))
    assert done.stderr == f"Port {port} is in use; choose another, such as `make run PORT={port + 1}`.\n"
    assert (done.returncode, done.stdout) == (1, "")


def test_an_invalid_port_is_an_error_of_one_sentence(directory):
    for port in ("http", "70000", "-1"):
        done = python(directory, "-m", "example_project", PORT=port)
        assert done.stderr == f"PORT should be a number from 1 to 65535, not '{port}'.\n"
        assert done.returncode == 1


def test_an_unavailable_redis_is_an_error_of_one_sentence(directory):
    nobody = f"redis://127.0.0.1:{free_port()}/0"
    done = python(directory, "-m", "example_project", PORT=str(free_port()), REDIS_URL=nobody)
    assert re.fullmatch(r"No Redis answers at REDIS_URL: .*\n", done.stderr)
    assert done.returncode == 1


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGTERM, signal.SIGHUP))],
)
def test_a_signal_stops_every_process(directory, number):
    demo = Demo(directory)
    try:
        demo.wait()
        assert servers(demo)
        assert demo.stop(number) == 0
        assert servers(demo) == []
        assert "Traceback" not in demo.said()
    finally:
        demo.process.kill()


def test_a_signal_during_the_start_leaves_no_process(directory):
    demo = Demo(directory)
    try:
        demo.wait_for_port()  # taken before the server is started
        assert demo.stop() == 0
        assert servers(demo) == []
        assert "Traceback" not in demo.said()
    finally:
        demo.process.kill()
