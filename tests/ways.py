"""What tests of Cluster and Sentinels have in common: who asks, what is seen meanwhile, and ways to a server."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from pathlib import Path

import pytest
from django.core import checks

import rlaas_django
from rlaas_django.signals import backend_failed
from tests.deployments import HOST, Node
from tests.faults import Proxy

NAMES = [f"user-{n}" for n in range(2_000)]
# As ACL SETUSER has it: somebody with a name and a password who may touch our keys and no others.
LIMITER = ("on", ">s3cret", "~rlaas:*", "+@all")


@pytest.fixture(params=["sync", "async"])
def ask(request):
    """`ask.check(...)`, `ask.peek(...)` and so on, through the sync function or its async twin on a loop that stays."""
    if request.param == "sync":
        yield rlaas_django
        return

    class Ask:
        def __getattr__(self, name):
            return lambda *args, **options: runner.run(getattr(rlaas_django, f"a{name}")(*args, **options))

    with asyncio.Runner() as runner:
        yield Ask()


@pytest.fixture
def connects(monkeypatch):
    """How often each port is connected to."""
    seen = Counter()
    connect = socket.socket.connect

    def counting(self, address):
        seen[address[1]] += 1
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", counting)
    return seen


@pytest.fixture
def failures():
    """What could not be asked, and why."""
    errors = []

    def note(error, **_):
        errors.append(str(error))

    backend_failed.connect(note)
    yield errors
    backend_failed.disconnect(note)


@pytest.fixture
def node():
    with Node() as node:
        node.launch()
        yield node


def report(capsys, text: str) -> None:
    """Say it, also where nothing has failed."""
    with capsys.disabled():
        print(f"\n  {text}")


def problems() -> list[str]:
    return [each.id for each in checks.run_checks() if each.id.startswith("rlaas_django.")]


class TLSProxy(Proxy):
    """Speaks TLS with clients, and plainly with the server behind it: the server of the tests has no TLS."""

    def __init__(self, url: str, context: ssl.SSLContext) -> None:
        self.context = context
        super().__init__(url)

    async def _accept(self) -> None:
        self._listener = await asyncio.start_server(self._connected, HOST, self.port, ssl=self.context)


@pytest.fixture(scope="module")
def certificate():
    """Of 127.0.0.1 and localhost, signed by itself: (context of a server, the path of what a client is to trust)."""
    path = Path(__file__).parent / "tls"  # made beforehand, as not every machine has openssl; no secret
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path / "certificate.pem", path / "key.pem")
    return context, path / "certificate.pem"
