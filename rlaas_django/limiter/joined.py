"""Independent checks as one call, which takes less than a call for each: of the throttles of a view, mostly."""

from __future__ import annotations

from collections.abc import Sequence

from .. import backend, conf
from ..core.decision import Decision
from ..core.policy import Policy
from .compiled import MAX_COMPILED, Check, CompiledPolicySet


def join(checks: Sequence[Check]) -> Check | None:
    """Return one check in which each policy is charged if it passes; None where the checks cannot be joined.

    They can be, on a single server, if each is of one unit under one policy, and no two are under the same.
    """
    policies = tuple([check.policy_set.policies[0] for check in checks])
    for check in checks:
        if len(check.policy_set.policies) > 1 or check.cost != 1 or not check.charge or check.network_overrides:
            return None
    if not checks[0].policy_set.in_one_call or len({policy.name for policy in policies}) < len(policies):
        return None
    config = conf.config()
    compiled: dict[tuple[Policy, ...], CompiledPolicySet] = config.derived.setdefault(join, {})
    if policies not in compiled:
        if len(compiled) >= MAX_COMPILED:
            compiled.clear()
        compiled[policies] = CompiledPolicySet(policies, config, backend.topology(), independent=True)
    identities = tuple([check.identities[0] for check in checks])
    return Check(compiled[policies], identities, checks[0].unique, 1, charge=True)


def split(decision: Decision) -> list[Decision]:
    """Return the decision of each of the checks that were joined."""
    return [Decision(each.allowed or each.policy.shadow, (each,)) for each in decision.outcomes]
