"""What can go wrong in the executor, split by what happens next.

    ExecutorError
    ├── StartupError     the service cannot start: `str(error)` is the one line the operator sees, exit status 1
    ├── EpochFault       this epoch ends; the process lives and waits for the next StartEpoch
    │   ├── PlanViolation    a plan broke the contract: it named something that does not exist or does not fit
    │   └── ComputeFault     the device answered nonsense (not-a-number logits, a token outside the vocabulary)
    ├── RowFault         one row's parameters leave nothing to draw: its request ends, the step and the others do not
    └── Refused          the scheduler will never serve us (another model, another protocol)

Anything else is a bug or a broken device: it ends the process, and the scheduler recovers by epoch.
"""


class ExecutorError(Exception):
    pass


class StartupError(ExecutorError):
    pass


class EpochFault(ExecutorError):
    pass


class PlanViolation(EpochFault):
    pass


class ComputeFault(EpochFault):
    pass


class RowFault(ExecutorError):
    """`str(fault)` is for the client."""


class Refused(ExecutorError):
    pass
