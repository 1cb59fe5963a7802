"""Look on: status, policies, show, top, watch, history."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from django.template.defaultfilters import filesizeformat, pluralize
from django.utils import timezone

from .. import backend, conf
from ..core.policy import DEFAULT, Policy, Rate
from ..core.rules import Rule
from ..models import OperatorAction, Override
from ..operators import usage
from ..operators.formatting import duration
from ..operators.identities import describe, describe_one
from ..runtime import registry
from ..stats import reader
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
    minute,
    percent,
    subcommand,
)
from .overrides import kind_and_amount_of, override_json, scope

MOST_REFUSED = 5  # identities that `status` lists
HOUR_FIELDS = ("total", "allowed", "refused", "over", "degraded")
LEVEL_STYLES = {"full": "ERROR", "high": "WARNING", "normal": "SUCCESS"}
CLEAR_SCREEN = "\x1b[H\x1b[2J"
MIDDLEWARE = "rlaas_django.middleware.RateLimitMiddleware"
POLICY_COLUMNS = ("where", "policy", "rate", "key", "algorithm", "options")
USAGE_COLUMNS = ("Policy", ">Used", ">Limit", "", "Resets in", ">Refused today")
HISTORY_FIELDS = ("by", "via", "action", "identity", "policy", "amount", "reason")


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
        cells = [[row[column] or "" for column in POLICY_COLUMNS] for row in rows]
        output.table(POLICY_COLUMNS, cells)


def _uses() -> Iterator[dict[str, Any]]:
    """Yield a row for each use of a policy, and for each policy without one."""
    config = conf.config()
    policies = usage.policies()

    uses = [
        (f"rule {_describe_rule(rule)}", name)
        for rule in config.rules
        for name in rule.policies or ("exempt",)
    ]
    if not config.rules and MIDDLEWARE in conf.middleware():
        uses = [("rule /", DEFAULT)]

    for view in sorted(registry.limited_views(), key=lambda view: view.name):
        uses += [(view.name, str(policy)) for policy in view.policies]

    for where, name in uses:
        yield _policy_row(where, name, policies.get(name))

    used = {name for _, name in uses}
    for name in sorted(policies.keys() - used):
        where = "settings" if name in config.policies else "code"
        yield _policy_row(where, name, policies[name])


def _policy_row(where: str, name: str, policy: Policy | None) -> dict[str, Any]:
    """Return a row; without a policy, of an exemption or of an undefined name."""
    row: dict[str, Any] = dict.fromkeys(POLICY_COLUMNS)
    row.update(where=where, policy=name)
    if policy is None:
        return row

    options = []
    if policy.burst:
        options.append(f"burst {policy.burst}")
    if policy.shadow:
        options.append("shadow")
    if policy.on_failure != "open":
        options.append(f"on failure {policy.on_failure}")

    key = policy.key
    if not isinstance(key, str):
        key = getattr(key, "__qualname__", repr(key))

    rate = "by a function"
    if isinstance(policy.rate, Rate):
        rate = str(policy.rate)

    row.update(
        rate=rate,
        key=key,
        algorithm=policy.algo or conf.config().algo,
        options=", ".join(options),
    )
    return row


def _describe_rule(rule: Rule) -> str:
    """Return what a rule matches: `GET,HEAD /api/`."""
    path = rule.path or "/"
    if rule.regex is not None:
        path = rule.regex.pattern

    if rule.methods:
        return f"{','.join(sorted(rule.methods))} {path}"
    return path


@subcommand(
    IDENTITY,
    argument("--all", action="store_true", help="Also policies without usage."),
    example="manage.py rlaas show alice",
)
def show(options: Namespace, output: Output) -> None:
    """Show what an identity used under each policy.

    Also when it may go on, and which overrides apply.
    """
    identity = identity_of(options.identity)
    rows = usage.identity_rows(identity)
    if not options.all:
        rows = [row for row in rows if row.outcome.current_count or row.override]
    overrides = Override.objects.active().matching([identity])[identity]

    if output.as_json:
        output.json(
            {
                "identity": identity,
                "policies": [_usage_json(row) for row in rows],
                "overrides": [override_json(override) for override in overrides],
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
        output.line(
            Styled(kind_and_amount_of(override), "WARNING"),
            f" under {scope(override)}"
            f" until {override.until:%Y-%m-%d %H:%M %Z}: {override.reason}",
        )


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
        Styled(outcome.current_count, LEVEL_STYLES[row.level]),
        outcome.limit,
        f"{row.percent} %",
        resets_in,
        row.refused_today,
    )


def _usage_json(row: usage.Row) -> dict[str, Any]:
    outcome = row.outcome
    return {
        "identity": outcome.identity,
        "policy": outcome.policy.name,
        "used": outcome.current_count,
        "limit": outcome.limit,
        "refusedToday": row.refused_today,
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
        output.json([_usage_json(row) for row in rows])
    else:
        _show_top(rows, output)


def _top(options: Namespace) -> list[usage.Row]:
    """Return the highest usage."""
    find_policy(options.policy)
    rows = usage.watch_list(options.policy or None)
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
            "top": [_usage_json(row) for row in rows],
        }
        output.json(line, indent=None)
        return

    requests = f"{counts.total} requests, {counts.refused} refused"
    summary = f"{now:%H:%M:%S}  this minute: {requests}"

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


@subcommand(
    argument("identity", nargs="?", help="Only what was done to this identity."),
    NUMBER,
    example="manage.py rlaas history 203.0.113.9",
)
def history(options: Namespace, output: Output) -> None:
    """List what operators did in the admin and by commands, and why.

    The latest is first.
    """
    actions = OperatorAction.objects.all()
    if options.identity:
        actions = actions.filter(identity=identity_of(options.identity))
    actions = actions[: max(1, options.number)]

    if output.as_json:
        output.json([_action_json(action) for action in actions])
    elif not actions:
        output.line("No operator has done anything yet.")
    else:
        columns = "Time Operator Via Action Identity Policy Until Reason"
        output.table(columns.split(), map(_action_cells, actions))


def _action_json(action: OperatorAction) -> dict[str, Any]:
    return {
        "at": action.at.isoformat(),
        **{name: getattr(action, name) for name in HISTORY_FIELDS},
        "until": action.until and action.until.isoformat(),
    }


def _action_cells(action: OperatorAction) -> tuple[str, ...]:
    return (
        minute(action.at),
        action.by,
        action.via,
        f"{action.get_action_display()} {action.amount}".strip(),
        action.identity,
        action.policy or "all",
        minute(action.until),
        action.reason,
    )
