"""manage.py rlaas policies: every limit of the settings, of middleware rules and of views."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandError

from .... import conf
from ....core.policy import DEFAULT, Policy, Rate, nearest
from ....core.rules import Rule
from ....operators import usage
from ....runtime import registry
from .output import Output

HELP = "List the limits of the settings, of middleware rules and of views."
EXAMPLE = "manage.py rlaas policies"

MIDDLEWARE = "rlaas_django.middleware.RateLimitMiddleware"
EXEMPT = "exempt"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("policy", nargs="?", help="Only this policy.")


def run(options: Namespace, output: Output) -> None:
    """Print the table."""
    found = [row for row in rows() if options.policy in (None, row["policy"])]
    if not found:
        raise CommandError(
            f"There is no policy {options.policy!r}{nearest(options.policy, usage.policies())}"
        )
    if output.as_json:
        output.json(found)
        return
    columns = ("where", "policy", "rate", "key", "algorithm", "options")
    output.table(columns, [[row[column] or "" for column in columns] for row in found])


def rows() -> Iterator[dict[str, Any]]:
    """Yield a row for each use of a policy, and for each policy without one."""
    config = conf.config()
    every = usage.policies()
    uses: list[tuple[str, str | Policy]] = [
        (f"rule {_describe(rule)}", name)
        for rule in config.rules
        for name in rule.policies or (EXEMPT,)
    ]
    if not config.rules and MIDDLEWARE in conf.middleware():
        uses = [("rule /", DEFAULT)]
    for view in sorted(registry.limited_views(), key=lambda each: each.name):
        uses += [(view.name, policy) for policy in view.policies]
    for where, used in uses:
        yield _row(
            where, str(used), used if isinstance(used, Policy) else every.get(used)
        )
    for name in sorted(set(every) - {str(used) for _, used in uses}):
        yield _row("settings" if name in config.policies else "code", name, every[name])


def _row(where: str, name: str, policy: Policy | None) -> dict[str, Any]:
    """Return a row; without a policy, of a rule that exempts or of a name that is not defined."""
    if policy is None:
        return {
            "where": where,
            "policy": name,
            **dict.fromkeys(("rate", "key", "algorithm", "options")),
        }
    key = (
        policy.key
        if isinstance(policy.key, str)
        else getattr(policy.key, "__qualname__", repr(policy.key))
    )
    options = [f"burst {policy.burst}"] if policy.burst else []
    options += ["shadow"] if policy.shadow else []
    options += (
        [f"on failure {policy.on_failure}"] if policy.on_failure != "open" else []
    )
    return {
        "where": where,
        "policy": policy.name,
        "rate": str(policy.rate) if isinstance(policy.rate, Rate) else "by a function",
        "key": key,
        "algorithm": policy.algo or conf.config().algo,
        "options": ", ".join(options),
    }


def _describe(rule: Rule) -> str:
    """Return what a rule matches: `GET,HEAD /api/`."""
    path = rule.path or (rule.regex and rule.regex.pattern) or "/"
    return f"{','.join(sorted(rule.methods))} {path}" if rule.methods else path
