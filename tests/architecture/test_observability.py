"""docs/observability.md names every metric that there is, with its kind and labels, every alert and every span."""

import re

import yaml
from prometheus_client import CollectorRegistry

from executor_svc.metrics import ExecutorMetrics
from scheduler_svc.frontend.metrics import FrontendMetrics
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.supervisor.metrics import MergedMetrics
from tests.architecture.source import ROOT

TEXT = (ROOT / "docs" / "observability.md").read_text()
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TEXT.splitlines() if line.startswith("| `")]


def test_every_metric_is_named_with_its_kind_and_labels(tmp_path):
    registries = [CollectorRegistry() for _ in range(3)]
    SchedulerMetrics(registries[0])
    ExecutorMetrics(registries[1])
    FrontendMetrics(registries[2])
    registries.append(MergedMetrics(tmp_path)._registry)
    found = set()
    for registry in registries:
        for collector in set(registry._collector_to_names):
            for metric in collector.describe() if hasattr(collector, "describe") else ():
                name = metric.name + ("_total" if metric.type == "counter" else "")
                found.add((name, metric.type, frozenset(collector._labelnames)))
    named = {
        (cells[0].strip("`"), cells[1], frozenset(re.findall(r"`(\w+)`", cells[2])))
        for cells in ROWS
        if len(cells) == 4
    }
    assert named == found


def test_every_alert_is_named():
    rules = yaml.safe_load((ROOT / "deploy" / "observability" / "alerts.yml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert {cells[0].strip("`") for cells in ROWS if len(cells) == 2 and cells[0].startswith("`Stepwire")} == alerts


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
