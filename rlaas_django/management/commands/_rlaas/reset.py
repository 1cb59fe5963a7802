"""manage.py rlaas reset: delete what an identity used."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from .... import operations, usage
from ....stats.policies import with_decided_rates
from .arguments import add_identity, add_policy, add_reason, identity_of, policies_named
from .output import Output, Styled

HELP = "Reset what an identity used, under every policy: it starts from zero."
EXAMPLE = "manage.py rlaas reset alice --policy login"


def add_arguments(parser: ArgumentParser) -> None:
    """Add whose usage is reset."""
    add_identity(parser)
    add_policy(parser, "Under this policy only; otherwise under every one.")
    add_reason(parser, required=False)


def run(options: Namespace, output: Output) -> None:
    """Reset the usage."""
    identity, chosen = identity_of(options.identity), policies_named(options.policy)
    if options.policy:
        policies = [policy for policy, _ in with_decided_rates([(chosen[options.policy], identity)])]
    else:
        policies = [row.outcome.policy for row in usage.identity_rows(identity)]
    by = operations.Operator.of_command()
    operations.reset_usage(by, identity, policies, scope=options.policy, reason=options.reason)
    if output.as_json:
        output.json({"identity": identity, "policies": [policy.name for policy in policies]})
    else:
        output.line(Styled("reset", "SUCCESS"), f": {identity} under {options.policy or 'every policy'}.")
