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

# Django is imported by the functions, once signals are in hand: it takes a good part
# of a second.
HOST = "127.0.0.1"


def main() -> None:
    """Serve the demo until a signal stops it."""
    # Signals only set this, wherever they arrive, so that none can interrupt the start
    # or the stop of the server.
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stopped.set())

    # The port comes first, before anything is started that would have to be stopped.
    site = listen(os.environ.get("PORT") or "8000")
    server = prepare()
    serve(site)
    print(greeting(site.server_port, server), flush=True)

    stopped.wait()
    site.shutdown()
    site.server_close()
    print("Stopped.")


def listen(port: str) -> ThreadedWSGIServer:
    """Return a server that has the port; exit with a sentence where there is none."""
    from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler

    try:
        return ThreadedWSGIServer((HOST, int(port)), WSGIRequestHandler)
    except (ValueError, OverflowError):
        sys.exit(f"PORT should be a number from 1 to 65535, not {port!r}.")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            another = f"make run PORT={int(port) + 1}"
            sys.exit(f"Port {port} is in use; choose another, such as `{another}`.")
        sys.exit(f"Port {port} cannot be used: {error.strerror}.")


def prepare() -> str:
    """Make the database, its people and its traffic; return what Redis it is."""
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

    _ = get_resolver().url_patterns  # imports the views, whose limits the traffic meets
    traffic.generate(users)

    name = info.get("server_name", "redis").title()
    version = info.get("valkey_version") or info["redis_version"]
    return f"{name} {version}"


def serve(site: ThreadedWSGIServer) -> None:
    """Serve the site and its static files in a thread."""
    from django.contrib.staticfiles.handlers import StaticFilesHandler

    from example_project.wsgi import application

    site.set_app(StaticFilesHandler(application))
    thread = threading.Thread(target=site.serve_forever, args=(0.1,), daemon=True)
    thread.start()


def greeting(port: int, server: str) -> str:
    """Return what the terminal shows: addresses and passwords."""
    from django.conf import settings

    from example_project.people import ADMIN, PASSWORD, PEOPLE

    where = settings.CACHES["default"]["LOCATION"]
    if "REDIS_URL" in os.environ:
        where = "REDIS_URL"
    return f"""
  The demo   http://{HOST}:{port}/
  Admin      http://{HOST}:{port}/admin/   user {ADMIN}, password {ADMIN}
  People     {", ".join(PEOPLE)}   password {PASSWORD}
  Server     {server} at {where}

  Stop with Ctrl-C.
"""


if __name__ == "__main__":
    main()
