"""django-ratelimit's decorator, functions, exception, middleware and settings, with the same meaning.

Requests are counted in fixed windows, and so is the first one over the limit: a look without an increment tells
afterwards that the limit was exceeded. Those after it are refused, and cost nothing.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.utils.deprecation import MiddlewareMixin
from django.utils.module_loading import import_string

from .. import conf, limiter
from ..core.algorithms import FIXED_WINDOW
from ..core.decision import Decision, Outcome
from ..core.keys import EncodedIdentity, digest, encode, encode_name, parse_address
from ..core.policy import NAME, Policy, PolicyError, Rate
from ..http.identity import RequestIdentity, client_address
from ..http.responses import in_thread
from ..http.throttles import record
from ..http.view_names import policy_name, view_label, view_name
from ..limiter import PolicySet, compile_policies
from ..runtime import registry

__all__ = [
    "ALL",
    "UNSAFE",
    "RatelimitMiddleware",
    "Ratelimited",
    "get_usage",
    "is_ratelimited",
    "ratelimit",
]

ALL = (None,)
UNSAFE = ["DELETE", "PATCH", "POST", "PUT"]


class Ratelimited(PermissionDenied):
    """A request is over a limit."""


class RatelimitMiddleware(MiddlewareMixin):
    """Answers with the view of RATELIMIT_VIEW."""

    def process_exception(self, request: Any, exception: Exception) -> Any:
        view = (
            getattr(settings, "RATELIMIT_VIEW", None)
            if isinstance(exception, Ratelimited)
            else None
        )
        return import_string(view)(request, exception) if view else None


def ratelimit(
    group: Any = None,
    key: Any = None,
    rate: Any = None,
    method: Any = ALL,
    block: bool = True,
) -> Any:
    """Limit a view: sets `request.limited`, and raises Ratelimited unless `block` is False.

    >>> @ratelimit(key="ip", rate="5/m", method=ratelimit.UNSAFE)
    """
    if isinstance(rate, str) and "." not in rate:
        _parse_rate(rate)  # a typo is an error when the module is imported

    def decorator(fn: Callable[..., Any]) -> Callable[..., Any]:
        def check(request: Any) -> None:
            is_limited = is_ratelimited(
                request, group, fn, key, rate, method, increment=True
            )
            request.limited = is_limited or getattr(request, "limited", False)
            if is_limited and block:
                raise _imported(
                    getattr(settings, "RATELIMIT_EXCEPTION_CLASS", Ratelimited)
                )

        @functools.wraps(fn)
        def limited(request: Any, *args: Any, **kwargs: Any) -> Any:
            check(request)
            return fn(request, *args, **kwargs)

        @functools.wraps(fn)
        async def limited_async(request: Any, *args: Any, **kwargs: Any) -> Any:
            await in_thread(check)(
                request
            )  # keys and rates may be functions that use the database
            return await fn(request, *args, **kwargs)

        return limited_async if iscoroutinefunction(fn) else limited

    return decorator


def is_ratelimited(*args: Any, **options: Any) -> bool:
    """Return whether a request is over a limit; the arguments are those of `get_usage`."""
    usage = get_usage(*args, **options)
    return usage is not None and bool(usage["should_limit"])


def get_usage(
    request: Any,
    group: str | None = None,
    fn: Any = None,
    key: Any = None,
    rate: Any = None,
    method: Any = ALL,
    increment: bool = False,
) -> dict[str, Any] | None:
    """Return `count`, `limit`, `should_limit` and `time_left` for a request; None where nothing limits it."""
    if group is None and fn is None:
        raise ImproperlyConfigured(
            "Write `group`, or `fn`, the view: one of them names the counter."
        )
    methods = (
        []
        if method == ALL
        else sorted(map(str.upper, [method] if isinstance(method, str) else method))
    )
    is_on = getattr(settings, "RATELIMIT_ENABLE", True) and conf.config().enabled
    if not is_on or (methods and request.method not in methods):
        return None
    name, label = (view_name(fn), view_label(fn)) if group is None else (group, group)
    if callable(rate) or (isinstance(rate, str) and "." in rate):
        rate = _imported(rate)(name, request)
    if rate is None:
        return None
    limit, window = _parse_rate(rate)
    shown, counted = _policies(
        name, label, "-".join(["", f"{limit}.{window}s", *methods]), limit, window
    )
    identity, policy_set = _identity(request, name, key), _policy_set(counted)
    if not increment:
        return _usage(limiter.peek(identity, policy_set), limit)
    decision = limiter.check(identity, policy_set, source=None)
    if decision.degraded:
        is_open = getattr(settings, "RATELIMIT_FAIL_OPEN", False)
        return (
            None
            if is_open
            else {"count": 0, "limit": 0, "should_limit": True, "time_left": -1}
        )
    usage = _usage(decision, limit)
    over, left = usage["should_limit"], max(0, usage["limit"] - usage["count"])
    times = decision.reset_after if over else 0.0, decision.reset_after, decision.ttl
    registry.add_adapter_policy(shown)
    outcome = Outcome(
        shown,
        identity,
        not over,
        max(1, usage["limit"]),
        decision.current_count,
        left,
        *times,
    )
    record(request, [Decision(not over, (outcome,))])
    return usage


def _usage(decision: Decision, limit: int) -> dict[str, Any]:
    """Return the usage that a decision means, which was made with a limit higher by one."""
    limit = limit if decision.limit == limit + 1 else decision.limit  # of an override
    count = (
        decision.limit - decision.remaining
        if decision.allowed
        else max(decision.current_count, limit + 1)
    )
    over = not decision.allowed or (
        count > limit and count > decision.current_count
    )  # an exempt client is not counted
    return {
        "count": count,
        "limit": limit,
        "should_limit": over,
        "time_left": decision.ttl,
    }


for _function in (ratelimit, is_ratelimited, get_usage):
    vars(_function).update(ALL=ALL, UNSAFE=UNSAFE)


@functools.lru_cache(maxsize=1024)
def _policies(
    group: str, label: str, ending: str, limit: int, window: int
) -> tuple[Policy, Policy]:
    """Return the policy that is shown, and the one that counts: the first request over the limit, too."""
    name = policy_name(
        group if NAME.fullmatch(group) else f"{group}-{digest(group)[:8]}", ending
    )
    options: dict[str, Any] = {"algo": FIXED_WINDOW, "label": policy_name(label, "")}
    return Policy(name, (max(1, limit), window), **options), Policy(
        name, (limit + 1, window), **options
    )


def _policy_set(policy: Policy) -> PolicySet:
    alias = getattr(settings, "RATELIMIT_USE_CACHE", None)
    if alias in (None, conf.config().cache):
        return compile_policies(policy)
    _ = caches[alias]  # Django's own error for an unknown one
    return compile_policies(policy, alias)


@functools.lru_cache(maxsize=1024)
def _parse_rate(rate: str | tuple[int, int]) -> tuple[int, int]:
    """Return the limit and the seconds; unlike elsewhere, the limit may be 0."""
    try:
        if rate[0] in ("0", 0) and rate[1] != 0:
            return 0, Rate.parse(
                f"1{rate[1:]}" if isinstance(rate, str) else (1, rate[1])
            ).window
        parsed = Rate.parse(rate)
    except PolicyError as error:
        raise ImproperlyConfigured(str(error)) from error
    return parsed.limit, parsed.window


def _imported(value: Any) -> Any:
    return import_string(value) if isinstance(value, str) else value


def _identity(request: Any, group: str, key: Any) -> EncodedIdentity:
    """Return who is counted: an anonymous user by address, all without a header or parameter together."""
    encoding, text = conf.config().encoding, key if isinstance(key, str) else ""
    if key in ("user", "user_or_ip") and request.user.is_authenticated:
        return EncodedIdentity(encode_name("user", request.user.pk, encoding))
    if key in ("ip", "user", "user_or_ip"):
        return EncodedIdentity(f"ip={encode(_address(request))}")
    kind, colon, _ = text.partition(":")
    if colon and kind in ("get", "post", "header"):
        value = RequestIdentity(request).get(key)
    elif callable(key) or "." in text:
        kind, value = "key", str(_imported(key)(group, request))
    else:
        raise ImproperlyConfigured(
            f"{key!r} is no key; write 'ip', 'user', 'user_or_ip', 'header:x', a function ..."
        )
    return EncodedIdentity(encode_name(kind, value, encoding) if value else f"{kind}=")


def _address(request: Any) -> str:
    """Return the address of a client, or its network."""
    key = getattr(settings, "RATELIMIT_IP_META_KEY", None)
    if callable(key) or (key and "." in key):
        text = _imported(key)(request)
    else:
        text = request.META.get(key) if key else client_address(request)
    address = parse_address(text or "")
    if address is None:
        raise ImproperlyConfigured(
            f"{text!r} is no address; see RATELIMIT_IP_META_KEY and TRUSTED_PROXIES."
        )
    mask = getattr(
        settings,
        f"RATELIMIT_IPV{address.version}_MASK",
        32 if address.version == 4 else 64,
    )
    return (
        str(address)
        if mask == address.max_prefixlen
        else str(ipaddress.ip_network((address, mask), strict=False))
    )
