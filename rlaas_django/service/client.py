"""A client of the HTTP service for any Python program: one file, the standard library, no Django settings.

>>> limits = Client("http://127.0.0.1:8000/rlaas/", token="rlaas_...", timeout=0.2, on_failure="open")
>>> answer = limits.check("alice", policy="search")
>>> answer.allowed, answer.remaining, answer.retry_after

`AsyncClient` is the same for asyncio, with `await`, and needs httpx.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import logging
import math
import os
import select
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Answer", "AsyncClient", "Client", "ServiceError"]

PAUSE = 1.0  # seconds without a request after one that failed, so that an outage costs one timeout per second
Name = str | int
Read = Callable[[Any], Any]

logger = logging.getLogger("rlaas_django.client")


class ServiceError(Exception):
    """The service rejected a request: its token, policy or cost is wrong; without a status, it is unavailable."""

    def __init__(self, detail: str, status: int | None = None) -> None:
        super().__init__(detail)
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """What the service decided; where it is unavailable, what `on_failure` says."""

    allowed: bool
    degraded: bool = False  # decided without Redis, or without the service
    policy: str | None = None
    limit: int | None = None
    current_count: int | None = None
    remaining: int | None = None
    retry_after: float = 0.0  # exact seconds; inf when the cost can never fit
    reset_after: float = 0.0
    ttl: int | None = None
    receipt: str | None = None  # for `refund`

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Answer:
        """Return an answer of its JSON."""
        found = {
            attribute: body[name] for name, attribute in _NAMES.items() if name in body
        }
        if found.get("retry_after", 0.0) is None:
            found["retry_after"] = math.inf
        return cls(**found)


_CAMEL_CASE = {
    "currentCount": "current_count",
    "retryAfter": "retry_after",
    "resetAfter": "reset_after",
}
_SAME = ("allowed", "degraded", "policy", "limit", "remaining", "ttl", "receipt")
_NAMES = {**_CAMEL_CASE, **dict(zip(_SAME, _SAME, strict=True))}


class _Calls:
    """The calls of both clients; AsyncClient's return awaitables."""

    def __init__(
        self, url: str, token: str, *, timeout: float = 0.5, on_failure: str = "open"
    ) -> None:
        if on_failure not in ("open", "closed"):
            raise ValueError(f"on_failure is 'open' or 'closed', not {on_failure!r}.")
        self.url, self.timeout, self.on_failure = urlsplit(url), timeout, on_failure
        self._headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
        }
        self._resume_at = 0.0

    def check(
        self,
        user: Name | None = None,
        *,
        policy: str | Sequence[str] | None = None,
        cost: int = 1,
        identity: Mapping[str, Name] | None = None,
    ) -> Any:
        """Decide, and charge when allowed; return an Answer."""
        return self._call("check", _subject(user, policy, cost, identity), self._answer)

    def usage(
        self,
        user: Name | None = None,
        *,
        policy: str | Sequence[str] | None = None,
        cost: int = 1,
        identity: Mapping[str, Name] | None = None,
    ) -> Any:
        """Return the Answer to a check, without charging."""
        return self._call("usage", _subject(user, policy, cost, identity), self._answer)

    def check_each(self, checks: Sequence[Mapping[str, Any]]) -> Any:
        """Decide up to 1,000 checks, each as the body of `POST check`; return Answers, a ServiceError in its place."""

        def read(body: Any) -> list[Answer | ServiceError]:
            results = (
                [None] * len(checks)
                if body is None or "results" not in body
                else body["results"]
            )
            return [
                _error(each["error"])
                if each and "error" in each
                else self._answer(each)
                for each in results
            ]

        return self._call("check/batch", {"checks": list(checks)}, read)

    def refund(self, receipt: str) -> Any:
        """Refund a check, once; return whether it was; ServiceError where the service is unavailable."""

        def read(body: Any) -> bool:
            if body is None or "refunded" not in body:
                raise ServiceError("The rate limit service is unavailable.")
            return bool(body["refunded"])

        return self._call("refund", {"receipt": receipt}, read)

    def _call(self, path: str, body: Any, read: Read) -> Any:
        raise NotImplementedError

    def _answer(self, body: Any) -> Answer:
        if body is not None:
            return Answer.read(body)
        is_open = self.on_failure == "open"
        return Answer(is_open, degraded=True, retry_after=0.0 if is_open else PAUSE)

    def _is_paused(self) -> bool:
        return monotonic() < self._resume_at

    def _failed(self, error: object) -> None:
        self._resume_at = monotonic() + PAUSE
        logger.warning(
            "The rate limit service at %s is unavailable: %r", self.url.netloc, error
        )

    def _body(self, status: int, content_type: str, content: bytes) -> Any:
        """Return the JSON of a response; None where it is none of the service's own answers."""
        if content_type.startswith("application/json"):
            return json.loads(content)
        if not content_type.startswith("application/problem+json"):
            self._failed(f"status {status}")  # of a proxy, say
            return None
        problem = json.loads(content)
        if status == 503:
            return {
                "allowed": False,
                "degraded": True,
                "retryAfter": PAUSE,
            }  # a policy that fails closed
        if status == 429:  # the caller's own limit
            return None
        raise _error(problem)


def _subject(
    user: Name | None, policy: Any, cost: int, identity: Mapping[str, Name] | None
) -> dict[str, Any]:
    subject: dict[str, Any] = {
        "userId": user,
        "identity": identity and dict(identity),
        "cost": cost,
    }
    subject |= (
        {"policy": policy}
        if isinstance(policy, str)
        else {"policies": policy and list(policy)}
    )
    return {name: value for name, value in subject.items() if value is not None}


def _error(problem: Mapping[str, Any]) -> ServiceError:
    return ServiceError(problem["detail"], problem["status"])


class Client(_Calls):
    """A client for threads. It keeps connections open, and never sends a request twice."""

    def __init__(
        self, url: str, token: str, *, timeout: float = 0.5, on_failure: str = "open"
    ) -> None:
        super().__init__(url, token, timeout=timeout, on_failure=on_failure)
        self._idle: list[http.client.HTTPConnection] = []
        self._pid = os.getpid()

    def close(self) -> None:
        """Close the connections."""
        while self._idle:
            self._idle.pop().close()

    def _call(self, path: str, body: Any, read: Read) -> Any:
        if self._is_paused():
            return read(None)
        deadline, connection = monotonic() + self.timeout, None
        try:
            connection = self._open_connection(deadline)
            connection.request(
                "POST",
                f"{self.url.path.rstrip('/')}/{path}",
                json.dumps(body),
                self._headers,
            )
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            if connection is not None:
                connection.close()
            self._failed(error)
            return read(None)
        if not response.will_close:
            self._idle.append(connection)
        return read(
            self._body(
                response.status, response.headers.get("Content-Type", ""), content
            )
        )

    def _open_connection(self, deadline: float) -> http.client.HTTPConnection:
        """Return an idle connection that the server has not closed, or a new one."""
        if self._pid != os.getpid():
            self._idle, self._pid = (
                [],
                os.getpid(),
            )  # those of the parent process are not ours to use
        while self._idle:
            connection: Any = self._idle.pop()
            if not select.select([connection.sock.socket], [], [], 0)[0]:
                connection.sock.deadline = deadline
                return connection  # type: ignore[no-any-return]
            connection.close()
        kind = (
            http.client.HTTPSConnection
            if self.url.scheme == "https"
            else http.client.HTTPConnection
        )
        connection = kind(self.url.hostname or "", self.url.port, timeout=self.timeout)
        connection.connect()
        connection.sock = _DeadlineSocket(connection.sock, deadline)
        return connection  # type: ignore[no-any-return]


class _DeadlineSocket:
    """A socket on which sending and all reads together end at a deadline; a socket's own timeout is for each read."""

    def __init__(self, connected: Any, deadline: float) -> None:
        self.socket, self.deadline = connected, deadline

    def set_timeout(self) -> None:
        left = self.deadline - monotonic()
        if left <= 0:
            raise TimeoutError("the time is over")
        self.socket.settimeout(left)

    def sendall(self, data: bytes) -> None:
        self.set_timeout()
        self.socket.sendall(data)

    def makefile(self, *_: Any) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self))

    def close(self) -> None:
        self.socket.close()


class _Reader(io.RawIOBase):
    """What a response is read from."""

    def __init__(self, source: _DeadlineSocket) -> None:
        self._source, self._file = source, source.socket.makefile("rb", 0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._source.set_timeout()
        return self._file.readinto(buffer)  # type: ignore[no-any-return]

    def close(self) -> None:
        self._file.close()
        super().close()


class AsyncClient(_Calls):
    """A client for one event loop; it needs httpx (the extra `client`)."""

    def __init__(
        self, url: str, token: str, *, timeout: float = 0.5, on_failure: str = "open"
    ) -> None:
        import httpx

        super().__init__(url, token, timeout=timeout, on_failure=on_failure)
        self._http = httpx.AsyncClient(
            base_url=url, headers=self._headers, timeout=timeout
        )
        self._errors = (OSError, httpx.HTTPError)  # TimeoutError is an OSError

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _call(self, path: str, body: Any, read: Read) -> Any:
        if self._is_paused():
            return read(None)
        try:
            async with asyncio.timeout(self.timeout):
                response = await self._http.post(path, content=json.dumps(body))
        except self._errors as error:
            self._failed(error)
            return read(None)
        return read(
            self._body(
                response.status_code,
                response.headers.get("Content-Type", ""),
                response.content,
            )
        )
