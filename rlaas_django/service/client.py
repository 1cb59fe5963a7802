"""A client of the HTTP service for any Python program: one file on httpx.

It needs neither Django nor settings, and may be copied.

>>> limits = Client("http://127.0.0.1:8000/rlaas/", token="rlaas_...", timeout=0.2)
>>> answer = limits.check("alice", policy="search")
>>> answer.allowed, answer.remaining, answer.retry_after

`AsyncClient` is the same for asyncio, with `await`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from time import monotonic
from typing import Any

import httpx

__all__ = ["Answer", "AsyncClient", "Client", "ServiceError"]

# Seconds without a request after one that failed: an outage costs one timeout each.
PAUSE = 1.0
MAX_THREADS = 100  # of a Client: as many as httpx keeps connections
FAILURES = (OSError, httpx.HTTPError)  # TimeoutError is an OSError
# What a check is answered by where the service is unavailable.
FALLBACKS: dict[str, dict[str, Any]] = {
    "open": {"allowed": True, "degraded": True},
    "closed": {"allowed": False, "degraded": True, "retryAfter": PAUSE},
}
CAMEL_CASE = {
    "current_count": "currentCount",
    "retry_after": "retryAfter",
    "reset_after": "resetAfter",
}

Name = str | int
ReadBody = Callable[[Any], Any]

logger = logging.getLogger("rlaas_django.client")


class ServiceError(Exception):
    """The service rejected a request: its token, policy or cost is wrong.

    Without a status, the service is unavailable.
    """

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
        """Return the answer that a JSON object states."""
        values = {}
        for field in fields(cls):
            member = CAMEL_CASE.get(field.name, field.name)
            if member in body:
                values[field.name] = body[member]

        if values.get("retry_after", 0.0) is None:
            values["retry_after"] = math.inf

        return cls(**values)


class _BaseClient:
    """The calls of both clients; those of AsyncClient return awaitables."""

    _open: Any  # makes the connections
    _call: Any  # of a path, a body, and what reads the response

    def __init__(
        self, url: str, token: str, *, timeout: float = 0.5, on_failure: str = "open"
    ) -> None:
        if on_failure not in FALLBACKS:
            raise ValueError(f"on_failure is 'open' or 'closed', not {on_failure!r}.")

        self.url = url
        self.timeout = timeout
        self._fallback = FALLBACKS[on_failure]

        headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
        }
        self._options: Any = {"base_url": url, "headers": headers, "timeout": timeout}
        self._paused_until = 0.0
        self._open()

    def check(
        self,
        user: Name | None = None,
        *,
        policy: str | Sequence[str] | None = None,
        cost: int = 1,
        identity: dict[str, Name] | None = None,
    ) -> Any:
        """Decide, and charge when allowed; return an Answer.

        >>> limits.check("alice", policy=["search", "site"], cost=3)
        >>> limits.check(identity={"user": 42, "ip": "203.0.113.9"})
        """
        subject = _subject(user, policy, cost, identity)

        return self._call("check", subject, self._read_answer)

    def usage(
        self,
        user: Name | None = None,
        *,
        policy: str | Sequence[str] | None = None,
        cost: int = 1,
        identity: dict[str, Name] | None = None,
    ) -> Any:
        """Return the Answer to a check, without charging.

        >>> limits.usage("alice", policy="search").remaining
        """
        subject = _subject(user, policy, cost, identity)

        return self._call("usage", subject, self._read_answer)

    def check_each(self, checks: Sequence[Mapping[str, Any]]) -> Any:
        """Decide up to 1,000 checks, each as the body of `POST check`.

        Return an Answer for each, or the ServiceError of one that is not valid.

        >>> limits.check_each([{"userId": "alice"}, {"userId": "bob", "cost": 2}])
        """

        def read(body: Any) -> list[Answer | ServiceError]:
            fallback = [self._fallback] * len(checks)
            results = (body or {}).get("results", fallback)
            return [_read_result(result) for result in results]

        return self._call("check/batch", {"checks": list(checks)}, read)

    def refund(self, receipt: str) -> Any:
        """Refund a check, once; return whether it was refunded.

        Raise a ServiceError where the service is unavailable.

        >>> limits.refund(answer.receipt)
        """

        def read(body: Any) -> bool:
            if body is None or "refunded" not in body:
                raise ServiceError("The rate limit service is unavailable.")

            return bool(body["refunded"])

        return self._call("refund", {"receipt": receipt}, read)

    def _read_answer(self, body: Any) -> Answer:
        return Answer.read(body or self._fallback)

    def _pause(self, error: Exception) -> None:
        self._paused_until = monotonic() + PAUSE
        logger.warning(
            "The rate limit service at %s is unavailable: %r", self.url, error
        )


class Client(_BaseClient):
    """A client for threads. It keeps connections, and never sends a request twice."""

    def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown(wait=False)
        self._http.close()

    def _open(self) -> None:
        self._pid = os.getpid()
        self._http = httpx.Client(**self._options)
        self._threads = ThreadPoolExecutor(MAX_THREADS, "rlaas_client")

    def _call(self, path: str, body: Any, read: ReadBody) -> Any:
        content = None
        if monotonic() >= self._paused_until:
            try:
                content = _read_content(self._post(path, json.dumps(body)))
            except FAILURES as error:
                self._pause(error)

        return read(content)

    def _post(self, path: str, body: str) -> httpx.Response:
        if self._pid != os.getpid():
            self._open()  # the connections of the parent process are not ours to use

        # httpx bounds each read by itself; a future bounds the whole call, also the
        # look-up of the name. What has not begun by then is not sent.
        future = self._threads.submit(self._http.post, path, content=body)
        try:
            return future.result(self.timeout)
        finally:
            future.cancel()


class AsyncClient(_BaseClient):
    """A client for one event loop."""

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def _open(self) -> None:
        self._http = httpx.AsyncClient(**self._options)

    async def _call(self, path: str, body: Any, read: ReadBody) -> Any:
        content = None
        if monotonic() >= self._paused_until:
            try:
                async with asyncio.timeout(self.timeout):
                    response = await self._http.post(path, content=json.dumps(body))
                content = _read_content(response)
            except FAILURES as error:
                self._pause(error)

        return read(content)


def _subject(user: Any, policy: Any, cost: int, identity: Any) -> dict[str, Any]:
    """Return the body of a check; what is not given is left out."""
    if isinstance(policy, str):
        policy = [policy]

    subject = {"userId": user, "identity": identity, "policies": policy, "cost": cost}
    return {name: value for name, value in subject.items() if value is not None}


def _read_content(response: httpx.Response) -> Any:
    """Return the JSON of a response; None where the caller is over its own limit."""
    content_type = response.headers.get("Content-Type", "")
    if content_type.startswith("application/json"):
        return response.json()

    if not content_type.startswith("application/problem+json"):
        # Not an answer of the service: of a proxy, say.
        raise httpx.RemoteProtocolError(f"status {response.status_code}")

    if response.status_code == 503:  # a policy fails closed
        return FALLBACKS["closed"]
    if response.status_code == 429:
        return None

    raise _error(response.json())


def _read_result(result: Mapping[str, Any]) -> Answer | ServiceError:
    """Return the result of one check of a batch."""
    if "error" in result:
        return _error(result["error"])

    return Answer.read(result)


def _error(problem: Mapping[str, Any]) -> ServiceError:
    return ServiceError(problem["detail"], problem["status"])
