"""What an executor has done before it says hello, because its heartbeats would have to wait for it, and what not."""

import threading

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from executor_svc import serve
from executor_svc.config import BackendChoice, ExecutorConfig
from executor_svc.constraints import SMALL_BYTES, Grammars
from executor_svc.errors import RowFault
from executor_svc.link import LinkSettings
from executor_svc.metrics import ExecutorMetrics


class Ended(Exception):
    pass


@pytest.mark.parametrize(("size", "before"), [(SMALL_BYTES, False), (SMALL_BYTES + 1, True)])
def test_a_large_tokenizer_is_there_before_the_link_and_a_small_one_later(monkeypatch, tmp_path, size, before):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "vocab_size": 10}')
    (tmp_path / "tokenizer.json").write_bytes(bytes(size))
    order: list[str] = []

    class Link:
        def __init__(self, *_: object) -> None:
            order.append("link")

        def __enter__(self) -> "Link":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def receive(self, timeout_s: float | None = None) -> None:
            raise Ended

    monkeypatch.setattr(serve, "ExecutorLink", Link)
    monkeypatch.setattr(serve, "ExecutorMetrics", lambda: ExecutorMetrics(CollectorRegistry()))
    monkeypatch.setattr(Grammars, "load", lambda self: order.append("tokenizer"))
    monkeypatch.setattr(Grammars, "load_in", lambda self, delay_s: order.append("later") or threading.Timer(0, print))
    config = ExecutorConfig(tmp_path, BackendChoice.SIMULATED)
    with pytest.raises(Ended):
        serve.serve(config, LinkSettings("inproc://a", "inproc://b"), None)
    assert order == [*(["tokenizer"] if before else []), "link", "later"]


def test_a_tokenizer_is_loaded_when_its_time_has_come_and_once(monkeypatch, tmp_path):
    loads: list[str] = []
    monkeypatch.setattr(Grammars, "_load", lambda self: loads.append("tokenizer"))
    grammars = Grammars(tmp_path, 10)
    timer = grammars.load_in(0.0)
    timer.join(60)
    grammars.load()
    assert loads == ["tokenizer"]
    cancelled = Grammars(tmp_path, 10)
    timer = cancelled.load_in(3600.0)
    timer.cancel()
    timer.join(60)
    assert not timer.is_alive()
    assert loads == ["tokenizer"]


def test_a_tokenizer_that_is_missing_is_the_fault_of_a_row(tmp_path):
    grammars = Grammars(tmp_path, 10)
    grammars.load()
    ends = np.array([0], np.int32)
    (mask,) = grammars.masks([(grammars.begin("start: /a/", ends), np.empty(0, np.int32))])
    with pytest.raises(RowFault):
        mask.wait()
