"""deploy/k8s against the API's own schemas, offline, and against itself: every name that is referred to exists."""

from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.architecture.source import ROOT

BASE = ROOT / "deploy/k8s/base"
KUSTOMIZATION = yaml.safe_load((BASE / "kustomization.yaml").read_text())
OBJECTS = [
    pytest.param(document, id=f"{name}:{document['kind']}/{document['metadata']['name']}")
    for name in KUSTOMIZATION["resources"]
    for document in yaml.safe_load_all((BASE / name).read_text())
]
PODS = [p for p in OBJECTS if p.values[0]["kind"] in ("Deployment", "Job")]
OLDEST, NEWEST = "1.29.0", "1.37.0"


def pod_of(workload):
    return workload["spec"]["template"]["spec"]


@pytest.mark.parametrize("document", OBJECTS)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_objects_follow_the_schema(document, version):
    kubernetes_validate.validate(document, version, strict=True)


def test_a_misspelt_field_is_found():
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "x", "lables": {}}}, NEWEST, strict=True
        )


@pytest.mark.parametrize("workload", PODS)
def test_pods_are_locked_down(workload):
    pod = pod_of(workload)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"requests", "limits"} <= set(container["resources"])
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("workload", PODS)
def test_every_mount_has_its_volume_and_every_port_its_name(workload):
    pod = pod_of(workload)
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        ports = {port["name"] for port in container.get("ports", [])}
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            action = container.get(kind, {}).get("httpGet") or container.get(kind, {}).get("tcpSocket")
            assert action is None or action["port"] in ports


def test_grace_exceeds_the_wait_and_the_drain():
    frontend = next(p.values[0] for p in PODS if p.values[0]["metadata"]["name"] == "frontend")
    container = pod_of(frontend)["containers"][0]
    wait = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = next(int(a.partition("=")[2]) for a in container["args"] if a.startswith("--drain-timeout="))
    assert pod_of(frontend)["terminationGracePeriodSeconds"] > wait + drain


def test_liveness_does_not_depend_on_the_executor():
    """gRPC health is readiness: it needs scheduler and executor, and a restart would bring neither back."""
    for p in PODS:
        for container in pod_of(p.values[0])["containers"]:
            assert "grpc" not in container.get("livenessProbe", {})


def test_services_select_pods_that_exist_and_policies_too():
    names = {p.values[0]["metadata"]["name"] for p in PODS}
    for p in OBJECTS:
        document = p.values[0]
        selector = document["spec"].get("selector") if document["kind"] == "Service" else None
        if selector:
            assert selector["app.kubernetes.io/name"] in names
        if document["kind"] == "NetworkPolicy":
            labels = document["spec"]["podSelector"].get("matchLabels", {})
            assert labels.get("app.kubernetes.io/name", "frontend") in names


def test_one_envoy_configuration():
    """kustomize reads only what lies below it, so the file is there twice."""
    assert (BASE / "envoy.yaml").read_text() == (ROOT / "deploy/envoy/envoy.yaml").read_text()


@pytest.mark.parametrize("overlay", sorted(path.name for path in (ROOT / "deploy/k8s/overlays").iterdir()))
def test_overlays_patch_what_exists(overlay):
    folder = ROOT / "deploy/k8s/overlays" / overlay
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert [(folder / Path(r)).resolve() for r in kustomization["resources"]] == [BASE.resolve()]
    names = {(p.values[0]["kind"], p.values[0]["metadata"]["name"]) for p in OBJECTS}
    for patch in kustomization["patches"]:
        assert (patch["target"]["kind"], patch["target"]["name"]) in names
        assert all({"op", "path", "value"} == set(op) for op in yaml.safe_load(patch["patch"]))
