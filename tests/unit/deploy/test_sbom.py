"""What `make sbom` writes: valid CycloneDX, every locked package, a licence for each, the same bytes each time."""

import importlib.util
import json
import re

import pytest

from tests.architecture.source import ROOT


@pytest.fixture(scope="module")
def sbom():
    specification = importlib.util.spec_from_file_location("sbom", ROOT / "deploy" / "sbom.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("image", ["scheduler", "executor"])
def test_every_locked_package_is_there_with_its_hashes_and_a_licence(sbom, image):
    bill = json.loads(sbom.render(sbom.bill(image, sbom.contents(image))))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    components = {component["name"]: component for component in bill["components"]}
    lock = (ROOT / "deploy" / "locks" / f"{image}.txt").read_text()
    entries = re.findall(r"^([a-z0-9._-]+)==[^\s;]+( ;)?", lock, re.MULTILINE)
    assert {name for name, marker in entries if not marker} - components.keys() == set()
    chosen = {"torch", "triton"} if image == "executor" else set()
    assert components.keys() - {name for name, _ in entries} == chosen
    for name, component in components.items():
        assert component["licenses"], name
        assert name in chosen or component["hashes"], name
    (all_of_it,) = [entry for entry in bill["dependencies"] if entry["ref"] == f"stepwire-{image}"]
    assert len(all_of_it["dependsOn"]) == len(components)


def test_it_follows_the_schema_and_what_does_not_is_refused(sbom):
    """A few packages are enough: the schema is large and slow."""
    text = sbom.render(sbom.bill("scheduler", sbom.contents("scheduler")[:4]))
    sbom.check(text, "scheduler")
    with pytest.raises(SystemExit, match="does not follow"):
        sbom.check(text.replace('"SHA-256"', '"SHA-257"'), "scheduler")


def test_the_list_names_each_package_once_with_what_it_says_itself(sbom):
    text = sbom.license_list({image: sbom.contents(image) for image in sbom.IMAGES})
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
    names = [row[0] for row in rows]
    assert names == sorted(set(names))
    assert {row[0]: row[2] for row in rows}["typer"] == "MIT"
    assert "not stated" not in {row[2] for row in rows}


def test_it_is_reproducible(sbom):
    packages = sbom.contents("scheduler")[:4]
    assert sbom.render(sbom.bill("scheduler", packages)) == sbom.render(sbom.bill("scheduler", packages))


def test_what_linux_does_not_install_is_left_out_and_what_is_not_pinned_is_refused(sbom):
    lock = "a==1 ; sys_platform == 'win32' \\\n    --hash=sha256:00\n"
    lock += "B.c==2 \\\n    --hash=sha256:01 \\\n    --hash=sha256:02\n"
    assert sbom.locked(lock) == [sbom.Package("b-c", "2", ("01", "02"))]
    with pytest.raises(SystemExit, match="not a pinned package"):
        sbom.locked("a>=1\n")
