"""What is in the images: a CycloneDX bill of materials for each, and one list of licences.

    python deploy/sbom.py [FOLDER]          # make sbom; dist/sbom without a folder

Read from the hash-pinned locks, for Linux and CPython, and from what the installed packages say of their licences,
without a network. The executor's lock leaves out torch and what comes with it, because its image chooses the build:
torch and triton are listed in the version that constraints.txt names, without hashes. What the base image brings is the
base image's to tell.
"""

import json
import re
import sys
import tomllib
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from jsonschema import Draft7Validator
from packageurl import PackageURL
from packaging.markers import Marker
from packaging.utils import canonicalize_name
from referencing import Registry, Resource

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ("scheduler", "executor")
CHOSEN_BY_THE_IMAGE = ("torch", "triton")
PINNED = re.compile(r"([A-Za-z0-9._-]+)==(\S+?)(?: *; *(.*))?")
LINUX = {
    **{"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": "x86_64"},
    **{"implementation_name": "cpython", "platform_python_implementation": "CPython"},
    **{"python_version": "3.11", "python_full_version": "3.11.0"},
}
SCHEMAS = resources.files("cyclonedx.schema") / "_res"
SCHEMA_NAMES = ("bom-1.6.SNAPSHOT.schema.json", "spdx.SNAPSHOT.schema.json", "jsf-0.82.SNAPSHOT.schema.json")
CLASSIFIER = "License :: OSI Approved :: "


@dataclass(frozen=True, slots=True)
class Package:
    name: str
    version: str
    hashes: tuple[str, ...] = ()


def locked(text: str) -> list[Package]:
    """The packages of a lock that Linux installs."""
    found = []
    for entry in re.split(r"\n(?=\S)", text.replace("\\\n", " ")):
        head, *hashes = entry.split("--hash=sha256:")
        match = PINNED.fullmatch(head.strip())
        if match is None:
            raise SystemExit(f"sbom: not a pinned package: {head.strip()[:60]!r}")
        name, version, marker = match.groups()
        if marker is None or Marker(marker).evaluate(LINUX):
            found.append(Package(canonicalize_name(name), version, tuple(h.strip() for h in hashes)))
    return found


def contents(image: str) -> list[Package]:
    packages = locked((ROOT / "deploy" / "locks" / f"{image}.txt").read_text())
    if image == "executor":
        pins = dict(
            line.split("==")
            for line in (ROOT / "constraints.txt").read_text().splitlines()
            if line[:1] not in ("#", "")
        )
        packages += [Package(name, pins[name]) for name in CHOSEN_BY_THE_IMAGE]
    return sorted(packages, key=lambda package: package.name)


def license_of(package: Package) -> str:
    """As the installed package says it: an SPDX expression where it has one, else its own words, else its classifiers.

    Raises SystemExit for a package that is not installed here, in whatever version: a list with holes is none.
    """
    try:
        about = metadata.metadata(package.name)
    except metadata.PackageNotFoundError:
        raise SystemExit(f"sbom: {package.name} is locked but not installed here: make install") from None
    expression = about.get("License-Expression")
    if expression:
        return expression
    classifiers = about.get_all("Classifier", [])
    named = [value.removeprefix(CLASSIFIER) for value in classifiers if value.startswith(CLASSIFIER)]
    words = (about.get("License") or "").strip()
    # Some put the whole text of the licence there.
    return words if words and "\n" not in words and len(words) < 80 else ", ".join(named) or "not stated"


def bill(image: str, packages: list[Package]) -> Bom:
    """Reproducible: no serial number, no time."""
    licenses = LicenseFactory()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    root = Component(
        name=f"stepwire-{image}",
        version=project["version"],
        type=ComponentType.CONTAINER,
        licenses=[licenses.make_from_string(project["license"])],
        bom_ref=f"stepwire-{image}",
    )
    bom = Bom()
    bom.metadata.component = root
    for package in packages:
        component = Component(
            name=package.name,
            version=package.version,
            type=ComponentType.LIBRARY,
            bom_ref=f"{package.name}=={package.version}",
            purl=PackageURL("pypi", None, package.name, package.version),
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=value) for value in package.hashes],
            licenses=[licenses.make_from_string(license_of(package))],
        )
        bom.components.add(component)
        bom.register_dependency(root, [component])
    return bom


def render(bom: Bom) -> str:
    text = JsonV1Dot6(bom).output_as_string(indent=2)
    text = re.sub(r'\n *"(serialNumber|timestamp)": "[^"]*",?', "", text)
    return re.sub(r",(\s*\})", r"\1", text) + "\n"


def check(text: str, image: str) -> None:
    """Against the schemas that the library carries: its own validator takes seconds to import."""
    schemas = {name: json.loads((SCHEMAS / name).read_text()) for name in SCHEMA_NAMES}
    known = [(key, Resource.from_contents(s)) for name, s in schemas.items() for key in (name, s["$id"])]
    bom = schemas[SCHEMA_NAMES[0]] | {"$id": "bom"}  # its names for the others are relative
    fault = next(Draft7Validator(bom, registry=Registry().with_resources(known)).iter_errors(json.loads(text)), None)
    if fault is not None:
        raise SystemExit(f"sbom: {image} does not follow CycloneDX 1.6: {fault.message[:200]} at {fault.json_path}")


def license_list(images: dict[str, list[Package]]) -> str:
    where: dict[Package, list[str]] = {}
    for image, packages in images.items():
        for package in packages:
            where.setdefault(Package(package.name, package.version), []).append(image)
    rows = [
        f"| {package.name} | {package.version} | {license_of(package)} | {', '.join(names)} |"
        for package, names in sorted(where.items(), key=lambda item: item[0].name)
    ]
    return "\n".join(["| package | version | licence | in the image of |", "|---|---|---|---|", *rows]) + "\n"


def main(folder: Path) -> None:
    images = {image: contents(image) for image in IMAGES}
    folder.mkdir(parents=True, exist_ok=True)
    for image, packages in images.items():
        text = render(bill(image, packages))
        check(text, image)
        (folder / f"{image}.cdx.json").write_text(text)
    (folder / "licences.md").write_text(license_list(images))
    print(f"{folder}: " + ", ".join(f"{image}.cdx.json ({len(p)} packages)" for image, p in images.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist" / "sbom")
