"""A fault on purpose, for tests of recovery: the simulated backend can be told to fail whenever a token is computed.

So a prompt that holds the token kills executors again and again, as a real poison request would. No other backend knows
of it. In an option it is written KIND:TOKEN, "kill:7" say.
"""

import os
import signal
import threading
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from executor_svc.errors import NotFinite, StartupError

EXIT_STATUS = 3


class FaultName(StrEnum):
    KILL = "kill"  # as by SIGKILL from outside
    EXIT = "exit"  # the process ends without a word
    HANG = "hang"  # the step never ends
    ERROR = "error"  # the device reports an error: the process ends
    NAN = "nan"  # the logits are not numbers: the epoch ends


@dataclass(frozen=True, slots=True)
class InjectedFault:
    name: FaultName
    token_id: int

    @staticmethod
    def parse(text: str) -> "InjectedFault":
        name, _, token = text.partition(":")
        if name not in list(FaultName) or not token.isdecimal():
            names = ", ".join(FaultName)
            raise StartupError(f"--sim-fault {text!r} is not KIND:TOKEN, as in kill:7; the kinds are {names}")
        return InjectedFault(FaultName(name), int(token))

    def strike(self, token_ids: np.ndarray) -> None:
        """`token_ids`: those that a step computes."""
        if not (token_ids == self.token_id).any():
            return
        match self.name:
            case FaultName.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case FaultName.EXIT:
                os._exit(EXIT_STATUS)
            case FaultName.HANG:
                threading.Event().wait()
            case FaultName.ERROR:
                raise RuntimeError("an injected error of the device")
            case FaultName.NAN:
                raise NotFinite("the model's logits are not finite")
