"""Look on: status, policies, show, top, watch, history."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from django.template.defaultfilters import filesizeformat
from django.utils import timezone

from .. import backend, conf
from ..core.policy import DEFAULT, Policy, Rate
from ..core.rules import Rule
from ..models import OperatorAction, Override
from ..operators import usage
from ..operators.formatting import duration
from ..operators.identities import describe
from ..runtime import registry
from ..stats import reader, schema
from .base import (
    HEADING,
    IDENTITY,
    POLICY,
    Argument,
    Output,
    Styled,
    Subcommand,
    argument,
    find_policy,
    identity_of,
    minute,
    percent,
    plural,
)
from .overrides import override_json

MOST_REFUSED = 5  # identities that `status` lists
HOUR_FIELDS = ("total", "allowed", "refused", "over", "degraded")
LEVEL_STYLES = {"full": "ERROR", "high": "WARNING", "normal": "SUCCESS"}
CLEAR_SCREEN = "\x1b[H\x1b[2J"
MIDDLEWARE = "rlaas_django.middleware.RateLimitMiddleware"
POLICY_COLUMNS = ("where", "policy", "rate", "key", "algorithm", "options")
USAGE_COLUMNS = ("Policy", ">Used", ">Limit", "", "Resets in", ">Refused today")
HISTORY_FIELDS = ("by", "via", "action", "identity", "policy", "amount", "reason")


class Status(Subcommand):
    """Redis, and what was decided in the last hour, on one screen."""

    help = (
        "Show on one screen: Redis and its latency, the decisions of the last hour, "
        "who was refused most today."
    )
    example = "manage.py rlaas status"

    def run(self, _options: Namespace, output: Output) -> None:
        """Print the status; an unavailable Redis is an error."""
        state = usage.server_state()
        minutes = reader.minutes([schema.SITE], hours=1)
        hour = reader.total(minutes[schema.SITE])
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

        for heading, text in self.rows(state, hour, refused):
            output.line(Styled(f"{heading:11}", HEADING), text)

    def rows(
        self,
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
            yield heading, f"{name}  {plural(times, 'time')} today"
            heading = ""


class Policies(Subcommand):
    """Every limit of the settings, of middleware rules and of views."""

    help = "List the limits of the settings, of middleware rules and of views."
    example = "manage.py rlaas policies"

    arguments = (argument("policy", nargs="?", help="Only this policy."),)

    def run(self, options: Namespace, output: Output) -> None:
        """Print a row for each use of a policy."""
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


class Show(Subcommand):
    """The usage of an identity, and what applies to it."""

    help = (
        "Show what an identity used under each policy, when it may go on, and which "
        "overrides apply."
    )
    example = "manage.py rlaas show alice"

    arguments = (
        IDENTITY,
        argument("--all", action="store_true", help="Also policies without usage."),
    )

    def run(self, options: Namespace, output: Output) -> None:
        """Print the usage under each policy, and the overrides."""
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

        label = describe([identity])[identity]
        output.line(Styled(label.name, HEADING), f"  {label.kind_name}, {identity}")
        if rows:
            output.table(USAGE_COLUMNS, map(_usage_cells, rows))
        else:
            output.line("No current usage.")

        for override in overrides:
            output.line(
                Styled(override.get_kind_display(), "WARNING"),
                f" under {override.policy or 'every policy'}"
                f" until {override.until:%Y-%m-%d %H:%M %Z}: {override.reason}",
            )


def _usage_cells(row: usage.Row) -> tuple[object, ...]:
    """Return the cells of a table with USAGE_COLUMNS."""
    outcome = row.outcome
    resets_in = ""
    if outcome.current_count:
        resets_in = duration(outcome.reset_after)

    return (
        outcome.policy.name,
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


class Top(Subcommand):
    """The identities that use most of their limits."""

    help = (
        "List the identities that are over a limit or near it, the highest usage first."
    )
    example = "manage.py rlaas top --policy login"

    arguments: Sequence[Argument] = (
        POLICY,
        argument("--number", type=int, default=20, help="How many; 20."),
    )

    def run(self, options: Namespace, output: Output) -> None:
        """Print them once."""
        find_policy(options.policy)
        rows = self.rows(options)

        if output.as_json:
            output.json([_usage_json(row) for row in rows])
        else:
            self.show(rows, output)

    def rows(self, options: Namespace) -> list[usage.Row]:
        """Return the highest usage."""
        rows = usage.watch_list(options.policy or None)
        return rows[: max(1, options.number)]

    def show(self, rows: list[usage.Row], output: Output) -> None:
        """Print the table."""
        if rows:
            cells = [(row.identity.argument, *_usage_cells(row)) for row in rows]
            output.table(("Identity", *USAGE_COLUMNS), cells)
        else:
            output.line("No identity is near a limit.")


class Watch(Top):
    """`top`, live."""

    help = (
        "Watch who is near a limit, like top; Ctrl-C ends it. "
        "Piped, it prints a line per interval."
    )
    example = "manage.py rlaas watch --interval 2"

    arguments = (
        *Top.arguments,
        argument(
            "--interval", type=float, default=1.0, help="Seconds between two looks; 1."
        ),
        argument("--times", type=int, help="Stop after so many looks."),
    )

    def run(self, options: Namespace, output: Output) -> None:
        """Look again and again."""
        find_policy(options.policy)

        looks = 0
        while options.times is None or looks < options.times:
            if looks:
                time.sleep(max(0.1, options.interval))
            looks += 1

            try:
                self.look(options, output)
            except backend.UnavailableError as error:  # it may be available again
                output.line(Styled(f"Redis is unavailable: {error}", "ERROR"))

    def look(self, options: Namespace, output: Output) -> None:
        """Print what there is now."""
        rows = self.rows(options)
        minutes = reader.minutes([schema.SITE], hours=1)
        counts = minutes[schema.SITE][-1]
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
            self.show(rows, output)
        else:
            highest = [
                f"; {row.identity.argument} {row.percent} % of {row.outcome.policy}"
                for row in rows[:3]
            ]
            output.line(summary, *highest)


class History(Subcommand):
    """What operators did."""

    help = (
        "List what operators did in the admin and by commands, and why; "
        "the latest first."
    )
    example = "manage.py rlaas history 203.0.113.9"

    arguments = (
        argument("identity", nargs="?", help="Only what was done to this identity."),
        argument("--number", type=int, default=20, help="How many entries; 20."),
    )

    def run(self, options: Namespace, output: Output) -> None:
        """Print the actions, the latest first."""
        actions = OperatorAction.objects.all()
        if options.identity:
            actions = actions.filter(identity=identity_of(options.identity))
        actions = actions[: max(1, options.number)]

        if output.as_json:
            output.json([self.as_json(action) for action in actions])
        elif not actions:
            output.line("No operator has done anything yet.")
        else:
            columns = "Time Operator Via Action Identity Policy Until Reason"
            output.table(columns.split(), map(self.cells, actions))

    def as_json(self, action: OperatorAction) -> dict[str, Any]:
        return {
            "at": action.at.isoformat(),
            **{name: getattr(action, name) for name in HISTORY_FIELDS},
            "until": action.until and action.until.isoformat(),
        }

    def cells(self, action: OperatorAction) -> tuple[str, ...]:
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
