"""`stepwire health --metrics`: alive, not there, somebody else's port."""

import http.server
import threading

import pytest
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from scheduler_svc.client.alive import answers_metrics
from scheduler_svc.errors import StartupError


def test_a_process_with_our_metrics_is_alive():
    registry = CollectorRegistry()
    Gauge("stepwire_epoch", "Lives.", registry=registry)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        assert answers_metrics(f"127.0.0.1:{server.server_port}", 60) == "ALIVE"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_metrics_of_somebody_else_are_not_ours():
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"go_threads 7\n")

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with pytest.raises(StartupError, match="nobody's metrics"):
            answers_metrics(f"127.0.0.1:{server.server_port}", 60)
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "not an address", "127.0.0.1:none"])
def test_nobody_there_is_a_clear_error(address):
    with pytest.raises(StartupError, match="does not answer"):
        answers_metrics(address, 0.5)
