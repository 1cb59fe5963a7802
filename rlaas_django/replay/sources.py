"""Where log lines come from: files, compressed ones too, and standard input, in the order of time."""

from __future__ import annotations

import gzip
import heapq
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import IO, Any

from .log_lines import LineParser, Request

STDIN = "-"
CHUNK = 1 << 20  # bytes that are read at once
MAX_LINE = 1 << 16  # bytes of a line that are kept while its end is not read yet
SORTED_TOGETHER = 4096  # requests; servers log a request when it ends, so lines are a little out of order
SAMPLES = 5  # lines that cannot be read, to show


class Log:
    """Some files as one log."""

    def __init__(
        self, paths: Sequence[str], parser: LineParser, keep: Callable[[Request], bool]
    ) -> None:
        self._line_parser, self._keep = parser, keep
        self._files: list[tuple[str, IO[bytes]]] = []
        self.lines = self.filtered = self.unreadable = 0
        self.samples: list[tuple[str, int, str]] = []  # file, line number, text
        self.size: int | None = 0  # bytes; None for standard input
        for path in paths:
            file = sys.stdin.buffer if path == STDIN else open(path, "rb")  # noqa: SIM115  (closed by `__exit__`)
            self._files.append((path, file))
            is_file = path != STDIN and os.path.isfile(path)
            self.size = (
                self.size + os.path.getsize(path)
                if is_file and self.size is not None
                else None
            )

    @property
    def share_read(self) -> float | None:
        """Which share of the files was read; None where nobody knows."""
        if not self.size:
            return None
        return sum(file.tell() for _, file in self._files) / self.size

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        for path, file in self._files:
            if path != STDIN:
                file.close()

    def batches(self) -> Iterator[list[Request]]:
        """Yield the requests, sorted by time within a batch; files are merged by time."""
        streams = [self._requests(path, file) for path, file in self._files]
        merged: Iterator[Request] = (
            streams[0]
            if len(streams) == 1
            else heapq.merge(*streams, key=itemgetter(0))
        )
        while batch := list(islice(merged, SORTED_TOGETHER)):
            batch.sort(key=itemgetter(0))
            yield batch

    def _requests(self, path: str, file: IO[bytes]) -> Iterator[Request]:
        parse, keep, number = self._line_parser.parse, self._keep, 0
        try:
            for number, line in enumerate(_lines(file), 1):
                request = parse(line)
                if request is None:
                    if line and not line.isspace():
                        self.lines += 1
                        self._add_unreadable(path, number, line)
                    continue
                self.lines += 1
                if keep(request):
                    yield request
                else:
                    self.filtered += 1
        except (
            OSError,
            EOFError,
            zlib.error,
        ) as error:  # a compressed file that is cut off
            self._add_unreadable(path, number + 1, str(error))

    def _add_unreadable(self, path: str, number: int, line: str) -> None:
        self.unreadable += 1
        if len(self.samples) < SAMPLES:
            self.samples.append((path, number, line[:200]))


def _lines(file: Any) -> Iterator[str]:
    """Yield the lines of a file, which may be compressed; of a very long line, the beginning and the end."""
    stream: Any = (
        gzip.GzipFile(fileobj=file) if file.peek(2).startswith(b"\x1f\x8b") else file
    )
    rest = b""
    while chunk := stream.read(CHUNK):
        data, _, end = (rest + chunk).rpartition(b"\n")
        rest = end[:MAX_LINE]
        if data:
            yield from data.decode("utf-8", "backslashreplace").split("\n")
    if rest:
        yield rest.decode("utf-8", "backslashreplace")
