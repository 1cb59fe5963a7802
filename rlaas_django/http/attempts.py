"""Attempts to log in, which are charged before a password is compared.

The charge is refunded at once where a user comes back. So parallel attempts do not
exceed a limit, and a right password is never counted.
"""

from __future__ import annotations

import inspect
import ipaddress
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from asgiref.sync import sync_to_async
from django.contrib.auth import get_user_model
from django.core.exceptions import PermissionDenied
from django.views.decorators.debug import sensitive_variables

from .. import conf, limiter, signals
from ..core.decision import Decision, strictest
from ..core.keys import (
    encode_address,
    encode_login,
    encode_unknown_name,
    encode_user,
    parse_address,
)
from ..core.login import ADDRESS, NAME, NAME_AND_ADDRESS
from ..core.policy import Policy
from ..core.text import fold
from ..limiter import Check, compile_policies
from ..runtime import log, observers, process
from . import login, trusted_credentials
from .proxies import client_address
from .request_state import Charge, arefund, refund

SOURCE = "login"  # of attempts without a request, in the statistics and the log

# Where proxies are. Not `is_private` of ipaddress, which is also true of the networks
# of documentation.
PRIVATE_NETWORKS = [
    ipaddress.ip_network(network)
    for network in (
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "::1/128",
        "fc00::/7",
        "fe80::/10",
    )
]

AMBIGUOUS = "\0ambiguous"  # which is nobody's name

Credentials = Mapping[str, Any]


class Attempt:
    """What the backends of one `authenticate()` have in common.

    It has neither the credentials nor the request: the context keeps the latest.
    """

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self.trusted_by = trusted_credentials.trusted.get(digest)
        self.backends: set[str] = set()  # those that took part
        self.running: Any = None  # the backend that compares now
        self.decision: Decision | None = None


class Comparison:
    """Credentials that a backend compares."""

    def __init__(self, backend: Any, request: Any, credentials: Credentials) -> None:
        self.backend = backend
        self.path = f"{type(backend).__module__}.{type(backend).__qualname__}"
        self.credentials = credentials
        self.state = login.served(request)
        self.request = None
        if hasattr(request, "META"):  # otherwise there is none, or it is not of Django
            self.request = request
        elif self.state is not None:
            self.request = self.state.request
        self.attempt: Attempt | None = None  # where it is not counted

    def find_attempt(self) -> Attempt | None:
        """Return the attempt that the backend takes part in, which may begin here."""
        config = conf.config()
        is_limited = config.enabled and config.login
        if name_in(self.credentials) is None or not is_limited:
            return None

        attempt = _current.get()
        if attempt is not None and attempt.running is self.backend:
            # Its async method calls the sync one; further calls compare something else.
            attempt.running = None
            return None

        digest = trusted_credentials.digest_of(self.credentials)
        is_same = attempt is not None and attempt.digest == digest
        if attempt is None or not is_same or self.path in attempt.backends:
            attempt = Attempt(digest)
            _current.set(attempt)
        attempt.backends.add(self.path)
        return attempt

    @contextmanager
    def running(self) -> Iterator[None]:
        """Note that the backend compares; its async method may call the sync one."""
        if self.attempt is None:
            yield
            return
        self.attempt.running = self.backend
        try:
            yield
        finally:
            self.attempt.running = None

    @property
    def is_due(self) -> bool:
        """Whether the attempt is still to be charged."""
        attempt = self.attempt
        if attempt is None or attempt.trusted_by is not None:
            return False
        return attempt.decision is None

    def find_user_id(self) -> Any:
        """Return the primary key of the user.

        Without an argument, which a report of an error in a thread would show.
        """
        return self.backend.get_user_id(self.credentials)

    def plan(self, user_id: Any) -> Check | None:
        """Plan the check of the user who has the name, or of the name if nobody has."""
        address = ""
        if self.request is not None:
            address = client_address(self.request)

        policies: list[Policy] = []
        encoded: list[str] = []
        identities = self._identities(user_id, address)
        for counted, limiting in conf.config().login.items():
            if counted in identities:
                policies += limiting
                encoded += [identities[counted]] * len(limiting)
        if not policies:
            return None

        policy_set = compile_policies(tuple(policies))
        return limiter.plan_encoded(policy_set, tuple(encoded), 1, address)

    def _identities(self, user_id: Any, address: str) -> dict[str, str]:
        """Return the encoded identities, by what is counted."""
        identity = encode_user(str(user_id))
        if user_id is None:
            name = fold(name_in(self.credentials) or "")
            identity = encode_unknown_name(name, conf.secret())

        encoded = encode_address(address, conf.config().encoding.ipv6_prefix)
        identities = {NAME_AND_ADDRESS: encode_login(identity, encoded), NAME: identity}
        if _is_of_one_client(address):
            identities[ADDRESS] = encoded
        return identities

    def keep(self, decision: Decision) -> bool:
        """Keep what was decided, for the statistics, the log and the response.

        Return whether it exceeds a limit.
        """
        self.attempt.decision = decision  # type: ignore[union-attr]
        if self.state is not None:
            self.state.add(decision)
        else:
            observers.observe(decision, SOURCE)

        exceeding = [outcome for outcome in decision.outcomes if not outcome.allowed]
        if exceeding:
            method = getattr(self.request, "method", None) or ""
            path = getattr(self.request, "path", SOURCE)
            log.refusal(strictest(exceeding), method, path, block=True)
        return bool(exceeding)

    def require_allowed(self, decision: Decision) -> None:
        """Raise PermissionDenied for a refusal: then no further backend is tried."""
        if decision.allowed:
            return
        _current.set(None)
        login.refused.set(self.state)
        if self.state is not None:
            self.state.login_refusal = decision
        raise PermissionDenied("Too many attempts to log in.")

    def fail(self) -> None:
        """Note that the credentials are wrong; if they were trusted, they count now.

        If another backend trusts them, that comes later.
        """
        attempt = self.attempt
        if attempt is not None and attempt.trusted_by == self.path:
            attempt.trusted_by = None
            trusted_credentials.trusted.delete(attempt.digest)

    def succeed(self) -> list[Charge]:
        """Note that the credentials are right, and return what is to be refunded."""
        if self.state is not None:
            self.state.login_succeeded = True
        if self.attempt is None:
            return []

        _current.set(None)
        trusted_credentials.trusted.set(self.attempt.digest, self.path)
        if self.attempt.decision is None:
            return []
        return [Charge(self.attempt.decision, 1)]


# The latest attempt of this context, which a further backend may continue.
_current: ContextVar[Attempt | None] = ContextVar("rate_limit_attempt", default=None)


@sensitive_variables()
def begin(
    backend: Any,
    compare: Callable[..., Any],
    request: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Comparison | None:
    """Return what a backend compares; None if it does not take these credentials."""
    login.refused.set(None)
    credentials = _credentials(compare, request, args, kwargs)
    if credentials is None:
        return None
    comparison = Comparison(backend, request, credentials)
    comparison.attempt = comparison.find_attempt()
    return comparison


def settle(comparison: Comparison, user: Any) -> Any:
    """Refund an attempt that found a user; return the user.

    Credentials that were trusted, and are wrong, are charged.
    """
    if user is None:
        comparison.fail()
        charge(comparison)
        return None
    refund(comparison.state, comparison.succeed())
    return user


async def asettle(comparison: Comparison, user: Any) -> Any:
    """As `settle`, natively async."""
    if user is None:
        comparison.fail()
        await acharge(comparison)
        return None
    await arefund(comparison.state, comparison.succeed())
    return user


def charge(comparison: Comparison) -> None:
    """Charge an attempt if it is due; PermissionDenied if it is refused."""
    if not comparison.is_due:
        return
    check = comparison.plan(comparison.find_user_id())
    if check is None:
        return
    decision = limiter.decide(check)
    if comparison.keep(decision):
        request = comparison.request
        signals.send(signals.rate_limited, request=request, decision=decision)
    comparison.require_allowed(decision)


async def acharge(comparison: Comparison) -> None:
    """As `charge`, natively async."""
    if not comparison.is_due:
        return
    check = comparison.plan(await sync_to_async(comparison.find_user_id)())
    if check is None:
        return
    decision = await limiter.adecide(check)
    if comparison.keep(decision):
        request = comparison.request
        await signals.asend(signals.rate_limited, request=request, decision=decision)
    comparison.require_allowed(decision)


@sensitive_variables()
def _credentials(
    compare: Callable[..., Any],
    request: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Credentials | None:
    """Return the arguments of a backend by name; None if it does not take them."""
    signature = inspect.signature(compare)
    try:
        bound = signature.bind(request, *args, **kwargs)
    except TypeError:
        return None

    _request, *arguments = bound.arguments.items()
    credentials: dict[str, Any] = {}
    for name, value in arguments:
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            credentials.update(value)
        else:
            credentials[name] = value
    return {name: value for name, value in credentials.items() if value is not None}


@sensitive_variables()
def name_in(credentials: Credentials) -> str | None:
    """Return the name in credentials; None where they have none, or nothing else.

    AMBIGUOUS where they have several: it depends on the backend which one it compares.
    """
    if len(credentials) < 2:
        return None

    model: Any = get_user_model()
    fields = (model.USERNAME_FIELD, "username", getattr(model, "EMAIL_FIELD", "email"))
    names = {str(credentials[field]) for field in fields if field in credentials}
    if len(names) > 1:
        return AMBIGUOUS
    if not names and "password" in credentials:  # such as the number of a phone
        others = [field for field in credentials if field != "password"]
        names = {str(credentials[others[0]])}
    return next(iter(names), None)


def _is_of_one_client(address: str) -> bool:
    """Return whether an address is not that of a proxy, as far as it shows."""
    parsed = parse_address(address)
    if parsed is None:
        return False
    if conf.config().proxies_are_known:
        return True
    if any(parsed in network for network in PRIVATE_NETWORKS):
        _warn_of_proxy()
        return False
    return True


@cache
def _warn_of_proxy() -> None:
    """Warn once that attempts are not limited by address."""
    log.warning(
        "Logins from private addresses are not limited by address, as it may be that "
        "of a proxy: set RATE_LIMITER['TRUSTED_PROXIES'], to [] if there is none."
    )


process.on_fork(_warn_of_proxy.cache_clear)
