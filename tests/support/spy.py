"""An engine of model m for tests of what services show it."""

from __future__ import annotations

import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Spy:
    """An engine, or a peer, that keeps the headers of what it is asked; HTTPS with a context."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.seen: list[tuple[str, dict[str, str]]] = []
        spy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                self._answer()

            def _answer(self) -> None:
                spy.seen.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
                body = b'{"object": "list", "data": [{"id": "m", "parent": null}], "choices": []}'
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        scheme = "http"
        if context is not None:
            scheme = "https"
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"{scheme}://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def shown(self, path: str) -> set[str | None]:
        """The keys that it was shown with requests for ``path``."""
        return {headers.get("authorization") for asked, headers in self.seen if asked == path}
