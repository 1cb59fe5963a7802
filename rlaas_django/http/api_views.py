"""Views of Django REST framework, whose user is known once the framework has authenticated the request.

Limits by user are checked after the `initial()` of such a view, and before its handler. A request that fails there,
because its credentials are wrong, say, is counted before the framework responds, and so is one that fails when limits
read its user or its body. REST framework is not imported here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from inspect import isawaitable
from types import FunctionType
from typing import Any, NoReturn
from weakref import WeakSet

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.views.decorators.csrf import csrf_exempt

from .. import conf
from .gate import aenter, enter
from .identity import ERRORS, read_attribute
from .limits import Limits, Prepared
from .request_state import STATE, RequestState
from .view_names import owner_of

View = Callable[..., Any]

DEFERRED = "_rate_limits_deferred"  # the attribute of a request with the limits that its class is to check


async def _async_view() -> None: ...


# as_view() of the framework returns a function that is exempt from CSRF protection.
_EXEMPT_CODES = {csrf_exempt(each).__code__ for each in (lambda: None, _async_view)}

# The functions of ours around it, with nothing else between.
_deferring: WeakSet[View] = WeakSet()


def is_api_view(view: object) -> bool:
    """Return whether a view, or a class of them, is one of Django REST framework."""
    return hasattr(view, "initialize_request") and hasattr(view, "handle_exception")


def runner_of(view: View) -> View:
    """Return what runs a function within limits: `enter`, `aenter`, or for an API view what has its class run them."""
    owner, method = owner_of(view)
    if method == "dispatch":
        return runner_of_dispatch(owner)
    # A method of an async class-based view may be no coroutine function.
    run = (
        aenter
        if iscoroutinefunction(view) or getattr(owner, "view_is_async", False)
        else enter
    )
    return functools.partial(_enter_or_defer, run) if can_defer(view) else run


def runner_of_dispatch(view: Any) -> View:
    """Return what runs the dispatch of a class-based view within limits."""
    run = aenter if getattr(view, "view_is_async", False) else enter
    return functools.partial(_enter_dispatch, run, view) if is_api_view(view) else run


def can_defer(view: View) -> bool:
    """Return whether a function calls an API view with nothing between that could respond instead of it."""
    if not isinstance(view, FunctionType) or not is_api_view(
        getattr(view, "cls", None)
    ):
        return False
    made: Any = getattr(view, "__wrapped__", None)
    is_made = isinstance(made, FunctionType) and made.__code__.co_name == "view"
    return view in _deferring or (view.__code__ in _EXEMPT_CODES and is_made)


def take_deferred(limited: View) -> None:
    """Have a class run the limits that a function around its `as_view()` defers."""
    _deferring.add(limited)
    view_class: Any = limited.cls  # type: ignore[attr-defined]
    dispatch = view_class.dispatch
    if getattr(dispatch, "takes_deferred_limits", False):
        return

    @functools.wraps(dispatch)
    def take(self: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        _place(vars(request).pop(DEFERRED, ()), self, request)
        return dispatch(self, request, *args, **kwargs)

    take.takes_deferred_limits = True  # type: ignore[attr-defined]
    view_class.dispatch = take


def _enter_or_defer(
    run: View,
    limits: Limits,
    request: HttpRequest,
    view: View,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not _needs_user(limits):
        return run(limits, request, view, *args, **kwargs)
    vars(request).setdefault(DEFERRED, []).append(limits)
    return view(*args, **kwargs)


def _enter_dispatch(
    run: View,
    view: Any,
    limits: Limits,
    request: HttpRequest,
    dispatch: View,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not _needs_user(limits):
        return run(limits, request, dispatch, *args, **kwargs)
    _place([limits], view, request)
    return dispatch(*args, **kwargs)


def _needs_user(limits: Limits) -> bool:
    config = conf.config()
    if not config.enabled:
        return False
    prepared: Prepared = config.derived.limits.get(limits) or limits.prepare()
    return prepared.needs_user or any(map(_needs_user, prepared.inner))


def _place(every: Sequence[Limits], view: Any, request: HttpRequest) -> None:
    """Place limits between the `initial()` of a view, which is of this request alone, and its handler."""
    if not every:
        return
    if getattr(request, STATE, None) is None:
        RequestState(
            request
        )  # not on the framework's own request, where no middleware finds it
    errors: list[Exception] = []
    view.initial = functools.partial(_initial, view.initial, errors)
    for name in ("http_method_not_allowed", (request.method or "").lower()):
        if name in (*view.http_method_names, "http_method_not_allowed") and hasattr(
            view, name
        ):
            setattr(
                view, name, _limited_handler(every, view, getattr(view, name), errors)
            )


def _initial(
    initial: View, errors: list[Exception], request: Any, *args: Any, **kwargs: Any
) -> None:
    """Run the `initial()` of a view; the handler raises what it, or a limit that reads the request, has failed with."""
    setattr(request, ERRORS, errors)
    try:
        initial(request, *args, **kwargs)
    except Exception as error:  # noqa: BLE001
        errors.append(error)
        # The framework negotiates the content before it authenticates. Both are done before limits are checked, so that
        # wrong credentials count and respond as right ones do.
        read_attribute(request, "user")


def _limited_handler(
    every: Sequence[Limits], view: Any, handler: View, errors: list[Exception]
) -> View:
    """Return the handler within limits, for which exceptions are responses already, as `charge_when` sees them."""

    def handle(*args: Any, **kwargs: Any) -> Any:
        try:
            if errors:
                raise errors[0]
            return handler(*args, **kwargs)
        except Exception as error:  # noqa: BLE001
            return _handle_exception(view, error)

    async def ahandle(*args: Any, **kwargs: Any) -> Any:
        try:
            if errors:
                raise errors[0]
            response = handler(*args, **kwargs)
            return await response if isawaitable(response) else response
        except Exception as error:  # noqa: BLE001
            return _handle_exception(view, error)

    is_async = getattr(view, "view_is_async", False)
    limited: View = ahandle if is_async else handle
    for limits in reversed(every):
        limited = functools.partial(
            _within, aenter if is_async else enter, limits, limited
        )
    if not is_async:
        return limited

    async def alimited(*args: Any, **kwargs: Any) -> Any:
        return await limited(*args, **kwargs)

    return alimited


def _handle_exception(view: Any, error: Exception) -> Any:
    """Return the response that the framework makes of an exception; raise one that it makes none of."""
    try:
        return view.handle_exception(error)
    except Exception:
        view.handle_exception = _raise  # the dispatch of the view calls it again, and the site's handler may report it
        raise


def _raise(error: Exception) -> NoReturn:
    raise error


def _within(
    run: View,
    limits: Limits,
    view: View,
    request: HttpRequest,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return run(limits, request, view, request, *args, **kwargs)
