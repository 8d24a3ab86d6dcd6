"""What can stop an executor from starting."""


class StartupError(Exception):
    """The executor cannot start: one line saying what, with which value, and what to do."""
