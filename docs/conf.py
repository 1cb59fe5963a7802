"""The documentation: Sphinx with Furo, pages in Markdown.

`make docs` builds it in site/.
"""

import os
import sys
from importlib.metadata import version as installed_version

import django
from django.conf import settings

sys.path.insert(0, os.path.abspath(".."))
settings.configure(INSTALLED_APPS=["rlaas_django"])  # for the docstrings of the API
django.setup()

project = "rlaas_django"
author = "the rlaas_django authors"
copyright = f"2026, {author}"  # noqa: A001
version = release = installed_version("rlaas_django")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
nitpicky = False

autodoc_typehints = "description"
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = "rlaas_django"
html_static_path = [
    "_static",
    *(f"../example_project/static/demo/playground.{kind}" for kind in ("css", "js")),
]
html_theme_options = {
    "source_repository": "https://github.com/rlaas-django/rlaas_django/",
    "source_branch": "main",
    "source_directory": "docs/",
}

# What people type into the search box where the words of a page alone rank others
# first: Sphinx lists the page of a main index entry before the pages that merely have
# its words.
SEARCHES = {
    "algorithms": [
        "which algorithm",
        "sliding window",
        "fixed window",
        "token bucket",
        "leaky bucket",
    ],
    "choosing-a-limit": ["dry run", "shadow mode"],
    "cluster": ["redis cluster", "redis sentinel"],
    "commands": [
        "see who is blocked",
        "list blocked ips",
        "ban ip",
        "unblock user",
        "reset user",
    ],
    "decorator": [
        "limit by user",
        "limit whole site",
        "limit requests per minute",
        "rate limit middleware",
    ],
    "django-ratelimit": ["migrate from django-ratelimit"],
    "exempting": ["whitelist ip", "disable rate limiting"],
    "failure": [
        "redis down",
        "redis is down",
        "redis fails",
        "fail open",
        "fail closed",
    ],
    "headers": ["retry-after", "rate limit headers"],
    "index": ["install"],
    "login": ["brute force login", "lockout"],
    "plans": ["daily quota", "change limit of one user"],
    "proxies": ["x-forwarded-for", "cloudflare", "client ip"],
    "service": ["use from node.js"],
    "settings": ["settings", "settings reference"],
    "sizing": ["memory"],
    "tasks": ["celery task rate limit"],
    "tenants": ["multi tenant"],
    "testing": [
        "test rate limited view",
        "unit test without redis",
        "disable in tests",
        "testing",
    ],
    "troubleshooting": [
        *(
            "rate limit not working",
            "rate limiting not working",
            "more requests than limit",
        ),
        *(
            "logged in user counted by ip",
            "all users share one counter",
            "429 in tests",
        ),
    ],
}


def add_index_entries(_app, page, source):
    """Put the searches of a page above its title; GitHub would show an empty block."""
    if page in SEARCHES:
        entries = ", ".join(f"! {words}" for words in SEARCHES[page])
        source[0] = f"```{{index}} {entries}\n```\n\n{source[0]}"


def setup(app):
    app.connect("source-read", add_index_entries)
