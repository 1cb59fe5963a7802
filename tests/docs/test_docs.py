"""The documentation: its examples run, and its tables are complete."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
import re
from argparse import ArgumentParser
from pathlib import Path

import pytest
import rlaas_django
import yaml
from django.http import HttpResponse
from django.test import AsyncRequestFactory, RequestFactory, override_settings
from rlaas_django import rate_limit, signals

from tests.support.internals import (
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

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {"README.md": (ROOT / "README.md").read_text()}
PAGES |= {page.relative_to(DOCS).as_posix(): page.read_text() for page in sorted(DOCS.rglob("*.md"))}
MAKEFILE = (ROOT / "Makefile").read_text()
CODE = "\n".join(path.read_text() for path in Path(rlaas_django.__file__).parent.rglob("*.py"))


INTERNAL = {"backend", "core", "http", "limiter", "management", "migrations", "stats"}  # packages
PERMISSIONS = {"rlaas_django.view_ratelimit", "rlaas_django.change_ratelimit"}
SETTINGS = ("CACHES", "MIDDLEWARE", "RATE_LIMITER")
SITE = "https://rlaas-django.readthedocs.io/en/latest/"


def blocks(text: str) -> list[str]:
    """Return the Python of a page, but for URLs, which need a project: see test_readme.py and test_tutorial.py."""
    return re.findall(r"^```python\n(?!# urls\.py)(.*?)^```", text, re.MULTILINE | re.DOTALL)


def names_in(cell: str) -> list[str]:
    """Return the names in a cell of a table."""
    return re.findall(r"`(\w+)`", cell)


@pytest.mark.usefixtures("no_views")
@pytest.mark.parametrize("page", [page for page in PAGES if page != "tutorial.md"])  # that has a test of its own
async def test_the_python_of_the_documentation_runs(page, settings):
    """Settings apply to what follows them, and the first ones to the whole page; views respond; tests pass."""
    names: dict = {"__name__": "documented", "INSTALLED_APPS": [], "MIDDLEWARE": []}
    code = blocks(PAGES[page])
    for block in [block for block in code if "RATE_LIMITER = " in block][:1] + code:
        before = set(names)
        exec(compile(block, page, "exec"), names)
        if re.search(rf"^({'|'.join(SETTINGS)}) \+?= ", block, re.MULTILINE):
            forget_limits()  # of other settings on this page
            written = {name: names[name] for name in SETTINGS if name in names}
            with override_settings(**{"MIDDLEWARE": [], "RATE_LIMITER": {}, **written}):
                assert check_settings() == []
        if "RATE_LIMITER = " in block:
            settings.RATE_LIMITER = {"TIMEOUT": 20, **names["RATE_LIMITER"], "CACHE": "default"}
        for name in [name for name in names if name not in before]:
            await call_example(names[name])


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


@pytest.mark.parametrize("page", PAGES)
def test_what_is_pasted_at_the_end_of_the_settings_leaves_the_rest_of_the_site(page):
    """`INSTALLED_APPS = [...]` would remove the admin, and `MIDDLEWARE = [...]` the protection against CSRF."""
    assert re.findall(r"^(?:INSTALLED_APPS|MIDDLEWARE) = .*", "\n".join(blocks(PAGES[page])), re.MULTILINE) == []


# The reference has what the code has, and nothing else


def test_every_setting_is_in_the_documentation_with_its_default():
    rows = dict(re.findall(r"^\| `([A-Z0-9_]+)` \| `([^|]*)` \|", PAGES["settings.md"], re.MULTILINE))
    assert {key: eval(default) for key, default in rows.items()} == DEFAULTS


@pytest.mark.parametrize(("setting", "options"), [("POLICIES", POLICY_OPTIONS), ("MIDDLEWARE", RULE_OPTIONS)])
def test_every_option_is_in_the_row_of_its_setting(setting, options):
    (row,) = re.findall(rf"^\| `{setting}` \| `..` \| ([^;|]+)", PAGES["settings.md"], re.MULTILINE)
    assert set(names_in(row)) == set(options)


def test_every_check_is_in_the_documentation():
    used = set(re.findall(r'"([EW]0\d\d)"', CODE))
    documented = re.findall(r"^\| `rlaas_django\.([EW]\d{3})` \|", PAGES["settings.md"], re.MULTILINE)
    assert sorted(documented) == sorted(used)


def test_every_header_is_in_the_documentation():
    source = inspect.getsource(header_module)
    set_by_us = set(re.findall(r'^[A-Z_]+ = "([A-Za-z-]+)"$', source, re.MULTILINE))
    set_by_us |= set(re.findall(r'headers\.setdefault\("([A-Za-z-]+)"', source))
    set_by_us |= {"Vary", "Content-Length"}
    documented = re.findall(r"^\| `([A-Za-z-]+)` \|", PAGES["headers.md"], re.MULTILINE)
    assert sorted(documented) == sorted(set_by_us)


def test_every_algorithm_and_key_is_in_the_documentation():
    for algo in ALGORITHMS:
        assert f"`{algo}`" in PAGES["README.md"]
        assert f"`{algo}`" in PAGES["algorithms.md"]
    for key in (*KEYS, *KEY_PREFIXES):
        assert f'"{key}' in PAGES["decorator.md"]
    named = re.findall(r"\b[a-z]+(?:-[a-z]+)+-algo\b", "\n".join(PAGES.values()))
    assert set(named) == set(ALGORITHMS)


def test_every_argument_of_the_decorator_is_in_the_documentation():
    for name in list(inspect.signature(rate_limit).parameters)[1:]:
        assert f"{name}=" in PAGES["decorator.md"] or f"`{name}`" in PAGES["decorator.md"], name


def test_every_public_name_is_in_the_reference():
    documented = re.findall(r"^\.\. auto\w+:: rlaas_django\.(\w+)$", PAGES["api.md"], re.MULTILINE)
    assert sorted(documented) == sorted(rlaas_django.__all__)


def test_every_public_module_is_in_the_reference_with_its_names():
    """Outside of the packages that are internal, a module is public if it has `__all__`."""
    public = {}
    for module in pkgutil.walk_packages(rlaas_django.__path__, "rlaas_django."):
        if module.name.split(".")[1] not in INTERNAL:
            names = getattr(importlib.import_module(module.name), "__all__", None)
            if names is not None:
                public[module.name] = sorted(names)
    rows = re.findall(r"^\| `(rlaas_django\.[\w.]+)` \| ([^|]+) \|", PAGES["api.md"], re.MULTILINE)
    assert {module: sorted(names_in(cell)) for module, cell in rows} == public


@pytest.mark.parametrize("page", PAGES)
def test_every_dotted_path_in_the_documentation_exists(page):
    paths = re.findall(r"\brlaas_django(?:\.[A-Za-z_]\w*)+", PAGES[page])
    for path in set(paths) - PERMISSIONS:
        if not re.fullmatch(r"rlaas_django\.[EW]\d{3}", path):  # the ID of a check
            assert pkgutil.resolve_name(path) is not None


def test_every_signal_is_in_the_documentation_with_its_arguments(redis_unavailable):
    """A local limit that refuses while Redis is unavailable sends them all."""
    sent = {}
    receivers = {name: lambda name=name, **facts: sent.update({name: facts.keys()}) for name in signals.__all__}
    for name, receiver in receivers.items():
        getattr(signals, name).connect(receiver)
    view = rate_limit("1/h", on_failure="local")(lambda request: HttpResponse())
    assert [view(RequestFactory().get("/")).status_code for _ in range(2)] == [200, 429]
    for name, receiver in receivers.items():
        getattr(signals, name).disconnect(receiver)
    (section,) = re.findall(r"^## Signals\n(.*?)^## ", PAGES["settings.md"], re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, re.MULTILINE)
    assert {name: {*names_in(cell), "sender", "signal"} for name, cell in rows} == sent


# Links and commands


@pytest.mark.parametrize("page", [page for page in PAGES if page != "README.md"])
def test_links_point_to_existing_files(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", PAGES[page]):
        assert (DOCS / page).parent.joinpath(target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_the_tests_that_a_page_names_exist(page):
    for path in re.findall(r"`(tests/[\w/]+\.\w+)`", PAGES[page]):
        assert (ROOT / path).exists(), path


def test_the_links_of_the_readme_are_absolute_for_package_indexes_and_point_to_existing_files():
    targets = re.findall(r"\]\(([^)]+)\)|(?:src|href)=\"([^\"]+)", PAGES["README.md"])
    for target in filter(None, itertools.chain.from_iterable(targets)):
        assert target.startswith("https://")
        if found := re.match(rf"{SITE}([^#]*)", target):
            assert f"{found[1].removesuffix('.html')}.md" in PAGES, target
        if found := re.search(r"/rlaas_django/(?:(?:blob|raw)/)?main/([^#?]+)", target):
            assert (ROOT / found[1]).exists(), target


def test_the_readme_links_to_the_rendered_documentation():
    """GitHub shows the directives of a page, such as the table of contents and the reference, as they are written."""
    assert re.findall(r"/rlaas_django/(?:blob|raw|tree)/main/docs/[^)]*\.md", PAGES["README.md"]) == []


def test_the_documentation_is_built_on_the_web_as_it_is_by_make():
    options = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())
    (install,) = options["build"]["jobs"]["install"]
    assert re.fullmatch(r'python -m pip install -c constraints\.txt "\.\[docs\]"', install)
    assert (ROOT / options["sphinx"]["configuration"]).parent == DOCS
    assert options["sphinx"]["fail_on_warning"] is ("sphinx-build -q -W " in MAKEFILE)


def test_the_workflows_run_nothing_but_make():
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        for command in re.findall(r"\brun: (.*)$", workflow.read_text(), re.MULTILINE):
            assert re.search(rf"^{command.removeprefix('make ')}:", MAKEFILE, re.MULTILINE), command


def test_every_make_target_is_listed_by_make_help():
    phony = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())
    documented = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
    assert phony == documented


def test_every_subcommand_is_documented():
    listed = re.findall(r"^\| `rlaas (\w+)", PAGES["commands.md"], re.MULTILINE)
    assert sorted(listed) == sorted(SUBCOMMANDS)


def test_every_option_that_is_named_with_a_subcommand_exists():
    rows = re.findall(r"^\| `rlaas (\w+)[^|]*\| (.*) \|$", PAGES["commands.md"], re.MULTILINE)
    for subcommand, text in [*rows, ("replay", PAGES["choosing-a-limit.md"]), ("memory", PAGES["sizing.md"])]:
        parser = ArgumentParser()
        for add_argument in SUBCOMMANDS[subcommand].arguments:
            add_argument(parser)
        assert set(re.findall(r"--[a-z][a-z-]+", text)) <= set(re.findall(r"--[a-z][a-z-]+", parser.format_help()))
