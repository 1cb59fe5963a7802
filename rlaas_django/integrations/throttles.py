"""What the drop-in throttles for Django REST framework and django-ninja have in common."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from .. import conf
from ..core.algorithms import SLIDING_WINDOW_COMPACT
from ..core.keys import EncodedIdentity, encode_name
from ..core.policy import Policy, Rate
from ..http.throttles import Plan
from ..http.view_names import policy_name
from ..runtime import registry


class RateThrottle:
    """What a framework's SimpleRateThrottle gets: a policy for its rate, and a check for a request."""

    framework: str
    algo: str | None = SLIDING_WINDOW_COMPACT
    on_failure = "open"
    # The framework's `get_cache_key` of a class, and a function of the throttle and the request that returns the kind
    # and the name of who is counted instead of the key, so that overrides of users and addresses apply.
    usual_key: tuple[Any, Any] = ("none", None)

    def parse_rate(self, rate: str | None) -> tuple[int | None, int | None]:
        return (None, None) if rate is None else _parse_rate(rate)

    def calls_site(self: Any) -> bool:
        """Return whether the key is the site's own."""
        is_usual = type(self).get_cache_key is self.usual_key[
            0
        ] and "get_cache_key" not in vars(self)
        return not is_usual or self.cache_format != "throttle_%(scope)s_%(ident)s"

    def plan(self: Any, request: Any, *args: Any) -> Plan | None:
        """Return what to check; None for a request that is not throttled."""
        if self.rate is None:
            return None
        of_site = self.calls_site()
        kind, name = (
            ("key", self.get_cache_key(request, *args[:-1]))
            if of_site
            else self.usual_key[1](self, request)
        )
        if name is None:
            return None
        scope = self.scope or type(self).__name__
        if self.rate != self.THROTTLE_RATES.get(self.scope):
            scope += f"-{self.duration}s"  # throttles with rates of their own may have inherited the same scope
        policy = _policy(
            f"{self.framework}.{scope}",
            self.num_requests,
            self.duration,
            self.algo,
            self.on_failure,
        )
        identity = EncodedIdentity(encode_name(kind, name, conf.config().encoding))
        return Plan(identity, (registry.add_adapter_policy(policy),))


@lru_cache(maxsize=1024)
def _parse_rate(rate: str) -> tuple[int, int]:
    parsed = Rate.parse(rate)
    return parsed.limit, parsed.window


@lru_cache(maxsize=1024)
def _policy(
    name: str, limit: int, window: int, algo: str | None, on_failure: str
) -> Policy:
    return Policy(
        policy_name(name, ""), (limit, window), algo=algo, on_failure=on_failure
    )


def user_or_address(throttle: Any, request: Any) -> tuple[str, Any]:
    """Return the user, or the address of a client that is not logged in."""
    user = request.user
    return (
        ("user", user.pk)
        if user and user.is_authenticated
        else ("ip", throttle.get_ident(request))
    )
