"""The commands of docs/service.md, run against a server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.commands import rlaas
from tests.web_servers import TOKEN, serving

PAGE = (Path(__file__).parent.parent / "docs/service.md").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gunicorn", "uvicorn"])
def test_the_curl_commands_run(tmp_path, name):
    assert shutil.which("curl"), "please install curl"
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    with serving(name, tmp_path / "log", workers=1) as port:
        environment = {"TOKEN": TOKEN, "RLAAS": f"http://127.0.0.1:{port}/rlaas", "PATH": "/usr/bin:/bin"}
        outputs = [
            subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True, check=True).stdout
            for line in block.splitlines()
        ]
    text, *answers = outputs
    assert text == "User is allowed"
    allowed = [json.loads(answer) for answer in answers]
    assert [allowed[0]["allowed"], allowed[1]["allowed"]] == [True, True]
    assert [result["allowed"] for result in allowed[2]["results"]] == [True, True]
    assert allowed[3]["currentCount"] == 4
    assert allowed[4] == {"deleted": 1}
    assert allowed[5]["status"] == "UP"


def test_the_command_of_the_first_example_runs():
    (line,) = re.findall(r"^\$ manage.py rlaas (.*)$", PAGE, re.MULTILINE)
    assert rlaas(*line.split()).code == 0
