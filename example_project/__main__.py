"""The demo: `make run`, or `PORT=8001 python -m example_project`."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django.core.servers.basehttp import ThreadedWSGIServer

# Django is imported by the functions, once signals are in hand: it takes a good part of a second.
HOST = "127.0.0.1"


def main() -> None:
    # Signals only set this, wherever they arrive, so that none can interrupt the start or the stop of the server.
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stopped.set())
    site = listen(
        os.environ.get("PORT") or "8000"
    )  # before anything is started that would have to be stopped
    server = prepare()
    serve(site)
    print(greeting(site.server_port, server), flush=True)
    stopped.wait()
    site.shutdown()
    site.server_close()
    print("Stopped.")


def listen(port: str) -> ThreadedWSGIServer:
    from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler

    try:
        return ThreadedWSGIServer((HOST, int(port)), WSGIRequestHandler)
    except (ValueError, OverflowError):
        sys.exit(f"PORT should be a number from 1 to 65535, not {port!r}.")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            sys.exit(
                f"Port {port} is in use; choose another, such as `make run PORT={int(port) + 1}`."
            )
        sys.exit(f"Port {port} cannot be used: {error.strerror}.")


def prepare() -> str:
    """The database with its people, and a Redis that answers; its description."""
    import django
    import redis
    from django.core.management import call_command
    from django.urls import get_resolver
    from django_redis import get_redis_connection

    os.environ["DJANGO_SETTINGS_MODULE"] = "example_project.settings"
    django.setup()
    from example_project import people, traffic

    call_command("migrate", verbosity=0)
    users = people.create()
    try:
        info = get_redis_connection().info("server")
    except redis.RedisError as error:
        sys.exit(f"No Redis answers at REDIS_URL: {error}")
    get_resolver().url_patterns  # noqa: B018  (imports the views, whose limits the traffic is for)
    traffic.generate(users)
    return f"{info.get('server_name', 'redis').title()} {info.get('valkey_version') or info['redis_version']}"


def serve(site: ThreadedWSGIServer) -> None:
    from django.contrib.staticfiles.handlers import StaticFilesHandler

    from example_project.wsgi import application

    site.set_app(StaticFilesHandler(application))
    threading.Thread(
        target=site.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
    ).start()


def greeting(port: int, server: str) -> str:
    from django.conf import settings

    from example_project.people import ADMIN, PASSWORD, PEOPLE

    where = (
        "REDIS_URL"
        if "REDIS_URL" in os.environ
        else settings.CACHES["default"]["LOCATION"]
    )
    return f"""
  The demo   http://{HOST}:{port}/
  Admin      http://{HOST}:{port}/admin/   user {ADMIN}, password {ADMIN}
  People     {", ".join(PEOPLE)}   password {PASSWORD}
  Server     {server} at {where}

  Stop with Ctrl-C.
"""


if __name__ == "__main__":
    main()
