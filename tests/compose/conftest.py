import socket
import uuid

import pytest

from tests.compose.stack import Stack, build_images, compose_command


def pytest_collection_modifyitems(items):
    here = [item for item in items if "tests/compose/" in str(item.path)]
    if here and compose_command() is None:
        for item in here:
            item.add_marker(pytest.mark.skip(reason="no Docker engine"))


@pytest.fixture(scope="session")
def stack():
    """The whole product in containers, float32 so that tokens are exact; taken down at the end, volumes too."""
    compose = compose_command()
    assert compose is not None
    build_images()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"STEPWIRE_DTYPE": "float32", "STEPWIRE_KV_MEMORY": "512MiB"}
    stack = Stack(compose, f"stepwire-test-{uuid.uuid4().hex[:8]}", port, environment)
    try:
        stack.run("up", "--detach", "--no-build")
        stack.started_s = stack.wait_serving(limit_s=180)
        yield stack
    finally:
        print(stack.run("logs", "--no-color", "--tail", "20", check=False)[-6000:])
        stack.run("down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)
