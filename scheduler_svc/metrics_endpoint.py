"""GET /metrics from a thread of its own, always in Prometheus' plain text form.

prometheus_client's own server lets a scraper choose OpenMetrics, and in that form turns the colon of `vllm:` names into
an underscore: Prometheus 2 asks for it, and would not find them.
"""

import socket
from collections.abc import Iterable
from socketserver import ThreadingMixIn
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        # Without the name of the host, which WSGIServer looks up: that can take seconds.
        super(WSGIServer, self).server_bind()
        self.server_name, self.server_port = self.server_address[0], self.server_address[1]  # type: ignore[assignment]
        self.setup_environ()


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> int:
    """The port that answers. Raises OSError when it cannot be had."""
    app: Any = make_wsgi_app(registry)

    def plain(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        return app({**environ, "HTTP_ACCEPT": "text/plain"}, start_response)

    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    server_class = type("MetricsServer", (_Server,), {"address_family": family})
    server: Any = make_server(host, port, plain, server_class, _SilentHandler)
    Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return int(server.server_address[1])
