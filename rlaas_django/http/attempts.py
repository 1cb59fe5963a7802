"""Attempts to log in, which are charged before a password is compared.

The charge is refunded at once where a user comes back. So parallel attempts do not
exceed a limit, and a right password is never counted.
"""

from __future__ import annotations

import inspect
import ipaddress
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import Any

from asgiref.sync import sync_to_async
from django.contrib.auth import get_user_model
from django.core.exceptions import PermissionDenied
from django.views.decorators.debug import sensitive_variables

from .. import conf, limiter, signals
from ..backend import UnavailableError
from ..core.decision import Decision, strictest
from ..core.keys import (
    LOGIN,
    UNKNOWN_NAME,
    credential_digest,
    encode_address,
    encode_login,
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
from .request_state import Charge

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

AMBIGUOUS = "\0ambiguous"  # no folded name has a control character

Credentials = Mapping[str, Any]


class Attempt:
    """Credentials that a backend compares, or several backends one after the other."""

    def __init__(self, backend: Any, request: Any, credentials: Credentials) -> None:
        self.backend = backend  # the one that compares now, or did last
        self.credentials = credentials
        self.digest = ""
        self.is_counted = False
        self.is_trusted = False
        self.is_running = False
        self.is_exceeding = False  # a limit
        self.decision: Decision | None = None

        self._backends = {type(backend)}  # those that took part
        self._attach(request)

    def _attach(self, request: Any) -> None:
        """Note which request the credentials came with, if any did."""
        self.logins = login.logins_of(request)
        self.request = request
        if not hasattr(request, "META"):  # there is none, or it is not of Django
            self.request = None
            if self.logins is not None:
                self.request = self.logins.state.request

    def detach(self) -> None:
        """Drop what may have the password: the context keeps the latest attempt."""
        self.credentials = {}
        self.logins = None
        self.request = None

    @property
    def is_due(self) -> bool:
        """Whether it is still to be charged."""
        return self.is_counted and not self.is_trusted and self.decision is None

    def continues_with(self, backend: Any, request: Any) -> bool:
        """Go on with a further backend; return False for the same one again."""
        if type(backend) in self._backends:
            return False
        self._backends.add(type(backend))
        self.backend = backend
        self._attach(request)
        return True

    @contextmanager
    def running(self) -> Iterator[None]:
        """Note that the backend compares; its async method may call the sync one."""
        self.is_running = True
        try:
            yield
        except BaseException:
            self.detach()
            raise
        finally:
            self.is_running = False

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
        kind = LOGIN
        name = str(user_id)
        identity = encode_user(name)
        if user_id is None:
            # A digest: people type passwords into the field for the name.
            kind = UNKNOWN_NAME
            name = name_in(self.credentials) or ""
            if name != AMBIGUOUS:
                name = fold(name)
            name = credential_digest(name, conf.secret())
            identity = f"{kind}={name}"

        encoded = encode_address(address, conf.config().encoding.ipv6_prefix)
        at_address = encode_login(kind, name, encoded)
        identities = {NAME_AND_ADDRESS: at_address, NAME: identity}
        if _is_of_one_client(address):
            identities[ADDRESS] = encoded
        return identities

    def keep(self, decision: Decision) -> None:
        """Keep what was decided, for the statistics, the log and the response."""
        self.decision = decision
        if self.logins is not None:
            self.logins.note(decision)
        else:
            observers.observe(decision, SOURCE)

        exceeding = [outcome for outcome in decision.outcomes if not outcome.allowed]
        if exceeding:
            self.is_exceeding = True
            method = getattr(self.request, "method", None) or ""
            path = getattr(self.request, "path", SOURCE)
            log.refusal(strictest(exceeding), method, path, block=True)

    def require_allowed(self) -> None:
        """Raise PermissionDenied for a refusal."""
        if self.decision is not None and not self.decision.allowed:
            _current.set(None)
            login.refused.set(self.logins)
            self.detach()
            raise PermissionDenied("Too many attempts to log in.")

    def fail(self) -> None:
        """Note that the credentials are wrong; if they were trusted, they count now."""
        if self.is_trusted:
            self.is_trusted = False
            trusted_credentials.trusted.delete(self.digest)

    def succeed(self) -> list[Decision]:
        """Note that the credentials are right, and return what is to be refunded."""
        if self.logins is not None:
            self.logins.succeeded = True
        if not self.is_counted:
            return []

        _current.set(None)
        trusted_credentials.trusted.set(self.digest, _path(self.backend))
        return [] if self.decision is None else [self.decision]

    def note_refund(self) -> None:
        """Note that it was refunded, for the headers of the response."""
        if self.logins is not None and self.decision is not None:
            self.logins.state.note_refund(Charge(self.decision, 1))


# The latest attempt of this context, which a further backend may continue.
_current: ContextVar[Attempt | None] = ContextVar("rate_limit_attempt", default=None)


@sensitive_variables()
def begin(
    backend: Any,
    compare: Callable[..., Any],
    request: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Attempt | None:
    """Return the attempt that a backend takes part in.

    None if the backend does not take these credentials. Not counted are credentials
    without a name, and those that are counted already.
    """
    login.refused.set(None)
    credentials = _credentials(compare, request, args, kwargs)
    if credentials is None:
        return None

    attempt = Attempt(backend, request, credentials)
    if name_in(credentials) is None or not _is_limited():
        return attempt

    current = _current.get()
    if current is not None and current.is_running and current.backend is backend:
        current.is_running = False  # once: further calls compare something else
        return attempt
    attempt.digest = trusted_credentials.digest_of(credentials)
    is_same = current is not None and current.digest == attempt.digest
    if current is not None and is_same and current.continues_with(backend, request):
        return current

    trusted_backend = trusted_credentials.trusted.get(attempt.digest)
    attempt.is_trusted = trusted_backend == _path(backend)
    # Another one that they were right for comes later, and counts them if need be.
    attempt.is_counted = trusted_backend is None or attempt.is_trusted
    if attempt.is_counted:
        _current.set(attempt)
    return attempt


def settle(attempt: Attempt, user: Any) -> Any:
    """Refund an attempt that found a user; return the user.

    Credentials that were trusted, and are wrong, are charged.
    """
    if user is None:
        attempt.fail()
        charge(attempt)
        attempt.detach()
        return None
    for decision in attempt.succeed():
        with suppress(UnavailableError):  # what was charged ends with its window
            limiter.refund(decision)
            attempt.note_refund()
    return user


async def asettle(attempt: Attempt, user: Any) -> Any:
    """As `settle`, natively async."""
    if user is None:
        attempt.fail()
        await acharge(attempt)
        attempt.detach()
        return None
    for decision in attempt.succeed():
        with suppress(UnavailableError):
            await limiter.arefund(decision)
            attempt.note_refund()
    return user


def charge(attempt: Attempt) -> None:
    """Charge an attempt if it is due; PermissionDenied if it is refused.

    Then Django tries no further backend.
    """
    if not attempt.is_due:
        return
    check = attempt.plan(attempt.find_user_id())
    if check is not None:
        attempt.keep(limiter.decide(check))
    if attempt.is_exceeding:
        signals.send(
            signals.rate_limited, request=attempt.request, decision=attempt.decision
        )
    attempt.require_allowed()


async def acharge(attempt: Attempt) -> None:
    """As `charge`, natively async."""
    if not attempt.is_due:
        return
    check = attempt.plan(await sync_to_async(attempt.find_user_id)())
    if check is not None:
        attempt.keep(await limiter.adecide(check))
    if attempt.is_exceeding:
        await signals.asend(
            signals.rate_limited, request=attempt.request, decision=attempt.decision
        )
    attempt.require_allowed()


def _is_limited() -> bool:
    config = conf.config()
    return config.enabled and bool(config.login)


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


def _path(backend: Any) -> str:
    return f"{type(backend).__module__}.{type(backend).__qualname__}"


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
