"""The commands of docs/service.md, run against a server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.web_servers import TOKEN, serving

PAGE = (Path(__file__).parents[2] / "docs/service.md").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gunicorn", "uvicorn"])
def test_the_curl_commands_run(tmp_path, name):
    assert shutil.which("curl"), "please install curl"
    (first,) = re.findall(r"^\$ (curl .*)$", PAGE, re.MULTILINE)
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    with serving(name, tmp_path / "log", workers=1) as port:
        environment = {"TOKEN": TOKEN, "RLAAS": f"http://127.0.0.1:{port}/rlaas", "PATH": "/usr/bin:/bin"}
        outputs = [
            subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True, check=True).stdout
            for line in [first.replace("http://127.0.0.1:8000/rlaas", "$RLAAS"), *block.splitlines()]
        ]
    assert outputs[:2] == ["User is allowed"] * 2
    allowed = [json.loads(answer) for answer in outputs[2:]]
    assert [allowed[0]["allowed"], allowed[1]["allowed"]] == [True, True]
    assert [result["allowed"] for result in allowed[2]["results"]] == [True, True]
    assert allowed[3]["currentCount"] == 5
    assert allowed[4] == {"deleted": 1}
    assert allowed[5]["status"] == "UP"
