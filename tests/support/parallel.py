"""Run a function in many processes or threads at once."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

WORKERS = 16


def in_processes(work: Callable[[int], Any], count: int = WORKERS) -> list[Any]:
    """Return what `work(n)` gives in each of so many forked processes, which begin together."""
    context = multiprocessing.get_context("fork")
    begin = context.Barrier(count)

    def child(n: int, pipe: Any) -> None:
        begin.wait(60)
        pipe.send(work(n))

    readers, processes = [], []
    for n in range(count):
        reader, writer = context.Pipe(duplex=False)
        processes.append(context.Process(target=child, args=(n, writer)))
        processes[-1].start()
        writer.close()  # so that a child that dies is an EOFError here
        readers.append(reader)
    try:
        return [reader.recv() for reader in readers]
    finally:
        for reader, process in zip(readers, processes, strict=True):
            process.join()
            reader.close()


def in_threads(work: Callable[[int], Any], count: int = WORKERS) -> list[Any]:
    """As `in_processes`, in threads."""
    begin = threading.Barrier(count)

    def thread(n: int) -> Any:
        begin.wait(60)
        return work(n)

    with ThreadPoolExecutor(count) as executor:
        return list(executor.map(thread, range(count)))
