"""Everything mpiflow raises on purpose.

    MpiflowError
    ├── UsageError          a command line or a setting that cannot be meant          (exit code 2)
    ├── GraphError          the model does not fit together: shapes, dtypes, names
    │   └── SbpError        a layout that a tensor cannot have
    ├── JobError            the job file does not give a job, or one that contradicts itself
    ├── CompileError        no plan exists for this job on these ranks
    ├── PlanError           a plan file that cannot be used
    │   └── VerifyError     a plan that would hang, overwrite or read what is not there
    ├── DataError           data files: missing, damaged, unequal, out of range
    ├── CheckpointError     a checkpoint that is incomplete, damaged or of another program
    ├── LaunchError         the ranks that were started are not those that the plan names
    ├── TaskError           a task failed while it ran; names rank, host, step, task and line
    └── StallError          the job stood still; names the rank that holds up the others (3)

A message says what is wrong with both values, where it came from, and what to do.
"""


class MpiflowError(Exception):
    """Base of all deliberate errors; `exit_code` is what the command line ends with."""

    exit_code = 1


class UsageError(MpiflowError):
    """A command line or a setting that cannot be meant."""

    exit_code = 2


class GraphError(MpiflowError):
    """The model does not fit together."""


class SbpError(GraphError):
    """A layout that a tensor cannot have."""


class JobError(MpiflowError):
    """The job file does not give a job, or one that contradicts itself."""


class CompileError(MpiflowError):
    """No plan exists for this job on these ranks."""


class PlanError(MpiflowError):
    """A plan file that cannot be used."""


class VerifyError(PlanError):
    """A plan that would hang, overwrite live memory or read what is not there."""


class DataError(MpiflowError):
    """Data files that are missing, damaged, unequal or out of range."""


class CheckpointError(MpiflowError):
    """A checkpoint that is incomplete, damaged or of another program."""


class LaunchError(MpiflowError):
    """The ranks that were started are not those that the plan names."""


class TaskError(MpiflowError):
    """A task failed while it ran."""


class StallError(MpiflowError):
    """The job stood still, and would for ever."""

    exit_code = 3
