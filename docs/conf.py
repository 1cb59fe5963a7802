"""The documentation: Sphinx with Furo, pages in Markdown. `make docs` builds it in site/."""

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
html_static_path = ["_static", *(f"../example_project/static/demo/playground.{kind}" for kind in ("css", "js"))]
html_theme_options = {
    "source_repository": "https://github.com/rlaas-django/rlaas_django/",
    "source_branch": "main",
    "source_directory": "docs/",
}
