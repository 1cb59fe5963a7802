"""@rate_limit, for views of every kind."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, TypeVar, overload

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.utils.decorators import method_decorator

from . import conf
from .core.decision import Decision
from .core.policy import (
    DEFAULT,
    NAME,
    RATE_FORMS,
    KeyFunction,
    Policy,
    PolicyError,
    Rate,
    RateLike,
)
from .core.rules import (
    check_cost,
    check_function,
    cost_problem,
    parse_methods,
)
from .http.api_views import (
    can_defer,
    is_api_view,
    runner_of,
    runner_of_dispatch,
    take_deferred,
)
from .http.limits import Limits, decorated
from .http.view_names import policy_name, view_label, view_name
from .runtime import registry
from .runtime.registry import LimitedView

View = Callable[..., Any]
ViewT = TypeVar("ViewT", bound=View)  # a function, or a class
Options = dict[str, Any]


class RateLimitedRequest(HttpRequest):
    """The request of a limited view, for annotations: an HttpRequest with `rate_limit`."""

    rate_limit: Decision


@overload
def rate_limit(rate: Callable[[HttpRequest], RateLike | None], /) -> RateLimit: ...
@overload
def rate_limit(view: ViewT, /) -> ViewT: ...
@overload
def rate_limit(
    *limits: RateLike | Callable[[Any], RateLike | None] | Policy,
    rate: RateLike | Callable[[Any], RateLike | None] | None = None,
    key: str | KeyFunction | None = None,
    method: str | Iterable[str] | None = None,
    cost: int | Callable[[Any], int] | str | None = None,
    group: str | None = None,
    label: str | None = None,
    algo: str | None = None,
    burst: int | None = None,
    on_failure: str | None = None,
    block: bool = True,
    shadow: bool = False,
    charge_when: Callable[[Any], Any] | str | None = None,
    charge_on_error: bool = True,
    response: Callable[[Any, Decision], Any] | str | None = None,
) -> RateLimit: ...
def rate_limit(
    *limits: Any,
    rate: RateLike | Callable[[Any], RateLike | None] | None = None,
    key: str | KeyFunction | None = None,
    method: str | Iterable[str] | None = None,
    cost: int | Callable[[Any], int] | str | None = None,
    group: str | None = None,
    label: str | None = None,
    algo: str | None = None,
    burst: int | None = None,
    on_failure: str | None = None,
    block: bool = True,
    shadow: bool = False,
    charge_when: Callable[[Any], Any] | str | None = None,
    charge_on_error: bool = True,
    response: Callable[[Any, Decision], Any] | str | None = None,
) -> Any:
    """Limit a view: by the default policy, by named ones, or by rates of its own.

    >>> @rate_limit
    >>> @rate_limit("login")
    >>> @rate_limit("5/m", key="ip", method="POST")
    >>> @rate_limit(rate="5/minute", key="ip")
    >>> @rate_limit("10/s", "1000/h", key="user")
    >>> @rate_limit("5/m", key="ip", charge_when=lambda response: response.status_code == 401)
    """
    given = {
        "key": key,
        "algo": algo,
        "burst": burst,
        "on_failure": on_failure,
        "shadow": shadow or None,
        "label": label,
    }
    options = {option: value for option, value in given.items() if value is not None}
    applied = {
        "cost": cost,
        "methods": None if method is None else parse_methods(method),
        "block": block,
        "response": response,
        "charge_when": charge_when,
        "charge_on_error": charge_on_error,
    }
    if rate is not None:
        limits = (*limits, rate if callable(rate) else Rate.parse(rate))
    elif (
        len(limits) == 1
        and callable(limits[0])
        and not options
        and group is None
        and applied == _DEFAULTS
    ):
        return _bare(limits[0])
    return RateLimit(limits, options, group, applied)


def rate_limit_exempt(view: ViewT) -> ViewT:
    """Exempt a view from every middleware rule. Its own decorators still apply.

    >>> @rate_limit_exempt
    >>> def health(request): ...
    """
    exempt: Any = view
    if not isinstance(
        view, type
    ):  # a function of its own, as the view may be at another URL without this decorator
        if iscoroutinefunction(view):

            @functools.wraps(view)
            async def exempt(*args: Any, **kwargs: Any) -> Any:
                return await view(*args, **kwargs)
        else:

            @functools.wraps(view)
            def exempt(*args: Any, **kwargs: Any) -> Any:
                return view(*args, **kwargs)

    exempt.rate_limit_exempt = True
    registry.exempt_views.add(view_name(view))
    return exempt  # type: ignore[no-any-return]


_DEFAULTS = {
    "cost": None,
    "methods": None,
    "block": True,
    "response": None,
    "charge_when": None,
    "charge_on_error": True,
}


def _bare(function: View) -> View:
    """Return the view with the default policy, which can also be applied as `@rate_limit(rate_for)`.

    Either is a function of a request, so it is taken for a view until it is called with one.
    """
    limited: View = RateLimit((), {}, None, _DEFAULTS)(function)
    if isinstance(function, type) or iscoroutinefunction(function):
        return limited

    @functools.wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        if (
            len(args) == 1
            and not kwargs
            and callable(args[0])
            and not hasattr(args[0], "META")
        ):
            return RateLimit((function,), {}, None, _DEFAULTS)(args[0])
        return limited(*args, **kwargs)

    if limited in decorated:
        decorated[either] = decorated[limited]
    return either


class RateLimit:
    """`@rate_limit(...)` with its arguments parsed, so that a typo fails at import."""

    def __init__(
        self,
        rates: tuple[Any, ...],
        options: Options,
        group: str | None,
        applied: Options,
    ) -> None:
        self.rates = tuple(map(_parse, rates)) or (DEFAULT,)
        self.options, self.group, self.applied = options, group, applied
        _check_options({"group": group, "label": options.get("label")}, applied)
        conf.require_app()
        self.views: dict[str, Limits] = {}  # by name
        self._seen: dict[str, set[int]] = {}  # by name: the views that are called so
        self._before_authentication: set[str] = set()  # names of views
        self.named = tuple(
            rate for rate in self.rates if isinstance(rate, (str, Policy))
        )
        if (options or group) and self.named == self.rates:
            words = " and ".join([*options, *(["group"] if group else [])])
            given = (
                f"{', '.join(repr(str(each)) for each in rates)} names a policy"
                if rates
                else "there is none"
            )
            raise PolicyError(
                f"{words}: for a rate of the view's own, but {given}; {RATE_FORMS}."
            )
        self._provisional = self._policies(group or "view", group or "view")
        registry.sources.add(self)

    def __call__(self, view: ViewT) -> ViewT:
        limits = self.limits_for(view)
        if isinstance(view, (FunctionType, type)) or not hasattr(
            view, "__wrapped__"
        ):  # not anew for each request
            made_of = getattr(
                view, "view_class", getattr(view, "cls", view)
            )  # as_view() makes functions of a class
            self._seen.setdefault(view_name(view), set()).add(id(made_of))
        if is_api_view(getattr(view, "cls", None)) and not can_defer(view):
            self._before_authentication.add(view_name(view))
        limited: Any = (
            _limited_class(view, limits)
            if isinstance(view, type)
            else _limited_function(view, limits)
        )
        # For the system checks, in use as long as the view is; and for the next decorator on the same view.
        limited.rate_limited_by = (*getattr(view, "rate_limited_by", ()), self)
        return limited  # type: ignore[no-any-return]

    def limits(self) -> list[LimitedView]:
        """Return the views with their policies, for the registry."""
        if self.views:
            seen = {} if self.group or self.named == self.rates else self._seen
            early = self._before_authentication
            return [
                LimitedView(
                    name,
                    limits.policies,
                    self.applied,
                    (),
                    frozenset(seen.get(name, ())),
                    name in early,
                )
                for name, limits in self.views.items()
            ]
        # method_decorator shows the view with its first request.
        unnamed = tuple(
            each
            for each in self._provisional
            if isinstance(each, Policy) and each not in self.named
        )
        return [LimitedView("A method", self.named, self.applied, unnamed)]

    def limits_for(self, view: Any) -> Limits:
        """Return the limits of a view; they are kept, because method_decorator decorates anew for each request."""
        name = view_name(view)
        if name in self.views:
            return self.views[name]
        limits = Limits(self._policies_for(view, name), **self.applied)
        if (
            view.__module__ != method_decorator.__module__
        ):  # which tries a decorator out on a function of its own
            self.views[name] = limits
        return limits

    def _policies_for(self, view: Any, name: str) -> tuple[str | Policy, ...]:
        """Name the rates after the view; those of a second decorator on the same view get counters of their own."""
        if self.group:
            return self._policies(self.group, self.group)
        below = [
            limits
            for each in getattr(view, "rate_limited_by", ())
            for limits in each.views.values()
        ]
        others = [
            policy
            for limits in below
            for policy in limits.policies
            if isinstance(policy, Policy)
        ]
        names, labels = (
            {each.name for each in others},
            {each.label for each in others} | {*map(str, self.named)},
        )
        own = [i for i, rate in enumerate(self.rates) if rate not in self.named]
        for label in _numbered(view_label(view)):
            policies: Any = self._policies(name, label)
            if "label" in self.options or labels.isdisjoint(
                policies[i].label for i in own
            ):
                break
        for unused in _numbered(name):
            policies = self._policies(unused, label)
            if names.isdisjoint(policies[i].name for i in own):
                break
        return tuple(policies)

    def _policies(self, name: str, label: str) -> tuple[str | Policy, ...]:
        """Return the policies; rates are named after the view, and of several each has its window in the name."""
        rates = [rate for rate in self.rates if not isinstance(rate, (str, Policy))]
        policies = list(self.rates)
        for i, rate in enumerate(self.rates):
            if rate in rates:
                ending = (
                    f"{rate.window}s"
                    if isinstance(rate, Rate)
                    else str(rates.index(rate) + 1)
                )
                ending = f"-{ending}" if len(rates) > 1 else ""
                shown = (
                    self.options["label"] + ending
                    if "label" in self.options
                    else policy_name(label, ending)
                )
                policies[i] = Policy(
                    policy_name(name, ending), rate, **{**self.options, "label": shown}
                )
        if len({str(policy) for policy in policies}) < len(policies):
            listed = ", ".join(map(str, self.rates))
            raise PolicyError(
                f"{listed}: two of these are the same policy, or two rates over the same window."
            )
        for policy in policies:
            if isinstance(policy, Policy) and (
                problem := cost_problem(self.applied["cost"], policy)
            ):
                raise PolicyError(f"{policy.rate}: {problem}")
        return tuple(policies)


def _numbered(text: str) -> Iterator[str]:
    return (
        text if number == 1 else f"{text}-{number}" for number in itertools.count(1)
    )


def _check_options(texts: Options, applied: Options) -> None:
    """Raise PolicyError for an invalid value of an option that is not about rates."""
    for option, text in texts.items():
        if not isinstance(text, str | None):
            raise PolicyError(f"The {option} {text!r} is not text.")
    for option in ("block", "charge_on_error"):
        if type(applied[option]) is not bool:
            raise PolicyError(f"{option} {applied[option]!r} is not True or False.")
    if applied["cost"] is not None:
        check_cost(applied["cost"])
    if applied["charge_when"] is not None:
        check_function("charge_when", applied["charge_when"])
    if applied["response"] is not None:
        check_function("response", applied["response"], may_be_async=True)


def _parse(limit: Any) -> Any:
    """Return the name of a policy, a policy, a rate, or a function that returns one."""
    if isinstance(limit, Policy) or callable(limit):
        return limit
    if not isinstance(limit, str) or "/" in limit:
        return Rate.parse(limit)
    if NAME.fullmatch(limit):
        return limit
    raise PolicyError(
        f"{limit!r} is neither a rate nor the name of a policy; {RATE_FORMS}."
    )


def _limited_function(view: View, limits: Limits) -> View:
    run = runner_of(view)
    if iscoroutinefunction(view):

        @functools.wraps(view)
        async def limited(*args: Any, **kwargs: Any) -> Any:
            return await run(limits, _request(args, kwargs), view, *args, **kwargs)
    else:

        @functools.wraps(view)
        def limited(*args: Any, **kwargs: Any) -> Any:
            request = (
                args[0] if args and hasattr(args[0], "META") else _request(args, kwargs)
            )
            return run(limits, request, view, *args, **kwargs)

    if can_defer(view):
        take_deferred(limited)
    elif isinstance(
        view, FunctionType
    ):  # not for method_decorator, which decorates anew for each request
        decorated[limited] = limits, view
    return limited


def _limited_class(view: type, limits: Limits) -> type:
    dispatch = getattr(view, "dispatch", None)
    if dispatch is None:
        raise TypeError(
            f"@rate_limit is for views, and {view.__qualname__} is not one: it has no dispatch method."
        )

    @functools.wraps(dispatch)
    def limited(self: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        return runner_of_dispatch(self)(
            limits, request, dispatch, self, request, *args, **kwargs
        )

    view.dispatch = limited  # type: ignore[attr-defined]
    return view


def _request(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the request among a view's arguments, or a method's."""
    for each in (*args[:2], kwargs.get("request")):
        if hasattr(each, "META"):
            return each
    raise TypeError(
        "@rate_limit is for views: there is no request among the arguments."
    )
