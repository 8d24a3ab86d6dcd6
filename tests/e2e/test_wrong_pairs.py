"""Services that do not fit together, as processes: who comes late is refused, both are named, serving goes on."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from executor_svc.identity import fingerprint
from tests.e2e.known_answers import assert_clean, requests, streams, until
from tests.e2e.process import FRONTEND, LIMIT_S, Process
from tests.e2e.stage import Stage

SEED = 7_400


@pytest.fixture
def other_model(tmp_path: Path, default_model: Path) -> Path:
    """The same in everything but a word of its config."""
    directory = tmp_path / "other"
    directory.mkdir()
    for path in default_model.iterdir():
        (directory / path.name).symlink_to(path)
    config = json.loads((default_model / "config.json").read_text())
    (directory / "config.json").unlink()
    (directory / "config.json").write_text(json.dumps(config | {"_name_or_path": "another"}))
    return directory


async def ended(process: Process) -> int:
    return await asyncio.to_thread(process.popen.wait, LIMIT_S)


async def test_an_executor_and_a_frontend_of_another_model_are_refused_and_serving_goes_on(
    tmp_path, default_model, other_model
):
    ours, theirs = fingerprint(default_model), fingerprint(other_model)
    with Stage(tmp_path, default_model) as stage, stage.thread():
        await until(lambda: stage.load().executor_ready)
        epoch = stage.load().epoch
        async with streams(stage, requests(8, SEED)) as running:
            # The last --model counts.
            with stage.executor("another-model", "--model", other_model) as executor:
                assert await ended(executor) == 1
            with stage.executor("another-block-size", "--block-size", 32) as executor:
                assert await ended(executor) == 1
        said = (tmp_path / "another-model.log").read_text()
        assert {ours, theirs} <= set(re.findall(r"[0-9a-f]{32}", said)), said
        said = (tmp_path / "another-block-size.log").read_text()
        assert all(word in said for word in ("block_size", "16", "32")), said
        arguments = ("--connect", stage.frontend_socket, "--port", stage.spare_port, "--model", other_model)
        with Process(tmp_path, "another-frontend", *FRONTEND, *arguments) as frontend:
            await asyncio.to_thread(frontend.wait_until_it_says, "session_refused")
            said = frontend.output()
        assert {ours, theirs} <= set(re.findall(r"[0-9a-f]{32}", said)), said
        assert [i for i, stream in enumerate(running) if not stream.is_exact] == []
        assert stage.load().epoch == epoch
        assert_clean(stage)
