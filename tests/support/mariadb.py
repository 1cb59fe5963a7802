"""A MariaDB of our own, without a network, to ask what its collations take for the same name."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Self

from tests.support.deployments import wait_until

PROGRAMS = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])  # where Debian has mariadbd


class MariaDB:
    """A server on a unix socket in a directory of its own, which goes with it; no table is ever written to disk."""

    def __enter__(self) -> Self:
        program = shutil.which("mariadbd", path=PROGRAMS)
        assert program, "please install mariadb-server-core and mariadb-client-core"
        self.directory = Path(tempfile.mkdtemp(prefix="rlaas-mariadb-", dir="/tmp"))
        self.socket = self.directory / "socket"
        options = {
            "datadir": self.directory,
            "socket": self.socket,
            "pid-file": self.directory / "pid",
            "user": getpass.getuser(),
            "default-storage-engine": "MEMORY",
            "max-heap-table-size": "256M",
        }
        command = [program, "--no-defaults", "--skip-networking", "--skip-grant-tables"]
        command += [f"--{name}={value}" for name, value in options.items()]
        with (self.directory / "log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(self.is_up, "MariaDB is up")
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait(30)
        shutil.rmtree(self.directory)

    def run(self, sql: str) -> subprocess.CompletedProcess[str]:
        client = ["mariadb", "--no-defaults", "--batch", "--skip-column-names", f"--socket={self.socket}"]
        client += ["--default-character-set=utf8mb4"]
        return subprocess.run(client, input=sql, capture_output=True, text=True, check=False)

    def rows(self, sql: str) -> list[list[str]]:
        """Return the rows of a query, as text."""
        done = self.run(sql)
        assert done.returncode == 0, done.stderr
        return [line.split("\t") for line in done.stdout.splitlines()]

    def is_up(self) -> bool:
        assert self.process.poll() is None, (self.directory / "log").read_text()
        return self.run("SELECT 1").returncode == 0


def literal(text: str) -> str:
    """Return text as SQL has it."""
    return f"_utf8mb4 X'{text.encode().hex()}'"
