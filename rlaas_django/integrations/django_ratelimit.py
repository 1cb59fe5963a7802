"""django-ratelimit's decorator, functions, exception, middleware and settings.

They mean the same. Requests are counted in fixed windows, and so is the first one over
the limit: a look without an increment shows afterwards that the limit was exceeded.
Those after it are refused, and cost nothing.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypedDict, cast

from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.deprecation import MiddlewareMixin
from django.utils.module_loading import import_string

from .. import conf, limiter
from ..core.algorithms import FIXED_WINDOW
from ..core.decision import Decision
from ..core.keys import (
    EncodedIdentity,
    encode,
    encode_name,
    key_kind,
    parse_address,
)
from ..core.policy import Policy, PolicyError, Rate
from ..decorators import ViewT
from ..http.identity import read_name
from ..http.proxies import client_address
from ..http.site_functions import in_thread
from ..http.view_names import policy_name, view_label, view_name
from ..limiter import PolicySet, compile_policies
from ..runtime import registry
from .throttles import record

__all__ = [
    "ALL",
    "UNSAFE",
    "RatelimitMiddleware",
    "Ratelimited",
    "Usage",
    "get_usage",
    "is_ratelimited",
    "ratelimit",
]

ALL = (None,)
UNSAFE = ["DELETE", "PATCH", "POST", "PUT"]
DEFAULT_MASKS = {4: 32, 6: 64}

# The arguments. Functions may be given by their dotted path.
Key = str | Callable[[str, HttpRequest], object] | None
FixedRate = str | tuple[int, int] | None
Rates = FixedRate | Callable[[str, HttpRequest], FixedRate]
Methods = str | Iterable[str] | tuple[None]


class Usage(TypedDict):
    """What a client has used of a limit."""

    count: int
    limit: int
    should_limit: bool
    time_left: int


class Ratelimited(PermissionDenied):
    """A request is over a limit."""


class Counter(NamedTuple):
    """The two policies of a limit: as the site wrote it, and as it is counted."""

    limit: int
    shown: Policy
    counted: Policy  # its limit is higher by one, to count the first over the limit


class RatelimitMiddleware(MiddlewareMixin):
    """Answers with the view of RATELIMIT_VIEW."""

    def process_exception(
        self, request: HttpRequest, exception: Exception
    ) -> HttpResponseBase | None:
        view = _setting("VIEW")
        if not view or not isinstance(exception, Ratelimited):
            return None

        response: HttpResponseBase = import_string(view)(request, exception)
        return response


@dataclass(frozen=True)
class ratelimit:  # noqa: N801  (the name of a decorator)
    """Limit a view: sets `request.limited`, and raises Ratelimited if `block`.

    >>> @ratelimit(key="ip", rate="5/m", method=ratelimit.UNSAFE)
    """

    ALL: ClassVar = ALL
    UNSAFE: ClassVar = UNSAFE

    group: str | None = None
    key: Key = None
    rate: Rates = None
    method: Methods = ALL
    block: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.rate, str) and "." not in self.rate:
            _parse_rate(self.rate)  # a typo is an error when the module is imported

    def __call__(self, fn: ViewT) -> ViewT:
        def check(request: Any) -> None:
            is_limited = is_ratelimited(
                request,
                self.group,
                fn,
                self.key,
                self.rate,
                self.method,
                increment=True,
            )

            request.limited = is_limited or getattr(request, "limited", False)

            if is_limited and self.block:
                raise _function(_setting("EXCEPTION_CLASS", Ratelimited))

        @functools.wraps(fn)
        def limited(request: Any, *args: Any, **kwargs: Any) -> Any:
            check(request)
            return fn(request, *args, **kwargs)

        @functools.wraps(fn)
        async def limited_async(request: Any, *args: Any, **kwargs: Any) -> Any:
            # In a thread: keys and rates may be functions that use the database.
            await in_thread(check)(request)
            return await fn(request, *args, **kwargs)

        if iscoroutinefunction(fn):
            return cast("ViewT", limited_async)

        return cast("ViewT", limited)


def is_ratelimited(
    request: HttpRequest,
    group: str | None = None,
    fn: Callable[..., Any] | None = None,
    key: Key = None,
    rate: Rates = None,
    method: Methods = ALL,
    increment: bool = False,
) -> bool:
    """Return whether a request is over a limit."""
    usage = get_usage(request, group, fn, key, rate, method, increment)
    return usage is not None and usage["should_limit"]


def get_usage(
    request: HttpRequest,
    group: str | None = None,
    fn: Callable[..., Any] | None = None,
    key: Key = None,
    rate: Rates = None,
    method: Methods = ALL,
    increment: bool = False,
) -> Usage | None:
    """Return `count`, `limit`, `should_limit` and `time_left` for a request.

    None where nothing limits it.
    """
    if group is None and fn is None:
        raise ImproperlyConfigured(
            "Write `group`, or `fn`, the view: one of them names the counter."
        )

    if not _setting("ENABLE", True) or not conf.config().enabled:
        return None

    methods = _parse_methods(method)
    if methods and request.method not in methods:
        return None

    name = group
    label = group
    if group is None:
        name = view_name(fn)
        label = view_label(fn)

    rate_function = _function(rate)
    if rate_function is not None:
        rate = rate_function(name, request)

    if rate is None:
        return None

    counter = _counter(name, label, methods, rate)
    identity = _identity(request, name, key)
    if increment:
        return _charge(request, identity, counter)

    decision = limiter.peek(identity, _policy_set(counter.counted))
    return _usage(decision, counter.limit)


for _public in (is_ratelimited, get_usage):
    vars(_public).update(ALL=ALL, UNSAFE=UNSAFE)


def _setting(name: str, default: Any = None) -> Any:
    return getattr(settings, f"RATELIMIT_{name}", default)


def _function(value: Any) -> Any:
    """Return a function, which may be given by its dotted path; None for others."""
    if isinstance(value, str) and "." in value:
        return import_string(value)

    if callable(value):
        return value

    return None


def _parse_methods(method: Any) -> tuple[str, ...]:
    """Return the methods that are limited; none for all of them."""
    if method == ALL:
        return ()

    if isinstance(method, str):
        method = [method]

    return tuple(sorted(name.upper() for name in method))


@functools.lru_cache(maxsize=1024)
def _parse_rate(rate: str | tuple[int, int]) -> tuple[int, int]:
    """Return the limit and the seconds; unlike elsewhere, the limit may be 0."""
    text = rate
    if not isinstance(text, str):
        text = "{}/{}".format(*rate)

    is_zero = re.match("0+/", text)
    if is_zero:
        text = f"1{text}"  # over the same window

    try:
        parsed = Rate.parse(text)
    except PolicyError as error:
        raise ImproperlyConfigured(str(error)) from error

    if is_zero:
        return 0, parsed.window
    return parsed.limit, parsed.window


@functools.lru_cache(maxsize=1024)
def _counter(group: str, label: str, methods: tuple[str, ...], rate: Any) -> Counter:
    """Return the counter of a group, a rate and the methods that are limited."""
    limit, window = _parse_rate(rate)
    ending = "-".join(["", f"{limit}.{window}s", *methods])
    name = policy_name(group, ending)

    options: Any = {"algo": FIXED_WINDOW, "label": policy_name(label)}
    return Counter(
        limit,
        shown=Policy(name, (max(1, limit), window), **options),
        counted=Policy(name, (limit + 1, window), **options),
    )


def _policy_set(policy: Policy) -> PolicySet:
    """Return a policy compiled for the cache of RATELIMIT_USE_CACHE."""
    alias = _setting("USE_CACHE")
    if alias is not None:
        _ = caches[alias]  # Django's own error for an unknown one

    return compile_policies(policy, alias)


def _charge(request: Any, identity: EncodedIdentity, counter: Counter) -> Usage | None:
    """Count a request; return its usage, None where it passes without Redis."""
    policy_set = _policy_set(counter.counted)
    decision = limiter.check(identity, policy_set, source=None)

    if decision.degraded:
        if _setting("FAIL_OPEN"):
            return None

        return {"count": 0, "limit": 0, "should_limit": True, "time_left": -1}

    usage = _usage(decision, counter.limit)
    policy = registry.add_adapter_policy(counter.shown)
    record(request, [_shown_decision(policy, decision, usage)])

    return usage


def _usage(decision: Decision, limit: int) -> Usage:
    """Return the usage by a decision that was made with a limit higher by one."""
    if decision.limit != limit + 1:
        limit = decision.limit  # of an override

    count = max(decision.current_count, limit + 1)
    is_over = True
    if decision.allowed:
        count = decision.limit - decision.remaining
        # An exempt client is not counted.
        is_over = count > limit and count > decision.current_count

    return {
        "count": count,
        "limit": limit,
        "should_limit": is_over,
        "time_left": decision.ttl,
    }


def _shown_decision(policy: Policy, decision: Decision, usage: Usage) -> Decision:
    """Return a decision as it is under the limit that the site wrote."""
    allowed = not usage["should_limit"]
    retry_after = 0.0
    if not allowed:
        retry_after = decision.reset_after

    outcome = decision.outcomes[0]._replace(
        policy=policy,
        allowed=allowed,
        limit=max(1, usage["limit"]),
        remaining=max(0, usage["limit"] - usage["count"]),
        retry_after=retry_after,
    )
    return Decision(allowed, (outcome,))


def _identity(request: Any, group: Any, key: Any) -> EncodedIdentity:
    """Return who is counted.

    Anonymous users are counted by address; all without a header or parameter are
    counted together.
    """
    if key in ("user", "user_or_ip") and request.user.is_authenticated:
        return _encoded("user", str(request.user.pk))

    if key in ("ip", "user", "user_or_ip"):
        return EncodedIdentity(f"ip={encode(_address(request))}")

    if str(key).startswith(("get:", "post:", "header:")):
        return _encoded(key_kind(key), read_name(request, key))

    key_function = _function(key)
    if key_function is not None:
        return _encoded("key", str(key_function(group, request)))

    raise ImproperlyConfigured(
        f"{key!r} is not a key; write 'ip', 'user', 'user_or_ip', 'header:x', "
        "a function ..."
    )


def _encoded(kind: str, value: Any) -> EncodedIdentity:
    """Return the identity of a value; all without one have one identity."""
    if not value:
        return EncodedIdentity(f"{kind}=")

    return EncodedIdentity(encode_name(kind, value, conf.config().encoding))


def _address(request: Any) -> str:
    """Return the address of a client, or its network."""
    key = _setting("IP_META_KEY")
    read_address = _function(key)
    if read_address is not None:
        text = read_address(request)
    elif key:
        text = request.META.get(key)
    else:
        text = client_address(request)

    address = parse_address(text or "")
    if address is None:
        raise ImproperlyConfigured(
            f"{text!r} is not an address; see RATELIMIT_IP_META_KEY and "
            "TRUSTED_PROXIES."
        )

    mask = _setting(f"IPV{address.version}_MASK", DEFAULT_MASKS[address.version])
    if mask == address.max_prefixlen:
        return str(address)

    return str(ipaddress.ip_network((address, mask), strict=False))
