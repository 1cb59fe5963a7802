"""A small client: so many requests, some of them waiting at the server at any time, and the time that they took."""

from __future__ import annotations

import collections
import socket
import time


class Line:
    """A connection that is asked over and over; opened anew when the server closes it after an answer."""

    def __init__(self, port: int, path: str, headers: str, body: str) -> None:
        self.port = port
        headers += "" if "Accept:" in headers else "Accept: */*\r\n"
        headers += f"Content-Length: {len(body)}\r\n" if body else ""
        method = "POST" if body else "GET"
        self.request = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n{body}".encode()
        self.socket: socket.socket | None = None

    def ask(self) -> None:
        if self.socket is None:
            self.socket = socket.create_connection(("127.0.0.1", self.port), timeout=30)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(self.request)

    def answer(self) -> tuple[int, bytes]:
        """The status, and the body."""
        data = b""
        while True:
            more = self.socket.recv(65_536)
            data += more
            head, _, body = data.partition(b"\r\n\r\n")
            if self._is_whole(head.lower(), body):
                break
            if not more:
                raise ConnectionError(f"an answer ended early: {data[:200]!r}")
        if b"\r\nconnection: close" in head.lower():
            self.close()
        return int(data[9:12]), body

    @staticmethod
    def _is_whole(head: bytes, body: bytes) -> bool:
        if b"transfer-encoding: chunked" in head:
            return body.endswith(b"0\r\n\r\n")
        _, found, length = head.partition(b"content-length:")
        return bool(found) and len(body) >= int(length.partition(b"\r\n")[0])

    def close(self) -> None:
        if self.socket:
            self.socket.close()
            self.socket = None


def load(
    port: int, path: str, requests: int, lines: int, status: int | None, *, headers: str = "", body: str = ""
) -> float:
    """Seconds for so many requests, each to be answered by the status, if one is given; with a body by POST.

    Answers are read in the order of the questions, which is the order in which a server of one worker gives them.
    """
    waiting = collections.deque(Line(port, path, headers, body) for _ in range(lines))
    began = time.perf_counter()
    for line in waiting:
        line.ask()
    for i in range(requests):
        line = waiting.popleft()
        found, answer = line.answer()
        if status and found != status:
            raise RuntimeError(f"{path} answered {found}, not {status}{f': {answer[:200]!r}' if found == 500 else ''}")
        if i < requests - lines:
            line.ask()
            waiting.append(line)
        else:
            line.close()
    return time.perf_counter() - began
