"""What a replay showed, as plain values."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

from ..core.algorithms import SLIDING_WINDOW_COMPACT
from ..core.policy import Rate
from .log import Log
from .running import Candidate, Replay, Run

# The share of the identities that have a higher peak.
QUANTILES = {"p50": 0.5, "p90": 0.1, "p99": 0.01, "max": 0}


def report(replay: Replay, log: Log, share: float) -> dict[str, Any]:
    """Return the report; `share` is the share of requests that may be refused."""
    return {
        "lines": log.lines,
        "replayed": log.replayed,
        "unreadable": log.unreadable,
        "unreadable_samples": log.samples,
        "filtered": log.filtered,
        "from": _iso(replay.first),
        "until": _iso(replay.last),
        "wanted_share": share,
        "policies": [_policy(candidate, share) for candidate in replay.candidates],
    }


def _policy(candidate: Candidate, share: float) -> dict[str, Any]:
    """Return what a policy refused, and the limit to set instead."""
    policy = candidate.policy
    runs = [_run(run, share) for run in candidate.runs]

    return {
        "policy": candidate.text,
        "rate": str(policy.rate),
        "window": policy.window,
        "key": str(policy.key),
        "requests": candidate.requests,
        "identities": candidate.identities,
        "identities_are_approximate": candidate.approximate,
        "without_identity": candidate.without_identity,
        "algorithms": runs,
        "suggestion": _suggestion(candidate, runs),
    }


def _run(run: Run, share: float) -> dict[str, Any]:
    """Return what a policy refused under one algorithm."""
    requests = run.demand.total()
    limit, burst = _sure_limit(run, share)

    return {
        "algorithm": run.algorithm.name,
        "refused": run.refused,
        "refused_share": run.refused / max(1, requests),
        "identities_refused": run.refused_identities,
        "longest_wait": run.longest_wait,
        "most_admitted_in_a_window": run.most_admitted,
        "peak_usage": {
            name: smallest_limit(run.peaks, above) for name, above in QUANTILES.items()
        },
        "limit_for_share": limit,
        "burst_for_share": burst,
        "worst": [
            {"identity": name, "refused": refused}
            for refused, name in reversed(run.worst)
        ],
    }


def smallest_limit(demand: Counter[int], share: float) -> int:
    """Return the smallest limit that at most this share of the numbers exceed."""
    above = demand.total()
    allowed = share * above

    for limit in sorted(demand):
        above -= demand[limit]
        if above <= allowed:
            return limit

    return 0


def _sure_limit(run: Run, share: float) -> tuple[int, int | None]:
    """Return the smallest limit and burst sure to refuse at most a share.

    The burst of a token bucket stays in the same proportion to the limit.
    """
    rate = run.policy.fixed_rate
    burst = run.policy.burst

    limit = max(1, smallest_limit(run.demand, share))
    if burst is not None:
        # A bucket admits each request whose demand is within both limit and burst.
        limit = max(limit, -(-limit * rate.limit // burst))

    # The present limit is sure, where the replay has shown it.
    if run.refused <= share * run.demand.total():
        limit = min(limit, rate.limit)

    maximum = Rate.maximum(rate.window)
    if burst is not None:
        burst = min(-(-limit * burst // rate.limit), maximum)

    return min(limit, maximum), burst


def _suggestion(candidate: Candidate, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an entry for RATE_LIMITER['POLICIES'].

    Of several algorithms it has the exact one that takes little memory.
    """
    by_algorithm = {run["algorithm"]: run for run in runs}
    chosen = by_algorithm.get(SLIDING_WINDOW_COMPACT, runs[0])

    policy = candidate.policy
    rate = Rate(chosen["limit_for_share"], policy.window)

    entry = {
        "rate": str(rate),
        "key": str(policy.key),
        "algo": chosen["algorithm"],
    }

    burst = chosen["burst_for_share"]
    if burst is not None:
        entry["burst"] = burst

    return entry


def _iso(ms: int | None) -> str | None:
    """Return a time as `2023-11-14T22:13:00+00:00`."""
    if ms is None:
        return None

    time = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=ms)
    return time.isoformat()
