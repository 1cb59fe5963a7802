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
from dataclasses import dataclass, fields, replace
from time import monotonic
from typing import Any, NamedTuple

import httpx

__all__ = ["Answer", "AsyncClient", "Client", "ServiceError"]

# Seconds without a call after the first failure in a row, the second, and so on.
PAUSES = (0.0, 0.15, 0.3, 0.6, 1.2, 2.0)
MAX_THREADS = 100  # of a Client: as many as httpx keeps connections
CAMEL_CASE = {
    "current_count": "currentCount",
    "retry_after": "retryAfter",
    "reset_after": "resetAfter",
}
NUMBER = (int, float)
# The types of what is not a number in a decision.
TYPES = {"allowed": bool, "degraded": bool, "policy": str, "receipt": str}

Name = str | int
# Of the JSON of the service, or of the Answer of `on_failure`.
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
    def read(cls, body: Any) -> Answer:
        """Return the answer that a JSON object states."""
        values = {}
        for field in fields(cls):
            member = CAMEL_CASE.get(field.name, field.name)
            value = body.get(member)
            if value is not None:
                values[field.name] = _require(value, TYPES.get(member, NUMBER))

        if body.get("retryAfter", 0.0) is None:
            values["retry_after"] = math.inf

        return cls(**values)


# What is answered without the service.
FALLBACKS = {
    "open": Answer(True, degraded=True),
    "closed": Answer(False, degraded=True, retry_after=1.0),
}
NO_REFUSAL = (Answer(True), 0.0)
# The latest refusals of checks, by path and body, and when each check began.
Refusals = dict[tuple[str, str], tuple[Answer, float]]


class _Call(NamedTuple):
    """A call of the service."""

    path: str
    body: str
    read: ReadBody
    began: float
    refusals: Refusals


class _BaseClient:
    """The calls of both clients; those of AsyncClient return awaitables."""

    _open: Any  # makes the connections
    _call: Any  # of a path, a body, and what reads the response

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout: float = 0.5,
        on_failure: str = "open",
        max_refusals: int = 10_000,
    ) -> None:
        if on_failure not in FALLBACKS:
            raise ValueError(f"on_failure is 'open' or 'closed', not {on_failure!r}.")

        self.url = url
        self.timeout = timeout
        self._fallback = FALLBACKS[on_failure]
        self._max_refusals = max_refusals
        self._refusals: Refusals = {}
        self._failures = 0  # in a row
        self._paused_until = 0.0

        headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
        }
        self._options: Any = {"base_url": url, "headers": headers, "timeout": timeout}
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

        return self._call("check", subject, _read_answer)

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

        return self._call("usage", subject, _read_answer)

    def check_each(self, checks: Sequence[Mapping[str, Any]]) -> Any:
        """Decide up to 1,000 checks, each as the body of `POST check`.

        Return an Answer for each, or the ServiceError of one that is not valid.

        >>> limits.check_each([{"userId": "alice"}, {"userId": "bob", "cost": 2}])
        """

        def read(body: Any) -> list[Answer | ServiceError]:
            if isinstance(body, Answer):
                return [body] * len(checks)

            pairs = zip(body["results"], checks, strict=True)
            return [_read_result(result) for result, _ in pairs]

        return self._call("check/batch", {"checks": list(checks)}, read)

    def refund(self, receipt: str) -> Any:
        """Refund a check, once; return whether it was refunded.

        Raise a ServiceError where the service is unavailable.

        >>> limits.refund(answer.receipt)
        """

        def read(body: Any) -> bool:
            # Another one, as a check that is under way may add to the old one.
            self._refusals = {}
            if isinstance(body, Answer):
                raise ServiceError("The rate limit service is unavailable.")

            return bool(_require(body["refunded"], bool))

        return self._call("refund", {"receipt": receipt}, read)

    def _begin(self, path: str, body: Any, read: ReadBody) -> tuple[_Call, Any]:
        """Return a call, and its result where the service is not called."""
        call = _Call(path, json.dumps(body), read, monotonic(), self._refusals)
        refusal, began = self._refusals.get(call[:2], NO_REFUSAL)
        age = call.began - began

        result = None
        if age < refusal.retry_after:
            retry_after = round(refusal.retry_after - age, 3)
            reset_after = round(max(0.0, refusal.reset_after - age), 3)
            result = replace(refusal, retry_after=retry_after, reset_after=reset_after)
        elif call.began < self._paused_until:
            result = read(self._fallback)
        return call, result

    def _read(self, call: _Call, response: httpx.Response) -> Any:
        """Return the result that a response states; keep a refusal for its wait."""
        result = call.read(_read_body(response, self._fallback))
        self._failures = 0
        if call.path != "check" or result.allowed or result.degraded:
            return result

        if 0 < result.retry_after < math.inf:
            call.refusals[call[:2]] = (result, call.began)
            if len(call.refusals) > self._max_refusals:
                call.refusals.clear()
        return result

    def _recover(self, call: _Call, error: Exception) -> Any:
        """Return the result without the service; raise what the service rejected.

        From the second failure in a row on, the calls pause.
        """
        if isinstance(error, ServiceError):
            self._failures = 0
            raise error

        if call.began >= self._paused_until:  # or it was under way when the pause began
            self._paused_until = monotonic() + PAUSES[self._failures]
            self._failures = min(self._failures + 1, len(PAUSES) - 1)
            logger.warning(
                "The rate limit service at %s is unavailable: %r", self.url, error
            )
        return call.read(self._fallback)


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
        call, result = self._begin(path, body, read)
        if result is not None:
            return result

        try:
            return self._read(call, self._post(path, call.body))
        except Exception as error:  # noqa: BLE001  (whatever a gateway may cause)
            return self._recover(call, error)

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
        call, result = self._begin(path, body, read)
        if result is not None:
            return result

        try:
            async with asyncio.timeout(self.timeout):
                response = await self._http.post(path, content=call.body)
            return self._read(call, response)
        except Exception as error:  # noqa: BLE001
            return self._recover(call, error)


def _subject(user: Any, policy: Any, cost: int, identity: Any) -> dict[str, Any]:
    """Return the body of a check; what is not given is left out."""
    if isinstance(policy, str):
        policy = [policy]

    subject = {"userId": user, "identity": identity, "policies": policy, "cost": cost}
    return {name: value for name, value in subject.items() if value is not None}


def _read_body(response: httpx.Response, fallback: Answer) -> Any:
    """Return what the service responded, or the Answer where it did not decide.

    ServiceError for a request that it rejected, ValueError for what a proxy responded.
    """
    status = response.status_code
    content_type = response.headers.get("Content-Type", "")
    if status in (200, 429) and content_type.startswith("application/json"):
        return response.json()

    if not content_type.startswith("application/problem+json"):
        raise ValueError(f"status {status}")

    error = _error(response.json())
    # A policy fails closed; another 503 is that of a proxy.
    if status == 503 and str(error).startswith("Redis is unavailable"):
        return FALLBACKS["closed"]
    # The caller is over its own limit; without a wait, its batch can never fit.
    if status == 429 and "Retry-After" in response.headers:
        return fallback
    if status >= 500:
        raise ValueError(f"status {status}")
    raise error


def _read_answer(body: Any) -> Answer:
    if isinstance(body, Answer):
        return body
    return Answer.read(body)


def _read_result(result: Mapping[str, Any]) -> Answer | ServiceError:
    """Return the result of one check of a batch."""
    if "error" in result:
        return _error(result["error"])

    return Answer.read(result)


def _error(problem: Mapping[str, Any]) -> ServiceError:
    return ServiceError(problem["detail"], problem["status"])


def _require(value: Any, kind: Any) -> Any:
    """Return a value of JSON; ValueError unless it is of this type."""
    if not isinstance(value, kind) or (kind is NUMBER and not 0 <= value < 2**63):
        raise ValueError(f"not what the service responds: {value!r:.100}")
    return value
