"""Look on: status, policies, show, refusals, top, watch."""

from __future__ import annotations

import math
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from itertools import chain
from typing import Any

from django.template.defaultfilters import filesizeformat, pluralize
from django.utils import timezone

from .. import backend, conf
from ..core.keys import split_login
from ..core.policy import DEFAULT, Policy
from ..core.rules import Rule
from ..models import Override
from ..operators import usage
from ..operators.formatting import duration, local_time
from ..operators.identities import describe, describe_one, encode_address
from ..runtime.registry import LimitedView, limited_views
from ..stats import reader
from ..stats.schema import Refusal
from .base import (
    HEADING,
    IDENTITY,
    NUMBER,
    POLICY,
    Output,
    Styled,
    argument,
    find_policy,
    identity_of,
    parse_duration,
    percent,
    require_user,
    subcommand,
)
from .overrides import in_words, override_json
from .replay import limit_in_words, name_of

MOST_REFUSED = 5  # identities that `status` lists
HOUR_FIELDS = ("total", "allowed", "refused", "over", "degraded")
LEVEL_STYLES = {"full": "ERROR", "high": "WARNING", "normal": "SUCCESS"}
CLEAR_SCREEN = "\x1b[H\x1b[2J"
MIDDLEWARE = "rlaas_django.middleware.RateLimitMiddleware"
USAGE_COLUMNS = (
    "Policy",
    "Rate",
    ">Used",
    ">Limit",
    "",
    "Resets in",
    ">Refused today",
    ">Over today",
)
RESULTS = ("refused", "over the limit")
MAX_REFUSALS = 10  # that `show` lists
REFUSAL_COLUMNS = "Time Identity Policy >Used >Limit Result Request Address Wait"


@subcommand(example="manage.py rlaas status")
def status(_options: Namespace, output: Output) -> None:
    """Show Redis, the decisions of the last hour, and who was refused most today."""
    state = usage.server_state()
    hour = reader.total(usage.series("hour"))
    refused, _ = reader.most_refused(MOST_REFUSED)

    if output.as_json:
        output.json(
            {
                "server": state.version,
                "latencyMs": round(state.latency_ms, 3),
                "keys": state.keys,
                "memory": state.rate_limit_memory,
                "lastHour": {name: getattr(hour, name) for name in HOUR_FIELDS},
                "mostRefusedToday": refused,
            }
        )
        return

    for heading, text in _status_lines(state, hour, refused):
        output.line(Styled(f"{heading:11}", HEADING), text)


def _status_lines(
    state: Any,
    hour: reader.Counts,
    refused: dict[str, int],
) -> Iterator[tuple[str, object]]:
    """Yield the lines, each with its heading."""
    keys = f"{state.version}, {state.keys:,} keys"
    if state.rate_limit_memory is not None:
        keys += f", {filesizeformat(state.rate_limit_memory)} used by rate limits"

    yield "Redis", keys
    yield "Latency", f"{state.latency_ms:.1f} ms"

    share = percent(hour.refused / max(1, hour.total))
    yield (
        "Last hour",
        f"{hour.total:,} requests, {hour.refused:,} refused ({share}), "
        f"{hour.over:,} over the limit but allowed",
    )
    if hour.degraded:
        text = f"{hour.degraded:,} were decided without Redis"
        yield "", Styled(text, "WARNING")

    labels = describe(refused)
    heading = "Refused"
    for identity, times in refused.items():
        name = labels[identity].argument
        yield heading, f"{name}  {times:,} time{pluralize(times)} today"
        heading = ""


@subcommand(
    argument("policy", nargs="?", help="Only this policy."),
    example="manage.py rlaas policies",
)
def policies(options: Namespace, output: Output) -> None:
    """List the limits of the settings, of middleware rules and of views."""
    rows = [row for row in _uses() if options.policy in (None, row["policy"])]
    if not rows:
        find_policy(options.policy)  # raises the error that names the nearest

    if output.as_json:
        output.json(rows)
    else:
        output.table([*rows[0]], ([*row.values()] for row in rows))


def _uses() -> Iterator[dict[str, Any]]:
    """Yield a row for each use of a policy, and for each policy without one."""
    config = conf.config()
    policies = usage.policies()

    uses = [_use_of_rule(rule) for rule in config.rules]
    if not config.rules and MIDDLEWARE in conf.middleware():
        uses.append(LimitedView("rule /", (DEFAULT,), {}))
    uses += sorted(limited_views(), key=lambda view: view.name)

    used = {str(policy) for use in uses for policy in use.policies}
    for name in sorted(policies.keys() - used):
        where = "settings" if name in config.policies else "code"
        uses.append(LimitedView(where, (name,), {}))

    for use in uses:
        for name in map(str, use.policies):
            policy = policies.get(name)  # None: an exemption, or an undefined name
            yield {
                "where": use.name,
                "policy": name,
                "limit": limit_in_words(policy),
                "options": ", ".join(_options_in_words(policy, use.options)),
            }


def _use_of_rule(rule: Rule) -> LimitedView:
    path = rule.path or "/"
    if rule.regex is not None:
        path = rule.regex.pattern

    options = {"methods": rule.methods, "charge_when": rule.charge_when}
    return LimitedView(f"rule {path}", rule.policies or ("exempt",), options)


def _options_in_words(
    policy: Policy | None, options: Mapping[str, Any]
) -> Iterator[str]:
    """Yield what is said of a policy, and of its use by a rule or a view."""
    if options.get("methods"):
        yield f"method {','.join(sorted(options['methods']))}"
    if options.get("charge_when"):
        yield f"charge when {name_of(options['charge_when'])}"
    if not options.get("block", True):
        yield "block=False"
    if policy is None:
        return
    if policy.shadow:
        yield "shadow"
    if policy.on_failure != "open":
        yield f"on failure {policy.on_failure}"


@subcommand(
    IDENTITY,
    argument("--all", action="store_true", help="Also policies without usage."),
    example="manage.py rlaas show alice",
)
def show(options: Namespace, output: Output) -> None:
    """Show what an identity used, and why it was refused.

    The usage under each policy, the overrides that apply, and the latest refusals.
    """
    identity = identity_of(options.identity)
    rows = usage.identity_rows(identity)
    counted = {identity, *(row.outcome.identity for row in rows)}
    refusals = _refusals(counted, options.identity)
    overrides = _overrides(identity, refusals)
    if not options.all:
        rows = [row for row in rows if row.is_used or row.override]
    if not any((rows, overrides, refusals)):
        require_user(options.identity, identity)

    if output.as_json:
        output.json(
            {
                "identity": identity,
                "policies": [*map(_usage_json, rows)],
                "overrides": [*map(override_json, overrides)],
                "refusals": [*map(_refusal_json, refusals)],
            }
        )
        return

    label = describe_one(identity)
    output.line(Styled(label.name, HEADING), f"  {label.kind_name}, {identity}")
    if rows:
        output.table(USAGE_COLUMNS, map(_usage_cells, rows))
    else:
        output.line("No current usage.")
    for override in overrides:
        output.line(Styled(in_words(override), "WARNING"), f": {override.reason}")
    _show_refusals(refusals, output)


def _refusals(counted: set[str], address: str) -> list[Refusal]:
    """Return the latest refusals of some identities, their logins, or an address."""
    return [
        refusal
        for refusal in reader.refusals(usage.policies())
        if counted & {refusal.identity, split_login(refusal.identity)[0]}
        or refusal.address == address
    ][:MAX_REFUSALS]


def _overrides(identity: str, refusals: list[Refusal]) -> list[Override]:
    """Return the overrides of an identity, and of all clients of its addresses."""
    addresses = [encode_address(refusal.address) or "" for refusal in refusals]
    active = Override.objects.active().matching([identity, *addresses])
    return [
        override
        for override in dict.fromkeys(chain(*active.values()))
        if override.every_client or override in active[identity]
    ]


def _show_refusals(refusals: list[Refusal], output: Output) -> None:
    if not refusals:
        output.line("No request was over a limit lately.")
        return

    labels = describe({refusal.identity for refusal in refusals})
    rows = [
        (
            f"{local_time(refusal.at):%Y-%m-%d %H:%M:%S}",
            labels[refusal.identity].argument,
            refusal.policy,
            refusal.count,
            refusal.limit,
            RESULTS[refusal.over],
            refusal.request,
            refusal.address,
            duration(refusal.retry_after),
        )
        for refusal in refusals
    ]
    output.table(REFUSAL_COLUMNS.split(), rows)


def _refusal_json(refusal: Refusal) -> dict[str, Any]:
    values = asdict(refusal)
    values["at"] = local_time(refusal.at).isoformat()
    values["retryAfter"] = values.pop("retry_after")
    if refusal.retry_after == math.inf:
        values["retryAfter"] = None
    return values


@subcommand(
    argument("identity", nargs="?", default="", help="Only those of this identity."),
    POLICY,
    argument("--path", default="", help="Only requests with this in their path."),
    argument(
        "--since",
        type=parse_duration,
        default="7d",
        metavar="DURATION",
        help="How far back: 30m, 12h; 7d.",
    ),
    NUMBER,
    example="manage.py rlaas refusals --path /api/ --since 1h",
)
def refusals(options: Namespace, output: Output) -> None:
    """List who was refused or over a limit, when and where, the latest first."""
    find_policy(options.policy)
    identities = []
    if options.identity:
        identities.append(identity_of(options.identity))

    latest = usage.refusals(
        options.policy,
        options.identity,
        identities,
        options.path,
        time.time() - options.since.total_seconds(),
    )[: max(1, options.number)]

    if output.as_json:
        output.json([*map(_refusal_json, latest)])
    else:
        _show_refusals(latest, output)


def _usage_cells(row: usage.Row) -> tuple[object, ...]:
    """Return the cells of a table with USAGE_COLUMNS."""
    outcome = row.outcome
    resets_in = ""
    if outcome.current_count:
        resets_in = duration(outcome.reset_after)
    policy = outcome.policy.name
    if row.identity.address:
        policy += f" at {row.identity.address}"

    return (
        policy,
        outcome.policy.rate,
        Styled(outcome.current_count, LEVEL_STYLES[row.level]),
        outcome.limit,
        f"{row.percent} %",
        resets_in,
        row.refused_today,
        row.over_today,
    )


def _usage_json(row: usage.Row) -> dict[str, Any]:
    outcome = row.outcome
    return {
        "identity": outcome.identity,
        "policy": outcome.policy.name,
        "used": outcome.current_count,
        "limit": outcome.limit,
        "refusedToday": row.refused_today,
        "overLimitToday": row.over_today,
        "override": row.override and row.override.kind,
        "allowed": outcome.allowed,
        "retryAfter": outcome.retry_after,
        "resetAfter": outcome.reset_after,
    }


@subcommand(POLICY, NUMBER, example="manage.py rlaas top --policy login")
def top(options: Namespace, output: Output) -> None:
    """List the identities over a limit or near it, the highest usage first."""
    rows = _top(options)
    if output.as_json:
        output.json([*map(_usage_json, rows)])
    else:
        _show_top(rows, output)


def _top(options: Namespace) -> list[usage.Row]:
    """Return the highest usage."""
    find_policy(options.policy)
    rows = usage.watch_list(options.policy or None)
    rows = [row for row in rows if row.percent]
    return rows[: max(1, options.number)]


def _show_top(rows: list[usage.Row], output: Output) -> None:
    if rows:
        cells = [(row.identity.argument, *_usage_cells(row)) for row in rows]
        output.table(("Identity", *USAGE_COLUMNS), cells)
    else:
        output.line("No identity is near a limit.")


@subcommand(
    POLICY,
    NUMBER,
    argument(
        "--interval", type=float, default=1.0, help="Seconds between two looks; 1."
    ),
    argument(
        "--times", type=int, default=sys.maxsize, help="Stop after so many looks."
    ),
    example="manage.py rlaas watch --interval 2",
)
def watch(options: Namespace, output: Output) -> None:
    """Watch who is near a limit, like top; Ctrl-C ends it.

    Piped, it prints a line per interval.
    """
    for number in range(options.times):
        if number:
            time.sleep(max(0.1, options.interval))

        try:
            _look(options, output)
        except backend.UnavailableError as error:  # it may be available again
            output.line(Styled(f"Redis is unavailable: {error}", "ERROR"))


def _look(options: Namespace, output: Output) -> None:
    """Print what there is now."""
    rows = _top(options)
    counts = usage.series("hour")[-1]  # of this minute
    now = datetime.now(timezone.get_current_timezone())

    if output.as_json:
        line = {
            "at": now.isoformat(),
            "requests": counts.total,
            "refused": counts.refused,
            "over": counts.over,
            "top": [*map(_usage_json, rows)],
        }
        output.json(line, indent=None)
        return

    requests = f"{counts.total} requests, {counts.refused} refused"
    over = f"{counts.over} over the limit but allowed"
    summary = f"{now:%H:%M:%S}  this minute: {requests}, {over}"

    if output.stdout.isatty():
        output.stdout.write(CLEAR_SCREEN, ending="")
        output.line(Styled(summary, HEADING))
        _show_top(rows, output)
    else:
        highest = [
            f"; {row.identity.argument} {row.percent} % of {row.outcome.policy}"
            for row in rows[:3]
        ]
        output.line(summary, *highest)
