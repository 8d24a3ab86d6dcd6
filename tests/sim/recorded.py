"""Worlds with a journal: the same life, written down, replayed by a core that has only the file."""

from pathlib import Path

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.journal.recorder import Journal, RecordedScheduler
from tests.sim.world import World


class RecordedWorld(World):
    """Each life of the scheduler has a journal of its own in `folder`; `paths` names the files to be replayed."""

    def __init__(self, seed: int, folder: Path, *, masked: bool, limit_bytes: int = 2**30):
        self._folder, self._masked, self._limit_bytes = folder, masked, limit_bytes
        self._journals = 0
        super().__init__(seed)

    def _scheduler(self) -> Scheduler:
        self._journals += 1
        # A core with a wrong belief could not be made again from the file.
        self.is_hopeful = False
        path = self._folder / f"{self.seed}.{self._journals}.journal"
        journal = Journal(path, self.limits, limit_bytes=self._limit_bytes, masked=self._masked)
        return RecordedScheduler(self.limits, journal, b"a key" if self._masked else None)

    def check(self) -> None:
        super().check()
        if self.random.random() < 0.3:
            assert isinstance(self.scheduler, RecordedScheduler)
            self.scheduler.flush()

    def run(self) -> "RecordedWorld":
        super().run()
        assert isinstance(self.scheduler, RecordedScheduler)
        self.scheduler.flush()
        return self

    @property
    def paths(self) -> list[Path]:
        return sorted(self._folder.glob(f"{self.seed}.*"))
