"""The limit beside the well: `python -m lab.bench.halves.echo PATH` sends back what it gets, with the well's pattern.

One thread, `selectors`, non-blocking sockets, and nothing in between: what a round trip through a Python process costs
on this machine at this moment. Ends with its standard input.
"""

from __future__ import annotations

import contextlib
import gc
import selectors
import socket
import sys


def serve(path: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    listener.setblocking(False)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    gc.disable()
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                return
            if key.fileobj is listener:
                sock, _ = listener.accept()
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_READ)
                continue
            assert isinstance(key.fileobj, socket.socket)
            data = b""
            with contextlib.suppress(ConnectionResetError):
                data = key.fileobj.recv(65536)
            if data:
                key.fileobj.send(data)  # far less than a socket takes at once
            else:
                selector.unregister(key.fileobj)
                key.fileobj.close()


if __name__ == "__main__":
    serve(sys.argv[1])
