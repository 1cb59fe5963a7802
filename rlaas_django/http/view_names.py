"""Names of views, and of the policies that are named after them."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Collection
from typing import Any, NamedTuple

from ..core.keys import digest
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

# In the names of policies that are made with a digest, and in no others.
DIGEST_MARK = "blake2-"


def policy_name(name: str, ending: str = "") -> str:
    """Return the policy's name for the name of a view, a group or a scope.

    No two share one: where a name cannot be a policy's, a digest tells it apart. One
    that can be is kept, with its ending, so that its counters stay where they are.

    >>> policy_name("price-list", "-60s"), policy_name("price list", "-60s")
    ('price-list-60s', 'price-list-60s-blake2-389ec383dc981dcf179a7aa37e5af2bb')
    """
    text = name + ending
    if NAME.fullmatch(text) and DIGEST_MARK not in text:
        return text

    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[-60:]
    return f"{readable}-{DIGEST_MARK}{digest(repr((name, ending)))}".lstrip("-")


class ViewParts(NamedTuple):
    """What a view is made of, whichever way it is decorated."""

    view_class: type | None
    method: str  # of the class, if it is only that one
    function: Any  # where there is no class


def view_name(view: Any) -> str:
    """Return the dotted name of a view, whichever way it is decorated."""
    parts = _parts_of(view)
    if parts.view_class is None:
        return f"{parts.function.__module__}.{_qualname(parts.function)}"

    name = _class_name(parts.view_class)
    if parts.method:
        name += f".{parts.method}"
    return name


def view_label(view: Any) -> str:
    """Return what clients see of a view's name, never a Python path.

    >>> view_label(shop.views.Cart.post)
    'Cart-post'
    """
    parts = _parts_of(view)
    if parts.view_class is None:
        qualname = _qualname(parts.function)
        return qualname.rpartition("<locals>.")[2].replace(".", "-").strip("<>")

    label = parts.view_class.__name__.strip("<>")
    if parts.method:
        label += f"-{parts.method}"
    return label


def owner_of(view: Any) -> tuple[Any, str]:
    """Return the object whose method a view is, and the method's name.

    `method_decorator` decorates a partial of the bound method, below others.
    """
    while view is not None:
        method: Any = getattr(view, "func", None)
        if getattr(method, "__self__", None) is not None:
            return method.__self__, method.__name__
        view = getattr(view, "__wrapped__", None)
    return None, ""


def view_class_of(view: Any) -> type | None:
    """Return the class whose `as_view()` made a view, if any."""
    view_class: type | None = getattr(view, "view_class", getattr(view, "cls", None))
    return view_class


def _parts_of(view: Any) -> ViewParts:
    owner, method = owner_of(view)
    if owner is not None:
        if method == "dispatch":
            method = ""
        return ViewParts(type(owner), method, None)

    function = view
    if isinstance(view, functools.partial):
        function = view.func
    return ViewParts(view_class_of(view), "", function)


def _qualname(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _class_name(view_class: type) -> str:
    # A framework may make a class of a function that is only called like it.
    name = view_class.__qualname__
    if not name.endswith(view_class.__name__):
        name = view_class.__name__
    return f"{view_class.__module__}.{name}"


class ViewPolicies:
    """Parse the arguments of `@rate_limit`, so that a typo fails at import.

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
        self.sample_policies = self._make(group or "view", group or "view")

    @property
    def own(self) -> tuple[Policy, ...]:
        """Policies made from rates, under a provisional name."""
        samples: Any = self.sample_policies
        return tuple([policy for policy in samples if policy not in self.named])

    @property
    def is_shared(self) -> bool:
        """Whether views share the counters on purpose."""
        return self.group is not None or self.named == self.limits

    def for_view(
        self, view: Any, others: Collection[Policy] = ()
    ) -> tuple[str | Policy, ...]:
        """Return the policies of a view, beside others of decorators below.

        Rates of a second decorator on the same view get counters of their own.
        """
        if self.group:
            return self._make(self.group, self.group)

        labels = {policy.label for policy in others}
        labels.update(map(str, self.named))
        names = {policy.name for policy in others}
        return self._make(
            self._free_name(view_name(view), names),
            self._free_name(view_label(view), labels),
        )

    def _free_name(self, text: str, taken: set[str]) -> str:
        """Return text, with a number where others have the names made of it."""
        for number in itertools.count(1):
            candidate = text
            if number > 1:
                candidate = f"{text}-{number}"
            names = [policy_name(candidate, ending) for ending in self.endings]
            if taken.isdisjoint(names):
                break
        return candidate

    def _make(self, name: str, label: str) -> tuple[str | Policy, ...]:
        """Make the policies; with several rates, each name ends in its window."""
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
        full_label = policy_name(label, ending)
        if "label" in self.options:
            full_label = self.options["label"] + ending
        options = {**self.options, "label": full_label}
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
    if isinstance(limit, str) and NAME.fullmatch(limit):
        return limit
    return Rate.parse(limit)


def _is_named(limit: Any) -> bool:
    return isinstance(limit, (str, Policy))


def _endings(rates: list[Any]) -> list[str]:
    """Return the ending of each policy's name; with several rates, the window."""
    if len(rates) == 1:
        return [""]
    endings = []
    for number, rate in enumerate(rates, start=1):
        ending = f"-{number}"
        if isinstance(rate, Rate):
            ending = f"-{rate.window}s"
        endings.append(ending)
    return endings
