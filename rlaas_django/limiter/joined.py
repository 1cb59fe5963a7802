"""Independent checks, of the throttles of a view for example: as one call where they can be, which takes less."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .. import backend, conf
from ..core.decision import Decision
from ..core.keys import Identity, identify
from ..core.policy import Policy
from . import networks
from .compiled import MAX_COMPILED, Check, CompiledPolicySet, plan


class Plan(NamedTuple):
    """What to check: who is charged how much, by which policies, all or nothing."""

    identity: Identity
    policies: tuple[Policy, ...]
    cost: int = 1


def plan_checks(plans: Sequence[Plan]) -> list[Check]:
    """Return the check of each plan, or a joined one, in which each policy is charged if it passes."""
    joined = _join(plans) if len(plans) > 1 else None
    return [plan(*each) for each in plans] if joined is None else [joined]


def split(decisions: list[Decision], plans: Sequence[Plan]) -> list[Decision]:
    """Return the decision of each plan."""
    if len(decisions) == len(plans):
        return decisions
    return [Decision(each.allowed or each.policy.shadow, (each,)) for each in decisions[0].outcomes]


def _join(plans: Sequence[Plan]) -> Check | None:
    """Return one check of plans of one unit and one policy each, no two of the same; None where that cannot be."""
    config, topology = conf.config(), backend.topology()
    policies = tuple([each.policies[0] for each in plans])
    if not config.enabled or topology.clustered or networks.current is not None:
        return None
    if [each for each in plans if len(each.policies) > 1 or each.cost != 1]:
        return None
    if len({policy.name for policy in policies}) < len(policies):
        return None
    compiled: dict[tuple[Policy, ...], CompiledPolicySet] = config.derived.setdefault(_join, {})
    if policies not in compiled:
        if len(compiled) >= MAX_COMPILED:
            compiled.clear()
        compiled[policies] = CompiledPolicySet(policies, config, topology, independent=True)
    identities = tuple([identify(each.identity, each.policies[0], config.encoding) for each in plans])
    return Check(compiled[policies], identities, 1, charge=True)
