"""What a replay found, as plain values, and as text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from ..core.algorithms import SLIDING_WINDOW_COMPACT
from ..core.policy import Rate
from ..management.commands._rlaas.output import (
    Output,
    Styled,
    duration,
    percent,
    plural,
)
from .candidates import Candidate, Run
from .execution import Replay
from .shadow import ShadowLog
from .sources import Log

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def report(
    replays: Sequence[tuple[Replay, Log | ShadowLog]], share: float
) -> dict[str, Any]:
    """Return what was found; `share` is the share of requests that may be refused."""
    for replay, log in replays:
        if isinstance(log, ShadowLog) and not log.filtered:
            for candidate in replay.candidates:
                candidate.add_within_limit(log.decisions - candidate.requests)
    logs = [log for _, log in replays]
    times = [start for replay, _ in replays for start, _ in replay.timeline.steps()]
    ends = [
        start + replay.timeline.width
        for replay, _ in replays
        for start, _ in replay.timeline.steps()
    ]
    samples = [
        {"file": path, "line": number, "text": text}
        for log in logs
        for path, number, text in log.samples
    ]
    return {
        "lines": sum(log.lines for log in logs),
        "replayed": sum(log.lines - log.unreadable - log.filtered for log in logs),
        "unreadable": sum(log.unreadable for log in logs),
        "unreadable_samples": samples,
        "filtered": sum(log.filtered for log in logs),
        "from": _iso(min(times)) if times else None,
        "until": _iso(max(ends)) if times else None,
        "wanted_share": share,
        "policies": [
            _policy(candidate, share)
            for replay, _ in replays
            for candidate in replay.candidates
        ],
    }


def _policy(candidate: Candidate, share: float) -> dict[str, Any]:
    policy = candidate.policy
    runs = [_run(candidate, run, share) for run in candidate.runs]
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


def _run(candidate: Candidate, run: Run, share: float) -> dict[str, Any]:
    limit, burst = _limit_for_share(candidate, run, share)
    peaks = candidate.peaks[run.measure]
    return {
        "algorithm": run.policy.algo,
        "refused": run.refused,
        "refused_share": run.refused / max(1, candidate.requests),
        "identities_refused": run.refused_identities,
        "longest_wait": run.longest_wait / 1000,
        "most_admitted_in_a_window": run.most_admitted,
        "peak_usage": {
            name: peaks.quantile(quantile) for name, quantile in QUANTILES.items()
        },
        "limit_for_share": limit,
        "burst_for_share": burst,
        "worst": [
            {"identity": name, "refused": refused}
            for refused, name in sorted(run.worst, reverse=True)
        ],
    }


def _limit_for_share(
    candidate: Candidate, run: Run, share: float
) -> tuple[int, int | None]:
    """Return the smallest limit that is sure to refuse at most a share, and the burst in the same proportion to it."""
    rate, burst = run.policy.fixed_rate, run.policy.burst
    needed, maximum = (
        candidate.demand[run.measure].smallest_limit(share),
        Rate.maximum(rate.window),
    )
    # A bucket refuses no request whose demand is within both its limit and its burst.
    limit = needed if burst is None else max(needed, -(-needed * rate.limit // burst))
    if run.refused <= share * candidate.requests:  # as the replay has shown
        limit = min(limit, rate.limit)
    if burst is not None:
        burst = min(-(-limit * burst // rate.limit), maximum)
    return min(limit, maximum), burst


def _suggestion(candidate: Candidate, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an entry for RATE_LIMITER['POLICIES']: of several algorithms, the exact one that takes little memory."""
    chosen = next(
        (run for run in runs if run["algorithm"] == SLIDING_WINDOW_COMPACT), runs[0]
    )
    rate = Rate(max(1, chosen["limit_for_share"]), candidate.policy.window)
    entry = {
        "rate": str(rate),
        "key": str(candidate.policy.key),
        "algo": chosen["algorithm"],
    }
    return (
        entry
        if chosen["burst_for_share"] is None
        else {**entry, "burst": chosen["burst_for_share"]}
    )


def policy_entry(policy: dict[str, Any]) -> str:
    """Return the suggestion as it is written in RATE_LIMITER['POLICIES']."""
    name = "per-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", policy["key"])
    return f"{json.dumps(name)}: {json.dumps(policy['suggestion'])},"


def show(found: dict[str, Any], output: Output, seconds: float) -> None:
    """Print a report."""
    output.line(
        f"Replayed {found['replayed']:,} requests, {found['from']} to {found['until']}, in {seconds:.1f} s."
    )
    if found["filtered"]:
        output.line(
            f"{found['filtered']:,} others do not match --path, --method or --status."
        )
    if found["unreadable"]:
        output.line(
            Styled(
                f"{plural(found['unreadable'], 'line')} could not be read:", "WARNING"
            )
        )
        for sample in found["unreadable_samples"]:
            output.line(f"  {sample['file']}:{sample['line']}: {sample['text'][:100]}")
    for policy in found["policies"]:
        _show_policy(policy, output, found["wanted_share"])


def _show_policy(policy: dict[str, Any], output: Output, share: float) -> None:
    about = "about " if policy["identities_are_approximate"] else ""
    output.line()
    output.line(
        Styled(policy["policy"], "MIGRATE_HEADING"),
        f": {policy['requests']:,} requests of {about}{policy['identities']:,} identities",
    )
    if policy["without_identity"]:
        output.line(
            Styled(
                f"{policy['without_identity']:,} requests have no identity to count by.",
                "WARNING",
            )
        )
    window = duration(policy["window"])
    output.line()
    output.table(
        (
            "algorithm",
            *(
                ">refused",
                ">share",
                ">identities",
                ">longest wait",
                f">most in {window}",
            ),
            f">limit for {percent(share)}",
        ),
        [
            (
                run["algorithm"],
                f"{run['refused']:,}",
                Styled(
                    percent(run["refused_share"]),
                    "WARNING" if run["refused_share"] > share else "SUCCESS",
                ),
                f"{run['identities_refused']:,}",
                duration(run["longest_wait"]),
                f"{run['most_admitted_in_a_window']:,}",
                f"{run['limit_for_share']:,}",
            )
            for run in policy["algorithms"]
        ],
    )
    output.line()
    output.table(
        (f"requests of an identity in {window}", *(f">{name}" for name in QUANTILES)),
        [
            (run["algorithm"], *(f"{run['peak_usage'][name]:,}" for name in QUANTILES))
            for run in policy["algorithms"]
        ],
    )
    _show_worst(policy, output)
    output.line()
    output.line(
        f"To refuse at most {percent(share)} of the requests, as an entry of RATE_LIMITER['POLICIES']:"
    )
    output.line(f"  {policy_entry(policy)}")


def _show_worst(policy: dict[str, Any], output: Output) -> None:
    worst = max(policy["algorithms"], key=lambda run: run["refused"])
    if worst["worst"]:
        output.line()
        rows = [(each["identity"], f"{each['refused']:,}") for each in worst["worst"]]
        output.table((f"worst under {worst['algorithm']}", ">refused"), rows)


def _iso(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat()
