"""``python -m kvflash.frontend`` that also tells what its index holds, on a port of its own."""

from __future__ import annotations

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvflash._core import Frontend
from kvflash.frontend import app
from kvflash.frontend.args import FrontendArgs

make_frontend = app.make_frontend


def make_with_digests(args: FrontendArgs) -> tuple[Frontend, dict[int, str]]:
    frontend, fleet = make_frontend(args)

    class Digests(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            held = [
                [instance_id, rank, blocks, str(digest)]
                for _, instance_id, rank, blocks, digest, _ in frontend.catalog.digests()
                if blocks
            ]
            body = json.dumps(held).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ["DIGESTS_PORT"])), Digests)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return frontend, fleet


app.make_frontend = make_with_digests
sys.exit(app.main())
