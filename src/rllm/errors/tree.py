"""Every error that rLLM raises on purpose.

    RllmError
    ├── ConfigError            a value that cannot be honoured; raised before any work starts (exit code 2)
    │   ├── MissingExtraError    an optional dependency is not installed; the message is the install command
    │   ├── RunInUseError        another process holds the run directory
    │   ├── ModelDirectoryError  a model directory lacks a file, or holds one that cannot be read
    │   │   └── ArchitectureError  a model that the built-in engine would compute otherwise than transformers
    │   ├── CheckpointError      a checkpoint whose files do not match their manifest
    │   └── ContractError        a worker.md file that is no contract; names file and line
    ├── StorageError           the disk refused a write (full, read-only)
    ├── RewardError            a reward that is not a finite number
    ├── AgentError             a user's agent or environment broke its contract; names class and method
    ├── ActionError            an environment cannot read what the policy wrote: the policy's failure
    ├── WorkerStepError        a worker that the policy plays broke its contract: the policy's failure
    ├── ContextLengthError     a prompt leaves no room for a single new token
    ├── InferenceError         the engine or server that samples failed: an infrastructure failure
    ├── SandboxError           a sandbox failed, not the program in it: an infrastructure failure
    ├── BrowserError           a browser or a page in it failed: an infrastructure failure
    ├── RequestRefused         a request to the gateway that gets an error instead of an answer
    ├── PartialAnswer          a model's answer broke off; never taken for a whole one
    ├── RankError              another process of the run ended or hangs; names it, its place and its cause
    ├── ClusterError           the cluster that plays a run's episodes failed; names node, value and mend
    ├── StallError             no rollout has moved for too long; names the oldest and what they wait for
    ├── CountError             a conservation law does not hold; the message lists both sides
    ├── NumericsError          NaN, inf or an exploding norm before an optimizer step
    ├── AlarmError             a critical alarm of a run that `stop_on_alarm` ends
    └── CanaryError            sampler and trainer disagree on log-probabilities after a publish

A message names the value, the limit and the mend. The CLI prints it and picks the exit code from the class.
Much of it was said by others, who may quote keys, so no message is made with one in it.
"""

import difflib
from collections.abc import Iterable

from rllm.errors.redaction import escaped, without_keys


def choices_of(value: object, names: Iterable[str]) -> str:
    """`choose one of a, b, c`, and before it the name that a misspelt `value` comes nearest to."""
    choices = list(names)
    nearest = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"did you mean {nearest[0]!r}? Choose" if nearest else "choose"
    return f"{hint} one of {', '.join(choices)}"


def printable(text: str) -> str:
    """The text of anybody as a terminal may see it: without keys, and without characters that steer it."""
    return escaped(without_keys(text))


class RllmError(Exception):
    """The root; `exit_code` is what a command returns when it ends with this error."""

    exit_code = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*(without_keys(each) if isinstance(each, str) else each for each in args))


class ConfigError(RllmError):
    """Raised while a configuration loads or a command's arguments are checked. Mend: change the named key."""

    exit_code = 2


class MissingExtraError(ConfigError):
    """Raised by the one file that needs an optional dependency. Mend: run the command in the message."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"`{package}` is not installed; run: pip install 'rllm[{extra}]'")


class RunInUseError(ConfigError):
    """Raised when a run directory is opened for writing twice.

    Mend: wait, stop the other, or choose --output.
    """


class ModelDirectoryError(ConfigError):
    """Raised by `rllm.models` while a directory is read.

    Mend: the message names the missing or broken file.
    """


class ArchitectureError(ModelDirectoryError):
    """Raised for a model that the built-in engine would not compute as transformers does.

    Mend: use an external engine.
    """


class CheckpointError(ConfigError):
    """Raised when a checkpoint does not match its manifest.

    Mend: delete that checkpoint to use the one before.
    """


class ContractError(ConfigError):
    """Raised when a worker.md file is no contract, or contradicts itself. Mend: the line in the message."""


class StorageError(RllmError):
    """Raised when the disk refuses a write. Mend: free space and start again; the run resumes."""

    exit_code = 2


class RewardError(RllmError):
    """Raised when an environment or reward function returns something else than a finite number."""


class AgentError(RllmError):
    """Raised when an agent or environment breaks its contract.

    Mend: the message names class, method and value.
    """


class ActionError(RllmError):
    """Raised by an environment for an action that the policy wrote and nobody can read: the policy's
    failure, never tried again."""


class WorkerStepError(RllmError):
    """Raised in a workflow when a worker's input breaks its schema, or when the policy plays the worker and
    none of its attempts fits the output schema: the policy's failure, never tried again.

    Mend: `broken_contract_reward` pays for it instead of leaving the episode out.
    """


class ContextLengthError(RllmError):
    """Raised before a request is sent whose prompt leaves no room to answer."""


class InferenceError(RllmError):
    """Raised by an inference client when the engine or server behind it failed.

    Retried, then counted as failed. `retry_after_s` is how long the server asked to be left alone;
    `is_final` says that it would refuse the same request again.
    """

    def __init__(
        self, message: str = "", *, retry_after_s: float | None = None, is_final: bool = False
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_final = is_final


class SandboxError(RllmError):
    """Raised when a sandbox itself fails: it does not start, it dies, its engine does not answer.

    Never for what a program does in it.
    """


class BrowserError(RllmError):
    """Raised when a browser does not start, dies or hangs, and when a page in it does.

    Never for an action that is impossible: that is an observation.
    """


class RequestRefused(RllmError):
    """Raised by the gateway for a request that cannot be answered; sent in the protocol's own error shape.

    `kind` is what OpenAI calls `type` (`invalid_request_error`, `authentication_error`, `server_error`, …),
    `code` a word for machines such as `context_length_exceeded`, `param` the field to mend.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = str(self)
        self.status = status
        self.kind = without_keys(kind)
        self.code = code and without_keys(code)
        self.param = param and without_keys(param)
        self.retry_after = retry_after
        """Value of the Retry-After header, as the upstream gave it."""


class PartialAnswer(RllmError):
    """Raised when an answer broke off: the upstream dropped the connection, or the engine failed on the way.

    `answer` (rllm.types.wire.Answer) holds what had arrived.
    """

    def __init__(self, message: str, answer: object = None) -> None:
        super().__init__(message)
        self.answer = answer


class RankError(RllmError):
    """Raised by `rllm.distributed` on the ranks that wait for one that ended.

    Mend: the cause that it names; the same command goes on from the last checkpoint.
    """


class ClusterError(RllmError):
    """Raised when the cluster that plays a run's episodes cannot go on: no worker, no memory, work that ends
    every worker that takes it.

    Mend: the message names the node or the value; the same command goes on from the last checkpoint.
    """


class StallError(RllmError):
    """Raised when no rollout has made a turn or ended for too long.

    Mend: the message names the oldest rollouts and what each of them waits for.
    """


class CountError(RllmError):
    """Raised when a conservation law does not hold.

    This is a bug in rLLM or in a plug-in: please report it.
    """


class AlarmError(RllmError):
    """Raised by `rllm.trainer.loop` after a step with a critical alarm, where `stop_on_alarm` is true.

    Mend: the message says what to change; the run is saved and can go on.
    """


class NumericsError(RllmError):
    """Raised before an optimizer step that would have destroyed the weights.

    Mend: lower the learning rate.
    """


class CanaryError(RllmError):
    """Raised after a publish when sampler and trainer disagree: the sampler does not serve the new
    weights."""


MAX_SHOWN_CHARS = 4000
"""The length of one message: an exception may hold a whole page, and every episode that meets it would."""
_MAX_KEY_CHARS = 1000


def error_text(error: BaseException) -> str:
    """The text of any error and its notes, also of one whose own `__str__` raises; of a long one the
    beginning."""
    try:
        notes = "; ".join(getattr(error, "__notes__", ()))
        return shorten(f"{error} ({notes})" if notes else str(error))
    except Exception as repr_error:  # noqa: BLE001  user code, which may raise anything
        return (
            f"a {type(error).__name__} that cannot be shown: its __str__ raises {type(repr_error).__name__}"
        )


def shorten(text: str, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """The text without keys; where it is longer than `max_chars`, its beginning and its whole length."""
    clean = without_keys(text[: max_chars + _MAX_KEY_CHARS])  # a key that the cut would halve is whole here
    if len(text) <= max_chars:
        return clean
    return f"{clean[:max_chars]}… ({len(text):,} characters in all)"
