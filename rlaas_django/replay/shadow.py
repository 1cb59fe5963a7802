"""What the statistics recorded about a shadow policy, as a log.

They have each request that was over the limit (up to 1,000, for up to a week), with the usage at that time, and numbers
for the others. So the requests before one that was over the limit are spread over its window; requests of identities
that never were over it are counted, and not replayed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from ..core.keys import decode
from ..core.policy import Policy
from ..stats import reader, schema
from ..stats.schema import Refusal
from .log_lines import Request


class ShadowLog:
    """The record of one shadow policy; it has what a `Log` has."""

    unreadable = 0
    samples: tuple[tuple[str, int, str], ...] = ()
    share_read = None

    def __init__(self, policy: Policy, keep: Callable[[Request], bool]) -> None:
        self.policy, self._keep = policy, keep
        self._refusals = [each for each in reader.refusals([policy.name]) if each.over]
        # If the record is full, what was before its beginning is not in it.
        since = (
            self._refusals[-1].at // schema.HOUR * schema.HOUR
            if len(self._refusals) >= schema.MAX_REFUSALS
            else 0
        )
        counts = [
            each
            for each in reader.hours([policy.name])[policy.name]
            if each.start >= since
        ]
        self.decisions = sum(each.total for each in counts)
        self.unlogged = sum(each.unlogged for each in counts)
        self.lines = self.filtered = 0

    def __enter__(self) -> ShadowLog:
        return self

    def __exit__(self, *_: object) -> None:
        """Close nothing."""

    def batches(self) -> Iterator[list[Request]]:
        """Yield the requests, sorted by time."""
        found = sorted(self._requests())
        self.lines = len(found)
        kept = [request for request in found if self._keep(request)]
        self.filtered = len(found) - len(kept)
        if kept:
            yield kept

    def _requests(self) -> Iterator[Request]:
        by_identity: dict[str, list[Refusal]] = defaultdict(list)
        for refusal in reversed(self._refusals):  # the oldest first
            by_identity[refusal.identity].append(refusal)
        for identity, refusals in by_identity.items():
            kind, name = decode(identity)
            more = (
                {} if kind in ("ip", "user", "global") else {str(self.policy.key): name}
            )
            ip, user = name if kind == "ip" else "", name if kind == "user" else ""
            for at, refusal in _times(refusals):
                yield Request(at, ip, user, refusal.method, refusal.path, 0, more)


def _times(refusals: Iterable[Refusal]) -> Iterator[tuple[int, Refusal]]:
    """Yield the times of an identity's requests: those that were over the limit, and those that were counted before."""
    admitted: list[int] = []
    latest = 0
    for refusal in refusals:
        now, window = int(refusal.at * 1000), refusal.window * 1000
        admitted = [at for at in admitted if at > now - window]
        missing = refusal.count - len(admitted)
        start = max(latest, now - window)
        added = [
            start + (now - start) * (i + 1) // (missing + 1) for i in range(missing)
        ]
        admitted += added
        for at in (*added, now):
            yield at, refusal
        latest = now
