"""The drawn dashboard asks Grafana's own queries, over the time asked for, and writes a picture."""

import importlib.util
import json
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.architecture.source import ROOT

PANELS = json.loads((ROOT / "deploy/observability/grafana/dashboards/stepwire.json").read_text())["panels"]


@pytest.fixture
def prometheus():
    """Answers every query with one series that has a gap, and keeps what it was asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
            asked.append(query)
            start, end = float(query["start"]), float(query["end"])
            values = [[start, "1"], [(start + end) / 2, "NaN"], [end, "2"]]
            series = [{"metric": {"finish_reason": "stop"}, "values": values}]
            body = json.dumps({"status": "success", "data": {"result": series}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_every_query_of_the_dashboard_is_asked_and_drawn(prometheus, tmp_path, monkeypatch):
    url, asked = prometheus
    specification = importlib.util.spec_from_file_location("render", ROOT / "deploy" / "observability" / "render.py")
    assert specification is not None
    assert specification.loader is not None
    render = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(render)
    picture = tmp_path / "x.png"
    monkeypatch.setattr(sys, "argv", ["render", url, str(picture), "--seconds", "60", "--end", "1000"])
    render.main()
    assert picture.read_bytes().startswith(b"\x89PNG")
    expected = [t["expr"].replace("$__rate_interval", "8s") for panel in PANELS for t in panel["targets"]]
    assert [query["query"] for query in asked] == expected
    assert {(float(query["start"]), float(query["end"])) for query in asked} == {(940.0, 1000.0)}
    assert render.legend({"expr": "x", "legendFormat": "{{finish_reason}}!"}, {"finish_reason": "stop"}) == "stop!"
