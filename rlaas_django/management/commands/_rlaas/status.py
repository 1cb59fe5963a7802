"""manage.py rlaas status: Redis, and what was decided in the last hour, on one screen."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ....operators import usage
from ....operators.identities import describe
from ....stats import reader, schema
from .output import Output, Styled, percent, plural, size

HELP = "Show on one screen: Redis and its latency, the decisions of the last hour, who was refused most today."
EXAMPLE = "manage.py rlaas status"
SHOWN = 5  # identities


def add_arguments(parser: ArgumentParser) -> None:
    """Add no option."""


def run(_options: Namespace, output: Output) -> None:
    """Show the status; an unavailable Redis is an error."""
    state = usage.server_state()
    hour = reader.total(reader.minutes([schema.SITE], hours=1)[schema.SITE])
    refused, _ = reader.most_refused(SHOWN)
    if output.as_json:
        output.json(
            {
                "server": state.version,
                "latencyMs": round(state.latency_ms, 3),
                "keys": state.keys,
                "memory": state.rate_limit_memory,
                "openBreakers": [each.name for each in usage.unavailable_servers()],
                "lastHour": {
                    name: getattr(hour, name)
                    for name in ("total", "allowed", "refused", "over", "degraded")
                },
                "mostRefusedToday": refused,
            }
        )
        return
    memory = (
        ""
        if state.rate_limit_memory is None
        else f", {size(state.rate_limit_memory)} used by rate limits"
    )
    output.line(
        Styled("Redis      ", "MIGRATE_HEADING"),
        f"{state.version}, {state.keys:,} keys{memory}",
    )
    output.line(Styled("Latency    ", "MIGRATE_HEADING"), f"{state.latency_ms:.1f} ms")
    share = percent(hour.refused / hour.total) if hour.total else "0 %"
    figures = f"{hour.total:,} requests, {hour.refused:,} refused ({share}), {hour.over:,} over the limit but allowed"
    output.line(Styled("Last hour  ", "MIGRATE_HEADING"), figures)
    if hour.degraded:
        output.line(
            Styled(
                f"           {hour.degraded:,} were decided without Redis", "WARNING"
            )
        )
    labels = describe(refused)
    for number, (identity, times) in enumerate(refused.items()):
        heading = "Refused    " if number == 0 else " " * 11
        output.line(
            Styled(heading, "MIGRATE_HEADING"),
            f"{labels[identity].argument}  {plural(times, 'time')} today",
        )
