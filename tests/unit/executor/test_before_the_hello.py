"""What an executor has done before it says hello, because its heartbeats would have to wait for it."""

import numpy as np
import pytest

from executor_svc import serve
from executor_svc.config import BackendChoice, ExecutorConfig
from executor_svc.constraints import Grammars
from executor_svc.errors import RowFault
from executor_svc.link import LinkSettings


class Ended(Exception):
    pass


def test_the_tokenizer_of_constraints_is_there_before_the_link(monkeypatch):
    order: list[str] = []

    def link(*_: object) -> None:
        order.append("link")
        raise Ended

    monkeypatch.setattr(serve, "ExecutorLink", link)
    monkeypatch.setattr(Grammars, "load", lambda self: order.append("tokenizer"))
    with pytest.raises(Ended):
        serve.serve(ExecutorConfig(backend=BackendChoice.SIMULATED), LinkSettings("inproc://a", "inproc://b"), None)
    assert order == ["tokenizer", "link"]


def test_a_tokenizer_that_is_missing_is_the_fault_of_a_row(tmp_path):
    grammars = Grammars(tmp_path, 10)
    grammars.load()
    ends = np.array([0], np.int32)
    (mask,) = grammars.masks([(grammars.begin("start: /a/", ends), np.empty(0, np.int32))])
    with pytest.raises(RowFault):
        mask.wait()
