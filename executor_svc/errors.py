"""What can go wrong in the executor, split by what happens next.

    ExecutorError
    ├── StartupError     the service cannot start: `str(error)` is the one line the operator sees, exit status 1
    ├── EpochFault       this epoch ends; the process lives and waits for the next StartEpoch
    │   ├── PlanViolation    a plan broke the contract: it named something that does not exist or does not fit
    │   └── ComputeFault     the device answered nonsense (a token outside the vocabulary)
    │       └── NotFinite    ... not-a-number or infinite logits
    ├── RowFault         one row's parameters leave nothing to draw: its request ends, the step and the others do not
    └── Refused          the scheduler will never serve us (another model, another protocol)

Anything else is a bug or a broken device: it ends the process, and the scheduler recovers by epoch.
"""

from protos.stepwire.wire.v1 import step_pb2


class ExecutorError(Exception):
    pass


class StartupError(ExecutorError):
    pass


class EpochFault(ExecutorError):
    kind = step_pb2.FAULT_KIND_UNSPECIFIED


class PlanViolation(EpochFault):
    kind = step_pb2.FAULT_KIND_PLAN_REFUSED


class ComputeFault(EpochFault):
    kind = step_pb2.FAULT_KIND_COMPUTE


class NotFinite(ComputeFault):
    kind = step_pb2.FAULT_KIND_NOT_FINITE


class RowFault(ExecutorError):
    """`str(fault)` is for the client."""


class Refused(ExecutorError):
    pass
