"""Lines of access logs: the common and the combined format, and JSON.

nginx, Apache and gunicorn write the first two by default.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

# Where a JSON line has what we need, by the names that servers and log shippers use.
# The first field that is there counts.
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
    # The request line, where method and path are not apart.
    "request": ("request", "request_line"),
}
EARLIEST = 946_684_800_000  # ms; the year 2000
LATEST = 253_402_300_799_000  # ms; the year 9999
MAX_NAME = 256  # characters of an address or a user's name that are kept

# The least number that is in ns, µs, ms or s since the epoch, and what makes it ms.
_SCALES = ((1e17, 1e-6), (1e14, 1e-3), (1e11, 1.0), (0.0, 1e3))
_COMMON = re.compile(
    r"(?P<ip>\S{1,256}) \S+ (?P<user>[^\[]{0,256}?) ?"
    r"\[(?P<time>[^\]]{17,32})\] "
    r'"(?P<method>[A-Z]{1,20}) (?P<path>\S+)[^"]*" '
    r"(?P<status>\d{3})\b"
)


class Request(NamedTuple):
    """A request as a log tells it; what it does not tell is empty."""

    at: int  # ms since the epoch
    ip: str
    user: str
    method: str
    path: str  # with its query
    status: int
    # Other fields of a JSON line that were mapped: `token`, `header:X-Api-Key`.
    more: Mapping[str, str] = {}


class LineParser:
    """A parser of lines of any of the formats.

    `fields` says where JSON lines have what, such as `{"ip": "client.addr"}`.
    """

    def __init__(self, fields: Mapping[str, str] | None = None) -> None:
        mapped = {name: (field,) for name, field in (fields or {}).items()}
        self._fields = {**FIELDS, **mapped}
        self._more = mapped.keys() - FIELDS.keys()

    def parse(self, line: str) -> Request | None:
        """Return the request of a line, or None for a line that cannot be read."""
        try:
            match = _COMMON.match(line)
            if match is not None:
                return _make_request(match.groupdict(), match["time"], {})
            if line.lstrip().startswith("{"):
                return self._parse_json(json.loads(line))
        except (ValueError, TypeError, OverflowError, RecursionError):
            pass
        return None

    def _parse_json(self, entry: dict[str, Any]) -> Request | None:
        """Return the request of a JSON line, or None without any identity."""
        values = {name: self._value(entry, name) for name in self._fields}
        texts = {name: str(value) for name, value in values.items()}
        more = {name: texts[name][:MAX_NAME] for name in self._more if texts[name]}
        if not (texts["ip"] or texts["user"] or more):
            return None

        if not texts["path"]:
            # A request line: GET /api/items HTTP/1.1
            texts["method"], _, rest = texts["request"].partition(" ")
            texts["path"] = rest.partition(" ")[0]

        return _make_request(texts, values["time"], more)

    def _value(self, entry: dict[str, Any], name: str) -> Any:
        """Return the first of the fields that is there; '' for none."""
        for field in self._fields[name]:
            value = _field(entry, field)
            if value is not None:
                return value
        return ""


def _make_request(texts: dict[str, str], time: Any, more: dict[str, str]) -> Request:
    user = texts["user"]
    if user == "-":
        user = ""

    return Request(
        parse_time(time),
        texts["ip"][:MAX_NAME],
        user[:MAX_NAME],
        texts["method"].upper(),
        texts["path"],
        int(texts["status"] or 0),
        more,
    )


def _field(entry: Any, field: str) -> Any:
    """Return a field; `client.addr` is also one inside of another."""
    if field in entry:
        return entry[field]

    for name in field.split("."):
        entry = entry.get(name) if isinstance(entry, dict) else None
    return entry


def parse_time(value: Any) -> int:
    """Return a time as ms since the epoch; ValueError for what is not a time.

    It is a number since the epoch, an ISO 8601 time or one of a common log.
    """
    if isinstance(value, str):
        return _parse_text(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        for least, factor in _SCALES:
            if value >= least:
                return _checked(value * factor)

    raise ValueError(f"{value!r} is not a time.")


@lru_cache(maxsize=4096)  # most lines are of the same second as the one before
def _parse_text(text: str) -> int:
    """Return a time that is written as text as ms since the epoch."""
    with suppress(ValueError):
        return parse_time(float(text))

    with suppress(ValueError):
        return _milliseconds(datetime.fromisoformat(text))

    form = "%d/%b/%Y:%H:%M:%S"
    if " " in text:
        form += " %z"
    return _milliseconds(datetime.strptime(text, form))


def _milliseconds(time: datetime) -> int:
    """Return a time as ms since the epoch; without a zone it is in UTC."""
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)

    return _checked(time.timestamp() * 1000)


def _checked(ms: float) -> int:
    """Return ms as a whole number; ValueError where it is not a plausible time."""
    if not EARLIEST <= ms <= LATEST:
        raise ValueError(f"{ms} is not a time of an access log.")

    return int(ms)
