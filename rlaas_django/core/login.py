"""RATE_LIMITER['LOGIN']: how many wrong passwords are accepted. No Django, no Redis."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from .keys import LOGIN, UNKNOWN_NAME
from .policy import Policy, PolicyError, Rate
from .rules import refuse_unknown

# What is counted, and by which key its policies show it. A name is that of a user, or a
# digest where no user has it.
NAME_AND_ADDRESS = "name_and_address"
NAME = "name"
ADDRESS = "address"
KEYS = {NAME_AND_ADDRESS: "user", NAME: "user", ADDRESS: "ip"}
# The kinds of the identities that it counts.
KINDS = {NAME_AND_ADDRESS: (LOGIN,), NAME: ("user", UNKNOWN_NAME), ADDRESS: ("ip",)}

DEFAULTS: dict[str, Any] = {
    NAME_AND_ADDRESS: ["5/5m", "20/h"],
    NAME: ["100/h"],
    ADDRESS: ["100/h"],
    "shadow": False,
}

LoginPolicies = Mapping[str, tuple[Policy, ...]]  # by what they count


def parse_login(value: Any, others: Container[str]) -> LoginPolicies:
    """Parse RATE_LIMITER['LOGIN'], beside policies of other names.

    PolicyError when it is invalid. A list alone is of `name_and_address`; False is
    without any policy.
    """
    if value is False:
        return {}
    if isinstance(value, list):
        value = {NAME_AND_ADDRESS: value}
    if not isinstance(value, Mapping):
        raise PolicyError('write {"name_and_address": ["5/5m"]}, ["5/5m"], or False.')
    refuse_unknown(value, DEFAULTS)

    options = {**DEFAULTS, **value}
    login = {}
    for counted in KEYS:
        policies = _policies(counted, options[counted], options["shadow"])
        for policy in policies:
            if policy.name in others:
                raise PolicyError(
                    f"policy {policy.name!r} is also in RATE_LIMITER['POLICIES']; "
                    "choose another name there."
                )
        login[counted] = tuple(policies)
    return login


def _policies(counted: str, rates: Any, shadow: bool) -> list[Policy]:
    """Return a policy for each rate; with several, each name ends in its window."""
    if not isinstance(rates, list):
        raise PolicyError(f'{counted} {rates!r} is not a list; write ["5/5m", "20/h"].')

    policies: dict[str, Policy] = {}
    for rate in map(Rate.parse, rates):
        name = f"login-{counted.replace('_', '-')}"
        if len(rates) > 1:
            name += f"-{rate.window}s"
        if name in policies:
            raise PolicyError(f"{counted} has two rates over the same window.")

        policies[name] = Policy(
            name, rate, key=KEYS[counted], on_failure="local", shadow=shadow
        )
    return list(policies.values())
