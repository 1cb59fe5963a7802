"""Where log lines come from: files, also compressed ones, and standard input."""

from __future__ import annotations

import gzip
import heapq
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import IO, Any

from .log_lines import LineParser, Request

STDIN = "-"
CHUNK = 1 << 20  # bytes that are read at once
MAX_LINE = 1 << 16  # bytes of a line that are kept while its end is not read yet
# Servers log a request when it ends, so lines are a little out of order.
SORTED_TOGETHER = 4096  # requests
SAMPLES = 5  # lines that cannot be read, to show
MAX_SAMPLE = 200  # characters of such a line

_by_time = attrgetter("at")


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

        self._files: dict[str, IO[bytes]] = {}
        for path in paths:
            if path == STDIN:
                self._files[path] = sys.stdin.buffer
            else:
                self._files[path] = open(path, "rb")  # noqa: SIM115  (`__exit__`)

        self._size = 0  # bytes; 0 where it is not known, as of a pipe
        if all(map(os.path.isfile, paths)):
            self._size = sum(map(os.path.getsize, paths))

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        for path, file in self._files.items():
            if path != STDIN:
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
        return sum(file.tell() for file in self._files.values()) / self._size

    def batches(self) -> Iterator[list[Request]]:
        """Yield the requests, sorted by time within a batch; files are merged."""
        streams = [self._requests(path, file) for path, file in self._files.items()]
        merged = heapq.merge(*streams, key=_by_time)
        while batch := sorted(islice(merged, SORTED_TOGETHER), key=_by_time):
            yield batch

    def _requests(self, path: str, file: IO[bytes]) -> Iterator[Request]:
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
        if not text.strip():
            return

        self.unreadable += 1
        if len(self.samples) < SAMPLES:
            text = text[:MAX_SAMPLE]
            self.samples.append({"file": path, "line": number, "text": text})


def _lines(file: Any) -> Iterator[str]:
    """Yield the lines of a file, which may be compressed.

    Of a very long line, the beginning and the end are kept.
    """
    stream = file
    if file.peek(2).startswith(b"\x1f\x8b"):
        stream = gzip.GzipFile(fileobj=file)

    rest = b""
    while chunk := stream.read(CHUNK):
        data, _, rest = (rest + chunk).rpartition(b"\n")
        rest = rest[:MAX_LINE]
        if data:
            yield from data.decode("utf-8", "backslashreplace").split("\n")

    if rest:
        yield rest.decode("utf-8", "backslashreplace")
