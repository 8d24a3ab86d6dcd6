"""compose.yaml and its overrides against the Compose Specification's schema: what docker compose v2 reads.

compose-spec.json is schema/compose-spec.json of github.com/compose-spec/compose-spec at 170098ba07d9, unchanged; its
licence is Apache-2.0, as this repository's.
"""

import copy
import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft7Validator

from tests.architecture.source import ROOT

SCHEMA = json.loads(Path(__file__).with_name("compose-spec.json").read_text())
FILES = ("compose.yaml", "deploy/compose.gpu.yaml")


def faults(document: object) -> list[str]:
    return [f"{fault.json_path}: {fault.message}" for fault in Draft7Validator(SCHEMA).iter_errors(document)]


@pytest.mark.parametrize("name", FILES)
def test_the_file_follows_the_specification(name):
    assert faults(yaml.safe_load((ROOT / name).read_text())) == []


def test_no_other_compose_file_goes_unlooked_at():
    found = {
        path.relative_to(ROOT).as_posix() for path in (ROOT, ROOT / "deploy") for path in path.glob("compose*.yaml")
    }
    assert found == set(FILES)


def test_a_misspelt_key_and_a_wrong_kind_are_found():
    good = yaml.safe_load((ROOT / "compose.yaml").read_text())
    for key, value in (("read_onyl", True), ("cap_drop", "ALL"), ("pids_limit", {})):
        document = copy.deepcopy(good)
        document["services"]["scheduler"][key] = value
        assert faults(document), key


def test_the_old_version_key_is_gone():
    """Compose v2 warns of it."""
    assert "version" not in yaml.safe_load((ROOT / "compose.yaml").read_text())
