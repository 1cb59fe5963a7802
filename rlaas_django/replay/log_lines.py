"""Lines of access logs: common and combined format, as nginx, Apache and gunicorn write them, and JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, timezone
from functools import lru_cache
from typing import Any, NamedTuple

# Where a JSON line has what we need, by the names that servers and log shippers use; the first that is there counts.
FIELDS: dict[str, tuple[str, ...]] = {
    "time": (
        "time",
        "timestamp",
        "@timestamp",
        "ts",
        "msec",
        "time_iso8601",
        "time_local",
    ),
    "ip": ("ip", "remote_addr", "client_ip", "clientip", "remote_ip", "client"),
    "user": ("user", "remote_user", "user_id", "username"),
    "method": ("method", "request_method", "verb"),
    "path": ("path", "uri", "request_uri", "url"),
    "status": ("status", "status_code", "response"),
    "request": (
        "request",
        "request_line",
    ),  # the request line, where method and path are not apart
}
EARLIEST, LATEST = 946_684_800_000, 253_402_300_799_000  # ms: the years 2000 to 9999
MAX_NAME = 256  # characters of an address or a user's name that are kept

_COMMON = re.compile(
    r'(\S{1,256}) \S+ ([^\[]{0,256}?) ?\[([^\]]{17,32})\] "([A-Z]{1,20}) (\S+)[^"]*" (\d{3})\b'
)
_COMMON_TIME = re.compile(
    r"(\d\d)/([A-Z][a-z]{2})/(\d{4}):(\d\d):(\d\d):(\d\d)(?: ([+-])(\d\d)(\d\d))?"
)
_MONTHS = (
    "Jan",
    "Feb",
    "Mar",
    "Apr",
    "May",
    "Jun",
    "Jul",
    "Aug",
    "Sep",
    "Oct",
    "Nov",
    "Dec",
)
_SCALES = (
    (1e17, 1e-6),
    (1e14, 1e-3),
    (1e11, 1.0),
    (0.0, 1e3),
)  # ns, µs, ms or s since the epoch, by their size


class Request(NamedTuple):
    """A request as a log tells it; what it does not tell is empty."""

    at: int  # ms since the epoch
    ip: str
    user: str
    method: str
    path: str  # with its query
    status: int
    more: dict[
        str, str
    ] = {}  # other fields of a JSON line that were mapped: `token`, `header:X-Api-Key`  # noqa: RUF012


class LineParser:
    """Parses lines of any of the formats; `fields` says where JSON lines have what, such as `{"ip": "client.addr"}`."""

    def __init__(self, fields: Mapping[str, str] | None = None) -> None:
        fields = fields or {}
        self._fields = {
            name: (fields[name],) if name in fields else names
            for name, names in FIELDS.items()
        }
        self._more = {
            name: field for name, field in fields.items() if name not in FIELDS
        }

    def parse(self, line: str) -> Request | None:
        """Return the request of a line, or None for a line that cannot be read."""
        found = _COMMON.match(line)
        try:
            if found is not None:
                ip, user, time, method, path, status = found.groups()
                return Request(
                    _common_time(time),
                    ip,
                    "" if user == "-" else user,
                    method,
                    path,
                    int(status),
                )
            if line.lstrip().startswith("{"):
                return self._from_json(json.loads(line))
        except (ValueError, TypeError, OverflowError, RecursionError):
            return None
        return None

    def _from_json(self, entry: dict[str, Any]) -> Request | None:
        at = parse_time(self._first(entry, "time"))
        method, path = self._text(entry, "method"), self._text(entry, "path")
        if not path:
            method, _, rest = self._text(entry, "request").partition(" ")
            path = rest.partition(" ")[0]
        status = self._first(entry, "status")
        more = {
            name: str(value)[:MAX_NAME]
            for name, field in self._more.items()
            if (value := _field(entry, field))
        }
        ip, user = (
            self._text(entry, "ip")[:MAX_NAME],
            self._text(entry, "user")[:MAX_NAME],
        )
        if not (ip or user or more):
            return None
        return Request(
            at,
            ip,
            "" if user == "-" else user,
            method.upper(),
            path,
            int(status or 0),
            more,
        )

    def _first(self, entry: dict[str, Any], name: str) -> Any:
        for field in self._fields[name]:
            if (value := _field(entry, field)) is not None:
                return value
        return None

    def _text(self, entry: dict[str, Any], name: str) -> str:
        value = self._first(entry, name)
        return "" if value is None else str(value)


def _field(entry: dict[str, Any], field: str) -> Any:
    """Return a field; `client.addr` is also one inside of another."""
    if field in entry or "." not in field:
        return entry.get(field)
    found: Any = entry
    for name in field.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def parse_time(value: Any) -> int:
    """Return ms since the epoch, of a number since the epoch, an ISO 8601 time or a common log's; else ValueError."""
    if isinstance(value, str):
        if _COMMON_TIME.fullmatch(value):
            return _common_time(value)
        try:
            value = float(value)
        except ValueError:
            time = datetime.fromisoformat(value)
            return _checked(
                (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000
            )
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"no time: {value!r}")
    return _checked(next(value * factor for least, factor in _SCALES if value >= least))


def _checked(ms: float) -> int:
    if not EARLIEST <= ms <= LATEST:
        raise ValueError(f"no time: {ms}")
    return int(ms)


# Most lines are of the same second as the one before.
@lru_cache(maxsize=4096)
def _common_time(text: str) -> int:
    """Return ms since the epoch of `10/Oct/2025:13:55:36 -0700`; without a zone it is UTC."""
    return _minute(text[:17], text[20:]) + int(text[18:20]) * 1000


@lru_cache(maxsize=4096)
def _minute(text: str, zone: str) -> int:
    found = _COMMON_TIME.fullmatch(f"{text}:00{zone}")
    if found is None:
        raise ValueError(f"no time: {text!r}")
    day, month, year, hour, minute, _, sign, hours, minutes = found.groups()
    offset = timedelta(hours=int(hours or 0), minutes=int(minutes or 0)) * (
        -1 if sign == "-" else 1
    )
    time = datetime(
        int(year),
        _MONTHS.index(month) + 1,
        int(day),
        int(hour),
        int(minute),
        tzinfo=timezone(offset),
    )
    return _checked(time.timestamp() * 1000)
