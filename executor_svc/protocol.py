"""The executor's side of the conversation with a scheduler, as a pure machine: messages in, what to do out.

Knows nothing of sockets, threads or clocks. There are two states:

    seeking   says hello until a scheduler answers with StartEpoch
    serving   runs plans of one (boot_id, epoch), strictly step after step

Anything a serving executor cannot explain (another boot or epoch, a step that is not the next one) ends its epoch: it
says why in a Fault and seeks again. It keeps its weights, and nothing else.
"""

from dataclasses import dataclass

from protos.stepwire.wire.v1 import step_pb2

# 2: the hello names the epoch we have known, faults have a kind. A scheduler of the version before ignores both.
PROTOCOL_VERSION = 2
OLDEST_PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class EpochStarted:
    """Forget every row and every block: plans from here on start from nothing."""

    boot_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class NotServed:
    """A scheduler does not take us: for good (`fatal`), or because another executor serves."""

    reason: str
    fatal: bool


@dataclass(frozen=True, slots=True)
class Violation:
    """The scheduler broke the contract; the epoch is over and this fault says why."""

    fault: step_pb2.Fault


Action = EpochStarted | step_pb2.StepPlan | NotServed | Violation | None


class ProtocolState:
    def __init__(self) -> None:
        self.boot_id = 0
        self.epoch = 0
        self.serving = False
        self.last_step = 0

    def on_message(self, message: step_pb2.ToExecutor) -> Action:
        """What this message asks of the executor; None: nothing."""
        match message.WhichOneof("body"):
            case "start_epoch":
                return self._on_start_epoch(message.start_epoch)
            case "plan":
                return self._on_plan(message.plan)
            case "refusal":
                return NotServed(message.refusal.reason, message.refusal.fatal)
            case _:
                return None

    def _on_start_epoch(self, start: step_pb2.StartEpoch) -> Action:
        if start.boot_id == self.boot_id and start.epoch <= self.epoch:
            return None  # late: it belongs to a life that is over
        self.boot_id, self.epoch = start.boot_id, start.epoch
        self.serving, self.last_step = True, 0
        return EpochStarted(start.boot_id, start.epoch)

    def _on_plan(self, plan: step_pb2.StepPlan) -> Action:
        if not self.serving:
            return None  # sent before the scheduler heard that the epoch is over
        expected = (self.boot_id, self.epoch, self.last_step + 1)
        got = (plan.boot_id, plan.epoch, plan.step_id)
        if got != expected:
            message = f"plan (boot, epoch, step) is {got}, expected {expected}"
            return Violation(self.fault(message, step_pb2.FAULT_KIND_PLAN_REFUSED))
        self.last_step = plan.step_id
        return plan

    def fault(self, message: str, kind: "step_pb2.FaultKind") -> step_pb2.Fault:
        """Ends the epoch from this side."""
        self.serving = False
        return step_pb2.Fault(
            boot_id=self.boot_id, epoch=self.epoch, step_id=self.last_step, message=message, kind=kind
        )

    def on_scheduler_boot(self, boot_id: int) -> bool:
        """Which scheduler answers our heartbeats. True: not the one we serve, so the epoch is over."""
        if self.serving and boot_id != self.boot_id:
            self.serving = False
            return True
        return False

    def fence(self) -> bool:
        """The scheduler has been silent for too long. True: an epoch ended by that."""
        was_serving, self.serving = self.serving, False
        return was_serving

    def accepts(self, result: step_pb2.StepResult) -> bool:
        """False: the epoch ended while this step ran, nobody wants its result."""
        return self.serving and (result.boot_id, result.epoch) == (self.boot_id, self.epoch)
