"""Names of views: what the counters of their own rates are called."""

from __future__ import annotations

import functools
import hashlib
import re
from typing import Any

from ..core.policy import MAX_NAME_LENGTH


def policy_name(view_name: str, ending: str) -> str:
    """Return the name of a view's own policy: in the characters and the length that a policy's name may have."""
    clean = re.sub(r"[^A-Za-z0-9_.-]+", "-", view_name)
    if len(clean) + len(ending) > MAX_NAME_LENGTH:
        digest = hashlib.blake2b(view_name.encode(), digest_size=4).hexdigest()
        clean = f"{digest}-{clean[len(ending) + len(digest) + 1 - MAX_NAME_LENGTH :]}"
    return clean + ending


def view_name(view: Any) -> str:
    """Return the dotted name of a view, whichever way it is decorated."""
    view_class, method, function = _made_of(view)
    if view_class is not None:
        return _class_name(view_class) + (f".{method}" if method else "")
    return f"{function.__module__}.{_qualname(function)}"


def view_label(view: Any) -> str:
    """Return what clients see of a view's name: of `shop.views.Cart.post` it is `Cart-post`, never a Python path."""
    view_class, method, function = _made_of(view)
    if view_class is not None:
        return view_class.__name__ + (f"-{method}" if method else "")
    return _qualname(function).rpartition("<locals>.")[2].replace(".", "-")


def _made_of(view: Any) -> tuple[type | None, str, Any]:
    """Return the class of a view, and the method if it is only that one; or without a class the function."""
    owner, method = owner_of(view)
    if owner is not None:
        return type(owner), "" if method == "dispatch" else method, None
    view_class = getattr(
        view, "view_class", getattr(view, "cls", None)
    )  # of what as_view() made
    return view_class, "", view.func if isinstance(view, functools.partial) else view


def _qualname(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _class_name(view: type) -> str:
    # Django REST framework's @api_view makes a class that is only called like the function.
    name = (
        view.__qualname__
        if view.__qualname__.endswith(view.__name__)
        else view.__name__
    )
    return f"{view.__module__}.{name}"


def owner_of(view: Any) -> tuple[Any, str]:
    """Return the object whose method a view is, below other decorators, and the method's name."""
    while view is not None:
        bound: Any = getattr(view, "func", None)
        if getattr(bound, "__self__", None) is not None:
            return bound.__self__, bound.__name__
        view = getattr(view, "__wrapped__", None)
    return None, ""
