"""What the keys of RATE_LIMITER with a single value accept. No Django, no Redis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HEADER_FAMILIES = ("RateLimit", "X-RateLimit")
PROXY_HEADERS = {
    None: ("HTTP_X_FORWARDED_FOR", "HTTP_FORWARDED"),  # the first that is there
    "X-Forwarded-For": ("HTTP_X_FORWARDED_FOR",),
    "Forwarded": ("HTTP_FORWARDED",),
}


def _whole_number(least: int, most: int) -> tuple[Callable[[Any], bool], str]:
    def is_valid(value: Any) -> bool:
        return type(value) is int and least <= value <= most

    return is_valid, f"be {least} to {most}"


def _is_timeout(value: Any) -> bool:
    return type(value) in (int, float) and 0.001 <= value <= 60


def _are_headers(value: Any) -> bool:
    if not isinstance(value, (list, tuple)):
        return False
    return all(family in HEADER_FAMILIES for family in value)


_BOOLEAN = (lambda value: type(value) is bool), "be True or False"
ACCEPTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "ENABLED": _BOOLEAN,
    "LOCAL_REFUSALS": _BOOLEAN,
    "IPV6_PREFIX": _whole_number(1, 128),
    "LOG_LINES_PER_SECOND": _whole_number(0, 1_000_000),
    "LOCAL_SHARE": _whole_number(1, 1_000_000),
    "LOCAL_IDENTITIES": _whole_number(1, 10_000_000),
    "TIMEOUT": (_is_timeout, "be 0.001 to 60 seconds"),
    "CACHE": (lambda value: isinstance(value, str), "be text"),
    "PROXY_HEADER": (
        lambda value: value in [*PROXY_HEADERS],
        "be 'X-Forwarded-For', 'Forwarded' or None",
    ),
    "HEADERS": (_are_headers, f"list some of {list(HEADER_FAMILIES)}"),
}
