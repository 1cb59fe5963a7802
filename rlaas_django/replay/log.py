"""Access logs: the common and the combined format, and JSON lines.

nginx, Apache and gunicorn write the first two by default. A log is a file, which may
be compressed, or standard input.
"""

from __future__ import annotations

import gzip
import heapq
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from io import BufferedIOBase, BufferedReader
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

STDIN = "-"
GZIP = b"\x1f\x8b"  # what a compressed file begins with
MAX_LINE = 1 << 16  # bytes; what follows them in a line is skipped
MAX_NAME = 256  # characters of an address or a user's name that are kept
SAMPLES = 5  # lines that cannot be read, to show
MAX_SAMPLE = 200  # characters of such a line

# Servers log a request when it ends, so lines are a little out of order.
SORTED_TOGETHER = 4096  # requests

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

COMMON_TIME = "%d/%b/%Y:%H:%M:%S %z"
EARLIEST = 946_684_800_000  # ms; the year 2000
LATEST = 253_402_300_799_000  # ms; the year 9999

# What makes ms of s, ms, µs and ns since the epoch. Only one of them makes ms that are
# between EARLIEST and LATEST.
_SCALES = (1e3, 1.0, 1e-3, 1e-6)
_COMMON = re.compile(
    r"(?P<ip>\S{1,256}) \S+ (?P<user>[^\[]{0,256}?) ?"
    r"\[(?P<time>[^\]]{17,32})\] "
    r'"(?P<method>[A-Z]{1,20}) (?P<path>\S+)[^"]*" '
    r"(?P<status>\d{3})\b"
)
_by_time = attrgetter("at")


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
        match = _COMMON.match(line)
        try:
            if match is not None:
                return _make_request(match.groupdict(), {})

            return self._parse_json(json.loads(line))
        except (ValueError, RecursionError):
            return None

    def _parse_json(self, entry: Any) -> Request | None:
        """Return the request of a JSON line, or None without any identity."""
        if not isinstance(entry, dict):
            return None

        texts = {}
        for name, fields in self._fields.items():
            texts[name] = _first_value(entry, fields)

        more = {name: texts[name][:MAX_NAME] for name in self._more if texts[name]}
        if not (texts["ip"] or texts["user"] or more):
            return None

        if not texts["path"]:
            # A request line: GET /api/items HTTP/1.1
            texts["method"], _, rest = texts["request"].partition(" ")
            texts["path"] = rest.partition(" ")[0]

        return _make_request(texts, more)


def _first_value(entry: dict[str, Any], fields: Sequence[str]) -> str:
    """Return the first of the fields that is there, as text; '' for none."""
    for field in fields:
        value = _value(entry, field)
        if value is not None:
            return str(value)

    return ""


def _value(entry: Any, field: str) -> Any:
    """Return the value of a field; `client.addr` is also one inside of another."""
    if field in entry:
        return entry[field]

    for name in field.split("."):
        if not isinstance(entry, dict):
            return None
        entry = entry.get(name)

    return entry


def _make_request(texts: Mapping[str, str], more: Mapping[str, str]) -> Request:
    user = texts["user"]
    if user == "-":
        user = ""

    return Request(
        at=parse_time(texts["time"]),
        ip=texts["ip"][:MAX_NAME],
        user=user[:MAX_NAME],
        method=texts["method"].upper(),
        path=texts["path"],
        status=int(texts["status"] or 0),
        more=more,
    )


@lru_cache(maxsize=4096)  # most lines are of the same second as the one before
def parse_time(text: str) -> int:
    """Return a time as ms since the epoch; ValueError for what is not a time.

    It is a number since the epoch, an ISO 8601 time or one of a common log.
    """
    try:
        number = float(text)
    except ValueError:
        number = _parse_date(text).timestamp()

    for scale in _SCALES:
        ms = scale * number
        if EARLIEST <= ms <= LATEST:
            return int(ms)

    raise ValueError(f"{text!r} is not a time of an access log.")


def _parse_date(text: str) -> datetime:
    """Return the time of an ISO 8601 text or of a common log; by default in UTC."""
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        return datetime.strptime(text, COMMON_TIME)

    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)

    return date


class Log:
    """Some files as one log, in the order of time. A context manager, which closes."""

    def __init__(
        self,
        paths: Sequence[str],
        parser: LineParser,
        is_wanted: Callable[[Request], bool],
    ) -> None:
        self._parser = parser
        self._is_wanted = is_wanted

        self.replayed = 0
        self.filtered = 0
        self.unreadable = 0
        self.samples: list[dict[str, Any]] = []  # some of the unreadable lines

        self._files = {path: _open(path) for path in paths}

        self._size = 0  # bytes; 0 where it is not known, as of a pipe
        if all(map(os.path.isfile, paths)):
            self._size = sum(map(os.path.getsize, paths))

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    @property
    def lines(self) -> int:
        """How many lines were read; blank ones do not count."""
        return self.replayed + self.filtered + self.unreadable

    @property
    def share_read(self) -> float | None:
        """Which share of the files was read; None where it is not known."""
        if not self._size:
            return None

        read = sum(file.tell() for file in self._files.values())
        return read / self._size

    def batches(self) -> Iterator[list[Request]]:
        """Yield the requests, sorted by time within a batch; files are merged."""
        streams = [self._requests(path, file) for path, file in self._files.items()]
        merged = heapq.merge(*streams, key=_by_time)

        while batch := sorted(islice(merged, SORTED_TOGETHER), key=_by_time):
            yield batch

    def _requests(self, path: str, file: BufferedReader) -> Iterator[Request]:
        """Yield the requests of one file that are wanted."""
        number = 0
        try:
            for number, line in enumerate(_lines(file), 1):
                request = self._parser.parse(line)

                if request is None:
                    self._add_unreadable(path, number, line)
                elif self._is_wanted(request):
                    self.replayed += 1
                    yield request
                else:
                    self.filtered += 1
        except (OSError, EOFError, zlib.error) as error:
            # Of a compressed file that is cut off.
            self._add_unreadable(path, number + 1, str(error))

    def _add_unreadable(self, path: str, number: int, text: str) -> None:
        """Count a line that cannot be read, unless it is blank."""
        text = text.rstrip()
        if not text:
            return

        self.unreadable += 1
        if len(self.samples) < SAMPLES:
            text = text[:MAX_SAMPLE]
            self.samples.append({"file": path, "line": number, "text": text})


def _open(path: str) -> BufferedReader:
    if path == STDIN:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    return open(path, "rb")


def _lines(file: BufferedReader) -> Iterator[str]:
    """Yield the lines of a file, which may be compressed."""
    stream: BufferedIOBase = file
    if file.peek(2).startswith(GZIP):
        stream = gzip.GzipFile(fileobj=file)

    while line := stream.readline(MAX_LINE):
        yield line.decode("utf-8", "backslashreplace")

        while line and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE)
