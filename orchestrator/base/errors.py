"""Every error that a user can meet. Each is one line: what is wrong, where, and what would be right."""


class OrchestratorError(Exception):
    exit_code = 1


class ConfigError(OrchestratorError, ValueError):
    """The job cannot be what it says; the message names the key, what it got and what would be right."""

    exit_code = 2


class DataError(OrchestratorError, ValueError):
    """A data set cannot be read; the message names file, line and field."""

    exit_code = 2


class RunError(OrchestratorError):
    """The job cannot start or go on; what is committed stays, and `resume` takes it up."""


class Fenced(RunError):
    """Another orchestrator holds the run: nothing that this one does counts any more."""


class Away(RunError):
    """Something that the job depends on does not answer, or has no room: it is waited for (outages.py)."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(message)
        self.what = what
        """For people, and the same whoever meets it: `s3://bucket/jobs at http://store:9000`."""


class ValueLost(RunError):
    """A value that a step needs has been written and is there no more: what made it is repeated (run/lost.py)."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


class StateLost(RunError):
    """Steps were committed whose state one node alone held, and has lost: the job goes back to the last durable one."""

    def __init__(self, step: int, message: str) -> None:
        super().__init__(message)
        self.step = step
        """The last one that is durable."""


class CallFailed(OrchestratorError):
    """A call failed for good: a fatal error, or one attempt too many."""


class Stopped(OrchestratorError):
    """The job was cancelled: what is committed stays."""

    exit_code = 130
