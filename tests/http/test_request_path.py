"""The path of one allowed request through the package is short enough to be followed."""

from __future__ import annotations

import sys
from pathlib import Path

import rlaas_django
from django.test import RequestFactory
from rlaas_django import rate_limit

from tests.support.http import ok

PACKAGE = Path(rlaas_django.__file__).parent
MOST_MODULES, MOST_FUNCTIONS = 14, 30
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")  # functions of their own before Python 3.12


def functions_crossed(view, request) -> list[tuple[str, str]]:
    """Return the distinct functions of the package that a view calls, as (module, name), in order of first calls."""
    seen: dict[tuple[str, str], None] = {}

    def profile(frame, event, arg):
        code = frame.f_code
        path = Path(code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE) and code.co_name not in COMPREHENSIONS:
            seen[path.relative_to(PACKAGE).as_posix(), code.co_qualname] = None

    sys.setprofile(profile)  # of this thread alone
    try:
        response = view(request)
    finally:
        sys.setprofile(None)
    assert response.status_code == 200
    return list(seen)


def test_an_allowed_request_crosses_few_modules_and_functions():
    view = rate_limit("100/m", key="ip")(ok)
    view(RequestFactory().get("/"))  # connects, loads the script, compiles the policy
    crossed = functions_crossed(view, RequestFactory().get("/"))
    # After a pause, such as those of a busy machine, a connection is examined before it is used.
    crossed = [function for function in crossed if function != ("backend/connection.py", "HeldConnection.is_stale")]
    modules = list(dict.fromkeys(module for module, _ in crossed))
    listing = "\n".join(f"  {module}: {name}" for module, name in crossed)
    counts = f"{len(modules)} modules (at most {MOST_MODULES}), {len(crossed)} functions (at most {MOST_FUNCTIONS})"
    assert len(modules) <= MOST_MODULES, f"{counts}:\n{listing}"
    assert len(crossed) <= MOST_FUNCTIONS, f"{counts}:\n{listing}"


def test_the_functions_crossed_are_those_of_the_package():
    crossed = functions_crossed(rate_limit("5/m", key="ip")(ok), RequestFactory().get("/"))
    assert crossed[0][0] == "decorators.py"
    assert all((PACKAGE / module).exists() for module, _ in crossed)
