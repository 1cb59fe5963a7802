"""The documentation: its examples run, and its tables are complete."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from django.http import HttpResponse
from django.test import AsyncRequestFactory, RequestFactory, override_settings

from rlaas_django import rate_limit
from tests.internals import (
    ALGORITHMS,
    DEFAULTS,
    KEY_PREFIXES,
    KEYS,
    POLICY_OPTIONS,
    RULE_OPTIONS,
    SUBCOMMANDS,
    check_settings,
    forget_limits,
    header_module,
)

ROOT = Path(__file__).parent.parent
PAGES = {page.name: page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
CODE = "\n".join(path.read_text() for path in (ROOT / "rlaas_django").rglob("*.py"))


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.usefixtures("no_views")
@pytest.mark.parametrize("page", [page for page in PAGES if page != "tutorial.md"])  # that has a test of its own
async def test_the_python_of_the_documentation_runs(page, settings):
    """Settings apply to what follows them, and the first ones to the whole page; views respond; tests pass."""
    names: dict = {"__name__": "documented"}
    code = blocks(PAGES[page])
    for block in [block for block in code if "RATE_LIMITER = " in block][:1] + code:
        before = set(names)
        exec(compile(block, page, "exec"), names)
        if "RATE_LIMITER = " in block:
            forget_limits()  # of other settings on this page
            written = {name: names[name] for name in ("RATE_LIMITER", "CACHES", "MIDDLEWARE") if name in names}
            with override_settings(**{"MIDDLEWARE": [], **written}):
                assert check_settings() == []
            settings.RATE_LIMITER = {"TIMEOUT": 20, **names["RATE_LIMITER"], "CACHE": "default"}
        for name in [name for name in names if name not in before]:
            await call_example(names[name])


@pytest.mark.usefixtures("no_views")
def test_the_checks_say_nothing_of_the_first_settings_of_the_readme():
    names: dict = {}
    exec(blocks(PAGES["README.md"])[0], names)
    with override_settings(CACHES=names["CACHES"], RATE_LIMITER={}):
        assert check_settings() == []


async def call_example(view) -> None:
    """Call a view of the documentation, which gives a response, or a test, which passes."""
    parameters = list(inspect.signature(view).parameters) if inspect.isfunction(view) else None
    is_exempt = hasattr(view, "csrf_exempt")  # it says who calls the HTTP service, and is no view
    if parameters == []:
        view()
    elif parameters == ["request"] and view.__doc__ != "..." and hasattr(view, "__wrapped__") and not is_exempt:
        if inspect.iscoroutinefunction(view):
            request = AsyncRequestFactory().get("/")
            response = await view(request)
        else:
            request = RequestFactory().post("/")
            response = view(request)
        assert response is None or isinstance(response, HttpResponse)
        assert getattr(view, "rate_limit_exempt", False) or request.rate_limit is not None


def test_every_setting_is_in_the_documentation_with_its_default():
    rows = dict(re.findall(r"^\| `([A-Z0-9_]+)` \| `([^|]*)` \|", PAGES["settings.md"], re.MULTILINE))
    assert {key: eval(default) for key, default in rows.items()} == DEFAULTS


def test_every_check_is_in_the_documentation():
    used = set(re.findall(r'"([EW]0\d\d)"', CODE))
    documented = re.findall(r"^\| `rlaas_django\.([EW]\d{3})` \|", PAGES["settings.md"], re.MULTILINE)
    assert sorted(documented) == sorted(used)


def test_every_header_is_in_the_documentation():
    set_by_us = set(re.findall(r'headers(?:\.setdefault\(|\[)"([A-Za-z-]+)"', inspect.getsource(header_module)))
    set_by_us |= {"Vary", "Content-Length"}
    documented = re.findall(r"^\| `([A-Za-z-]+)` \|", PAGES["headers.md"], re.MULTILINE)
    assert sorted(documented) == sorted(set_by_us)


def test_every_algorithm_key_and_option_is_in_the_documentation():
    for algo in ALGORITHMS:
        assert f"`{algo}`" in PAGES["README.md"]
        assert f"`{algo}`" in PAGES["algorithms.md"]
    for key in (*KEYS, *KEY_PREFIXES):
        assert f'"{key}' in PAGES["decorator.md"]
    for option in (*POLICY_OPTIONS, *RULE_OPTIONS):
        assert f"`{option}`" in PAGES["settings.md"]


def test_every_argument_of_the_decorator_is_in_the_documentation():
    for name in list(inspect.signature(rate_limit).parameters)[1:]:
        assert f"{name}=" in PAGES["decorator.md"] or f"`{name}`" in PAGES["decorator.md"], name


@pytest.mark.parametrize("page", PAGES)
def test_links_point_to_existing_files(page):
    folder = ROOT if page == "README.md" else ROOT / "docs"
    for target in re.findall(r"\]\((?!http)([^)#]+)", PAGES[page]):
        assert (folder / target).exists(), target


def test_every_make_target_is_listed_by_make_help():
    makefile = (ROOT / "Makefile").read_text()
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())
    documented = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    assert phony == documented


def test_every_subcommand_is_documented():
    listed = re.findall(r"^\| `rlaas (\w+)", PAGES["commands.md"], re.MULTILINE)
    assert set(SUBCOMMANDS) <= set(listed)
