"""Forward auth: the service decides for a reverse proxy. nginx runs with the configuration of the documentation."""

from __future__ import annotations

import contextlib
import http.server
import re
import socket
import subprocess
import threading
from pathlib import Path

import httpx
import pytest
from rlaas_django import peek

from tests.support import servers
from tests.support.deployments import wait_until
from tests.support.http import rate_limit_fields
from tests.support.service import Service, assert_problem, serve
from tests.support.web_servers import TOKEN, serving

PAGE = (Path(__file__).parents[2] / "docs/service.md").read_text("utf-8")
POLICIES = {
    "proxied": {"rate": "5/h", "key": "ip"},
    "search": {"rate": "2/m"},
    "api": {"rate": "2/m", "key": "header:X-Api-Key"},
    "credential": {"rate": "2/m", "key": "token"},
    "strict": {"rate": "2/m", "key": "ip", "on_failure": "closed"},
}
ALICE = {"X-RLaaS-User": "alice", "X-RLaaS-IP": "203.0.113.9"}


@pytest.fixture(params=["wsgi", "asgi"])
def service(request, settings, configure, clock) -> Service:
    return serve(request.param, settings, configure, POLICIES)


def test_a_proxy_is_answered_by_status_and_headers(service):
    responses = [service.get("auth/search", headers=ALICE) for _ in range(3)]
    assert [response.status_code for response in responses] == [204, 204, 429]
    assert responses[0].content == b""
    assert rate_limit_fields(responses[1]) == ({"search": (2, 60)}, {"search": (0, 60)})
    assert responses[2].headers["Retry-After"] == "60"
    assert responses[2].content == b"User is not allowed...Try after 60 seconds."
    assert peek("alice", "search").current_count == 2


def test_the_path_names_the_policies(service):
    assert rate_limit_fields(service.get("auth", headers=ALICE))[0] == {"default": (5, 60)}
    both = service.get("auth/search,proxied?policy=default&cost=0", headers=ALICE)
    assert rate_limit_fields(both)[0] == {"search": (2, 60), "proxied": (5, 3600)}
    assert peek("203.0.113.9", "proxied").current_count == 1
    assert_problem(service.get("auth/serach", headers=ALICE), 404, "did you mean 'search'?")


def test_envoy_appends_the_original_path_and_wants_200(service):
    for method in ("get", "post", "put", "delete", "options", "head"):
        response = service.request(method, "auth/proxied/api/items?cost=0&policy=search", headers=ALICE)
        assert response.status_code == (200 if method != "head" else 429)
    assert peek("203.0.113.9", "proxied").current_count == 5


def test_other_kinds_of_identity(service):
    for headers, policy in (({"X-Api-Key": "k1"}, "api"), ({"X-RLaaS-Token": "t1"}, "credential")):
        responses = [service.get(f"auth/{policy}", headers=headers) for _ in range(3)]
        assert [response.status_code for response in responses] == [204, 204, 429]
    assert service.get("auth/credential", headers={"X-RLaaS-Token": "t2"}).status_code == 204


def test_the_proxys_own_token_and_address_are_nobodys_identity(service):
    for policy in ("credential", "proxied", "default"):
        assert_problem(service.get(f"auth/{policy}"), 400, "Name who is checked")


def test_the_address_may_come_from_a_trusted_proxy(service, configure):
    configure(TRUSTED_PROXIES=["127.0.0.1"])
    forwarded = {"X-Forwarded-For": "198.51.100.7, 203.0.113.9"}
    for method in ("get", "post"):
        assert service.request(method, "auth/proxied", headers=forwarded).status_code == 204
    assert peek("203.0.113.9", "proxied").current_count == 2
    assert service.get("auth/proxied", headers={**forwarded, "X-RLaaS-IP": "192.0.2.1"}).status_code == 204
    assert peek("203.0.113.9", "proxied").current_count == 2


@pytest.mark.usefixtures("redis_unavailable")
def test_without_redis_a_proxy_is_answered_by_on_failure(service):
    assert service.get("auth/proxied", headers=ALICE).status_code == 204
    assert_problem(service.get("auth/strict", headers=ALICE), 503)


# nginx


class Backend(http.server.BaseHTTPRequestHandler):
    """What is behind the proxy."""

    def do_GET(self) -> None:
        self.send_response(500 if self.path == "/broken" else 200)
        self.send_header("Content-Length", "7")
        self.end_headers()
        self.wfile.write(b"backend")

    do_POST = do_GET  # noqa: N815

    def log_message(self, *args) -> None:
        pass


@contextlib.contextmanager
def backend():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Backend) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def nginx(directory: Path, ports: dict[str, int]):
    """Run nginx with the documented server block, on other ports; yield its port."""
    (block,) = re.findall(r"```nginx\n(.*?)```", PAGE, re.DOTALL)
    for documented, port in ports.items():
        assert documented in block
        block = block.replace(documented, f"127.0.0.1:{port}")
    port = free_port()
    block = block.replace("listen 127.0.0.1:8080", f"listen 127.0.0.1:{port}").replace("TOKEN", TOKEN)
    temporary = "".join(
        f"{kind}_temp_path {directory / kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    configuration = directory / "nginx.conf"
    configuration.write_text(
        f"user root;\npid {directory / 'pid'};\nerror_log {directory / 'error.log'};\nworker_processes 1;\n"
        f"events {{ worker_connections 256; }}\nhttp {{\naccess_log off;\n{temporary}{block}\n}}\n"
    )
    command = [str(servers.nginx()), "-p", str(directory), "-c", str(configuration), "-g", "daemon off;"]
    log = (directory / "output").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=log)

    def listens() -> bool:
        assert process.poll() is None, (directory / "output").read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    try:
        wait_until(listens, "nginx listens")
        yield port
    finally:
        process.terminate()
        process.wait(20)
        log.close()


@contextlib.contextmanager
def proxied(directory: Path, name: str):
    """Run a backend, a server with the service, and nginx in front of both; yield its URL."""
    with backend() as behind, serving(name, directory / "log", workers=2) as port:
        ports = {"127.0.0.1:8000": port, "127.0.0.1:9000": behind}
        with nginx(directory, ports) as front:
            yield f"http://127.0.0.1:{front}/"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gunicorn", "uvicorn"])
def test_nginx_admits_five_and_refuses_the_sixth(tmp_path, name):
    with proxied(tmp_path, name) as url:
        # What a client sends does not change who is counted, or how.
        forged = [{"X-RLaaS-IP": f"192.0.2.{i}", "X-RLaaS-User": f"u{i}", "X-RLaaS-Token": "t"} for i in range(6)]
        responses = [httpx.post(f"{url}?cost=0", headers=each, content=b"x" * 1000, timeout=30) for each in forged]
        assert [response.status_code for response in responses] == [200] * 5 + [429]
        assert responses[0].content == b"backend"
        assert responses[0].headers["RateLimit"].startswith('"proxied";r=4;t=')
        assert 0 < int(responses[5].headers["Retry-After"]) <= 3600
        assert responses[5].headers["RateLimit"].startswith('"proxied";r=0;t=')
        assert httpx.get(url, timeout=30).status_code == 429


@pytest.mark.slow
def test_nginx_passes_the_backends_own_errors_and_fails_closed(tmp_path):
    with proxied(tmp_path, "uvicorn") as url:
        response = httpx.get(f"{url}broken", timeout=30)
        assert (response.status_code, response.content) == (500, b"backend")
    with backend() as behind, nginx(tmp_path, {"127.0.0.1:8000": free_port(), "127.0.0.1:9000": behind}) as front:
        assert httpx.get(f"http://127.0.0.1:{front}/", timeout=30).status_code == 500


@pytest.mark.slow
def test_nginx_can_be_had_without_installing_it(tmp_path, monkeypatch):
    """On a machine without nginx the distribution's is unpacked, and not started on port 80."""
    monkeypatch.setattr(
        servers.shutil, "which", lambda name, path=None: None if name == "nginx" else f"/usr/bin/{name}"
    )
    monkeypatch.setattr(servers, "SERVERS", tmp_path)
    assert "nginx version" in subprocess.run([servers.nginx(), "-v"], capture_output=True, text=True).stderr
