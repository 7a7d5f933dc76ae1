"""A proxy that forces the answers of a small model: what a client sends goes to Baton with further fields."""

import http.server
import json
import threading
import urllib.error
import urllib.request


class Proxy:
    """Sends requests on to `upstream`. `change` gets the path and the body of each POST and may change the body.

    `url` is the address for the client, and `bodies` are the bodies that were sent.
    """

    def __init__(self, upstream, change):
        self.bodies = bodies = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                self.forward(None)

            def do_HEAD(self):
                self.forward(None)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                change(self.path, body)
                bodies.append(body)
                self.forward(json.dumps(body).encode())

            def forward(self, body):
                dropped = ("host", "content-length", "accept-encoding", "connection")
                headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
                request = urllib.request.Request(upstream + self.path, body, headers, method=self.command)
                try:
                    answer = urllib.request.urlopen(request, timeout=300)
                except urllib.error.HTTPError as error:
                    answer = error
                self.send_response(answer.status)
                self.send_header("content-type", answer.headers["content-type"])
                self.end_headers()
                while piece := answer.read1(65536):
                    self.wfile.write(piece)
                    self.wfile.flush()

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
