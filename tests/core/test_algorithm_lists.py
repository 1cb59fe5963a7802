"""Every table of the algorithms, and every file that names them all, has each one."""

from __future__ import annotations

from pathlib import Path

import pytest
import rlaas_django

from tests.support.internals import ALGORITHMS, KEY_ENDINGS, algorithm_tables, counter_key, parse_counter_key
from tests.support.models import MODELS

ROOT = Path(__file__).parents[2]
PACKAGE = Path(rlaas_django.__file__).parent.parent  # where it is installed
FILES = (
    "README.md",
    "docs/algorithms.md",
    "docs/sizing.md",
    "docs/_static/recorded.js",
    "example_project/static/demo/playground.js",
    "example_project/views.py",
    "benchmarks/ours.py",
    "benchmarks/counted.py",
)


def test_a_table_has_every_algorithm_and_no_other():
    wrong = [name for name, table in algorithm_tables().items() if sorted(table) != sorted(ALGORITHMS)]
    assert not wrong, f"{wrong}: CONTRIBUTING.md, How to add an algorithm"


def test_every_algorithm_has_a_model():
    assert sorted(MODELS) == sorted(ALGORITHMS)


@pytest.mark.parametrize("path", FILES)
def test_a_file_names_every_algorithm(path):
    folder = PACKAGE if path.startswith("rlaas_django/") else ROOT
    text = (folder / path).read_text("utf-8")
    assert [algo for algo in ALGORITHMS if algo not in text] == []


@pytest.mark.parametrize("hash_tag", [False, True])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_key_s_ending_leaves_policy_and_identity_to_be_read(algo, hash_tag):
    ending = KEY_ENDINGS[algo]
    assert ending == "" or ending.startswith(":")
    assert "/" not in ending
    for policy in ("default", "search"):
        key = counter_key(policy, algo, 60, hash_tag=hash_tag).key("ip=192.0.2.1")
        assert parse_counter_key(key) == (policy, "ip=192.0.2.1")
