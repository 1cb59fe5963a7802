"""manage.py rlaas reset: delete what an identity used."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ....operators import actions as operations
from ....operators import usage
from .arguments import add_identity, add_policy, add_reason, identity_of, policies_named
from .output import Output, Styled

HELP = "Reset what an identity used, under every policy: it starts from zero."
EXAMPLE = "manage.py rlaas reset alice --policy login"
HINT = "`manage.py rlaas top` lists who is counted, as this command takes it."


def add_arguments(parser: ArgumentParser) -> None:
    """Add whose usage is reset."""
    add_identity(parser)
    add_policy(parser, "Under this policy only; otherwise under every one.")
    add_reason(parser, required=False)


def run(options: Namespace, output: Output) -> None:
    """Reset the usage."""
    identity = identity_of(options.identity)
    policies_named(options.policy)
    rows = (
        usage.rows([(options.policy, identity)])
        if options.policy
        else usage.identity_rows(identity)
    )
    by, policies = (
        operations.Operator.of_command(),
        [row.outcome.policy for row in rows],
    )
    operations.reset_usage(
        by, identity, policies, scope=options.policy, reason=options.reason
    )
    used = [row.outcome.policy.name for row in rows if row.outcome.current_count]
    if output.as_json:
        output.json({"identity": identity, "policies": used})
    elif used:
        output.line(
            Styled("reset", "SUCCESS"), f": {identity} under {', '.join(used)}."
        )
    else:
        scope = options.policy or "any policy"
        output.line(
            Styled("nothing to reset", "WARNING"),
            f": {identity} has no usage under {scope}. {HINT}",
        )
