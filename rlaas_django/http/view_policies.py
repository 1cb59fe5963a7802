"""The policies of a decorator: named ones, and rates that are named after the view."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from ..core.policy import (
    DEFAULT,
    NAME,
    RATE_FORMS,
    Policy,
    PolicyError,
    Rate,
    RateFunction,
    RateLike,
)
from .view_names import policy_name, view_label, view_name


class ViewPolicies:
    """What `@rate_limit` was given, parsed, so that a typo fails at import.

    Only `rate` may be a function. `options` are those of a policy, for the rates of the
    view's own, None where they are left out; `group` names their counters instead of
    the view.
    """

    def __init__(
        self,
        limits: tuple[Any, ...],
        rate: RateLike | RateFunction | None,
        options: dict[str, Any],
        group: str | None,
    ) -> None:
        parsed = [_parse(limit) for limit in limits]
        if callable(rate):
            parsed.append(rate)
        elif rate is not None:
            parsed.append(Rate.parse(rate))
        self.limits = tuple(parsed) or (DEFAULT,)
        self.options = {
            option: value for option, value in options.items() if value is not None
        }
        self.group = group

        own = [limit for limit in self.limits if not _is_named(limit)]
        self.named = tuple([limit for limit in self.limits if _is_named(limit)])
        self.endings = _endings(own)
        self._check_options()
        # The view is not known yet, but what is wrong with a policy is.
        self.unnamed = self._make(group or "view", group or "view")

    @property
    def own(self) -> tuple[Policy, ...]:
        """The policies of rates of the view's own, before they are named."""
        policies = zip(self.limits, self.unnamed, strict=True)
        return tuple([policy for limit, policy in policies if not _is_named(limit)])  # type: ignore[misc]

    @property
    def is_shared(self) -> bool:
        """Whether views share the counters on purpose."""
        return self.group is not None or self.named == self.limits

    def for_view(self, view: Any) -> tuple[str | Policy, ...]:
        """Return the policies of a view.

        Rates of a second decorator on the same view get counters of their own.
        """
        if self.group:
            return self._make(self.group, self.group)

        others = list(_policies_below(view))
        labels = {policy.label for policy in others}
        labels.update(map(str, self.named))
        names = {policy.name for policy in others}
        return self._make(
            self._free_name(view_name(view), names),
            self._free_name(view_label(view), labels),
        )

    def _free_name(self, text: str, taken: set[str]) -> str:
        """Return text, with a number where others have the names made of it."""
        for candidate in _numbered(text):
            names = [policy_name(candidate, ending) for ending in self.endings]
            if taken.isdisjoint(names):
                break
        return candidate

    def _make(self, name: str, label: str) -> tuple[str | Policy, ...]:
        """Return the policies; of several rates each has its window in the name."""
        policies = []
        endings = iter(self.endings)
        for limit in self.limits:
            if _is_named(limit):
                policies.append(limit)
            else:
                policies.append(self._own_policy(limit, name, label, next(endings)))

        names = {str(policy) for policy in policies}
        if len(names) < len(policies):
            listed = ", ".join(map(str, self.limits))
            raise PolicyError(
                f"{listed}: two of these are the same policy, or two rates over the "
                "same window."
            )
        return tuple(policies)

    def _own_policy(self, rate: Any, name: str, label: str, ending: str) -> Policy:
        shown = policy_name(label, ending)
        if "label" in self.options:
            shown = self.options["label"] + ending
        options = {**self.options, "label": shown}
        return Policy(policy_name(name, ending), rate, **options)

    def _check_options(self) -> None:
        """Raise PolicyError for an option that is not text, or has no rate."""
        texts = {"group": self.group, "label": self.options.get("label")}
        for option, text in texts.items():
            if not isinstance(text, str | None):
                raise PolicyError(f"The {option} {text!r} is not text.")

        options = [*self.options]
        if self.group:
            options.append("group")
        if options and self.named == self.limits:
            listed = ", ".join(repr(str(limit)) for limit in self.limits)
            reason = f"{listed} names a policy"
            if self.limits == (DEFAULT,):
                reason = "there is none"
            raise PolicyError(
                f"{' and '.join(options)}: for a rate of the view's own, but {reason}; "
                f"{RATE_FORMS}, or rate= a function."
            )


def _parse(limit: Any) -> Any:
    """Return the name of a policy, a policy, or a rate."""
    if isinstance(limit, Policy):
        return limit
    if callable(limit):
        raise PolicyError(f"{limit!r}: write a function that gives the rate as rate=.")
    if not isinstance(limit, str) or "/" in limit:
        return Rate.parse(limit)
    if NAME.fullmatch(limit):
        return limit
    raise PolicyError(
        f"{limit!r} is neither a rate nor the name of a policy; {RATE_FORMS}."
    )


def _is_named(limit: Any) -> bool:
    return isinstance(limit, (str, Policy))


def _endings(rates: list[Any]) -> list[str]:
    """Return what the name of each rate's policy ends in: of several, its window."""
    if len(rates) == 1:
        return [""]
    endings = []
    for number, rate in enumerate(rates, start=1):
        ending = f"-{number}"
        if isinstance(rate, Rate):
            ending = f"-{rate.window}s"
        endings.append(ending)
    return endings


def _policies_below(view: Any) -> Iterator[Policy]:
    """Yield the policies of decorators below on the same view."""
    for decorator in getattr(view, "rate_limited_by", ()):
        for limits in decorator.limits_by_view.values():
            for policy in limits.policies:
                if isinstance(policy, Policy):
                    yield policy


def _numbered(text: str) -> Iterator[str]:
    yield text
    for number in itertools.count(2):
        yield f"{text}-{number}"
