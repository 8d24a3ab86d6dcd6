import json
import socket
import threading

import pytest

from scheduler_svc.errors import StartupError
from scheduler_svc.supervisor import ports, ready
from tests.e2e.server import free_port


@pytest.fixture
def taken_port():
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_that_others_share_is_taken_all_the_same(taken_port):
    with pytest.raises(StartupError, match=rf"^cannot listen on 127.0.0.1:{taken_port} \(address already in use\)"):
        ports.check_free("127.0.0.1", taken_port, "--port")
    assert not ports.is_free("127.0.0.1", taken_port)


def test_a_port_is_free_again_after_its_listener(taken_port):
    port = free_port()  # one that nobody is given by chance
    with socket.create_server(("127.0.0.1", port)):
        assert not ports.is_free("127.0.0.1", port)
    assert ports.is_free("127.0.0.1", port)


def test_a_host_that_is_not_ours_is_refused():
    with pytest.raises(StartupError, match=r"cannot listen on 192\.0\.2\.1:0"):
        ports.check_free("192.0.2.1", 0, "--port")


def test_addresses_are_written_so_that_clients_understand_them():
    assert ports.join("127.0.0.1", 1) == "127.0.0.1:1"
    assert ports.join("::1", 1) == "[::1]:1"
    assert ports.reachable("0.0.0.0") == "127.0.0.1"
    assert ports.reachable("10.0.0.1") == "10.0.0.1"


def test_a_reader_never_sees_half_an_object(tmp_path):
    path = tmp_path / "ready"
    values = [{"pid": i, "filler": "x" * 100_000} for i in range(20)]
    ready.write(path, values[0])

    def rewrite():
        for value in values:
            ready.write(path, value)

    writer = threading.Thread(target=rewrite)
    writer.start()
    while writer.is_alive():
        assert json.loads(path.read_text())["filler"] == values[0]["filler"]
    writer.join()
    assert ready.read(path) == values[-1]
    assert [p.name for p in tmp_path.iterdir()] == ["ready"]


def test_nothing_to_read_is_none(tmp_path):
    assert ready.read(tmp_path / "absent") is None
    (tmp_path / "half").write_text('{"pid": ')
    assert ready.read(tmp_path / "half") is None
