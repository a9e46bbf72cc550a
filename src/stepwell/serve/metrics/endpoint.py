"""The well's `/metrics`: HTTP on the loopback interface or a Unix socket, for Prometheus on this host.

Lives in the well's process and shares nothing with its loop: for each scrape it asks the well by the well's own socket,
as `stepwell stats` does, and renders what comes back. So a loop that hangs is seen as one (503), and a scraper that
hangs costs one of four threads for two seconds. Connections beyond four wait in the listener's short queue.
"""

from __future__ import annotations

import contextlib
import errno
import io
import ipaddress
import logging
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from stepwell.client import control
from stepwell.errors import ConfigError, StepwellError
from stepwell.log import RateLimited
from stepwell.serve.metrics.exposition import CONTENT_TYPE, render
from stepwell.serve.metrics.table import families

MAX_REQUESTS = 4
"""Requests answered at the same time."""

MAX_HEAD = 8 << 10
"""Bytes of a request line with its headers."""

REQUEST_SECONDS = 2.0
"""Time from accepting a connection to closing it, the question to the well included."""

WELL_SECONDS = 1.0
"""Time for the well to answer before a scrape becomes a 503."""

_TEXT = "text/plain; charset=utf-8"
_BACKLOG = 8
_EMPTY_LINE = re.compile(rb"\r?\n\r?\n")
_PIECE = 4 << 10
_DRAIN = 64 << 10
_AFTER_ERROR_SECONDS = 0.1

log = logging.getLogger("stepwell.serve.metrics")


class MetricsServer:
    """Serves from construction until `close`. `address` is where, with the port that a port of 0 became.

    The well is asked at its `socket`, and is never looked for by home, which may hang.

    Raises ConfigError: SW-119 (the port or path is taken or refused), SW-109 (path too long), SW-102 (no loopback
    address). A Unix socket is 0600; a dead one in its place is replaced, and ours is removed at the end.
    """

    def __init__(self, address: str, home: Path, socket: Path) -> None:
        self._home = home
        self._socket = socket
        self._limited = RateLimited(log)
        self._closing = threading.Event()
        self._ours: tuple[int, int] | None = None  # device and inode of the socket's file
        self._path = Path(address) if address.startswith("/") else None
        self._listener = self._on_path(self._path) if self._path is not None else _on_port(address)
        self.address = address if self._path is not None else _shown(self._listener)
        self._threads = [
            threading.Thread(target=self._serve, name=f"stepwell-metrics-{n}", daemon=True) for n in range(MAX_REQUESTS)
        ]
        for thread in self._threads:
            thread.start()
        log.info("metrics at %s", self.address)

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Accepts nothing more. Does not wait for requests that are being answered."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._path is not None:
            with contextlib.suppress(OSError):
                there = self._path.lstat()
                if (there.st_dev, there.st_ino) == self._ours:  # not if another one is in its place
                    self._path.unlink()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends every `accept`
        self._listener.close()

    def _on_path(self, path: Path) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if _is_dead(path):
                path.unlink(missing_ok=True)
            before = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(before)
            made = path.lstat()
            self._ours = made.st_dev, made.st_ino
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno is None:  # Python's own "path too long"
                raise ConfigError(
                    "SW-109", what=f"the metrics socket {path} cannot be made", why=str(error), fix="use a shorter path"
                ) from error
            raise _taken(str(path), error.strerror or str(error)) from error
        except ConfigError:
            listener.close()
            raise
        return listener

    # threads ----------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    self._limited.log(logging.WARNING, "accept", "no scrape could be accepted: %s", error)
                    self._closing.wait(_AFTER_ERROR_SECONDS)  # no descriptors left, say: not in a tight loop
                continue
            with connection:
                try:
                    _Request(connection, self._answer)
                except OSError as error:
                    log.debug("a scrape was cut short: %s", error)
                except Exception as error:  # noqa: BLE001 - one request's error is not the end of its thread
                    self._limited.log(logging.ERROR, "request", "a scrape failed: %r", error)

    def _answer(self, path: str, left: float) -> tuple[HTTPStatus, str, str]:
        """Status, content type and text for a GET of `path` that has `left` seconds."""
        if path not in ("/metrics", "/healthz"):
            return HTTPStatus.NOT_FOUND, _TEXT, "not found: there are /metrics and /healthz\n"
        try:
            stats = control.figures(self._home, min(WELL_SECONDS, left), self._socket)
        except (StepwellError, OSError) as error:
            self._limited.log(logging.WARNING, "silent", "a scrape found no answer: %s", error)
            code = f" [{error.code}]" if isinstance(error, StepwellError) else ""
            text = f"the well did not answer within {WELL_SECONDS:g} s{code}\n"
            return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, text
        if path == "/healthz":
            return HTTPStatus.OK, _TEXT, "ok\n"
        return HTTPStatus.OK, CONTENT_TYPE, render(families(stats))


class _Request(BaseHTTPRequestHandler):
    """One request on one connection, answered and closed; its head is read whole before it is looked at, so that its
    size and time are bounded here and not line by line."""

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.1"  # who names none is answered with headers all the same
    server_version, sys_version = "stepwell", ""

    def __init__(self, connection: socket.socket, answer: Callable[[str, float], tuple[HTTPStatus, str, str]]) -> None:
        self._ask = answer
        self._until = time.monotonic() + REQUEST_SECONDS
        super().__init__(connection, "", None)  # type: ignore[arg-type]

    def setup(self) -> None:
        self.connection = self.request
        self._buffer = io.BytesIO()
        self.wfile = self._buffer
        self._refused = False

    def handle(self) -> None:
        self.requestline, self.request_version, self.command = "", self.protocol_version, ""
        head = self._head()
        if len(head) > MAX_HEAD:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        self.rfile = io.BytesIO(head)
        self.raw_requestline = self.rfile.readline()
        if not self.raw_requestline or not self.parse_request():
            return
        if self.command != "GET":
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)
            return
        self._send(*self._ask(self.path.partition("?")[0], self._left()))

    def _head(self) -> bytes:
        """Up to and with the empty line; if that has not come within MAX_HEAD bytes, something longer than those."""
        head = b""
        while (end := _EMPTY_LINE.search(head)) is None and len(head) <= MAX_HEAD:
            self.request.settimeout(self._left())
            data = self.request.recv(_PIECE)
            if not data:
                break
            head += data
        return head if end is None else head[: end.end()]

    def _left(self) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long")
        return left

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        self._refused = status >= HTTPStatus.BAD_REQUEST
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self._buffer.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers with plain text that repeats nothing of the request."""
        status = HTTPStatus(code)
        self._send(status, _TEXT, f"{status.phrase.lower()}\n")

    def finish(self) -> None:
        self.request.settimeout(self._left())
        self.request.sendall(self._buffer.getvalue())  # the timeout is for all of it
        if self._refused:  # what is left unread would reset the connection before the answer is read
            self.request.shutdown(socket.SHUT_WR)
            drained = 0
            while drained < _DRAIN and (data := self.request.recv(_DRAIN)):
                drained += len(data)
                self.request.settimeout(self._left())

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        log.debug("a scrape was answered with %s", int(code))  # the request itself may hold anything


def check(address: str) -> None:
    """Raises ConfigError where `MetricsServer` would; nothing is made or replaced, and a listener is not disturbed."""
    if not address.startswith("/"):
        _bound(address).close()
        return
    path = Path(address)
    try:
        _is_dead(path)
        path.parent.stat()
    except OSError as error:
        raise _taken(address, error.strerror or str(error)) from error
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise _taken(address, f"a socket cannot be made in {path.parent}")


def _is_dead(path: Path) -> bool:
    """True: there is a socket without a listener. False: there is nothing. Raises ConfigError SW-119 for anything else,
    and OSError."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise _taken(str(path), "there is a file that is no socket")
    except FileNotFoundError:
        return False
    if _listens(path):
        raise _taken(str(path), "another process listens there")
    return True


def _on_port(address: str) -> socket.socket:
    listener = _bound(address)
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _taken(address, str(error)) from error
    return listener


def _bound(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    try:
        loopback, number = ipaddress.ip_address(host).is_loopback, int(port)
    except ValueError:
        loopback, number = False, 0
    if not loopback:
        raise ConfigError(
            "SW-102",
            what=f"metrics cannot be served at {address}",
            why="it is no loopback address with a port, and there is no password",
            fix="write 127.0.0.1:PORT, [::1]:PORT, localhost:PORT or the absolute path of a Unix socket",
        )
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what the last well left in TIME_WAIT
        listener.bind((host, number))
    except (OSError, OverflowError) as error:
        listener.close()
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        raise _taken(address, "another process listens there" if taken else str(error)) from error
    return listener


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(WELL_SECONDS)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # it may: nothing is removed on a guess
        return True


def _shown(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _taken(address: str, why: str) -> ConfigError:
    return ConfigError(
        "SW-119",
        what=f"metrics cannot be served at {address}",
        why=why,
        fix="set `metrics` to another address, or end what is there",
    )
