"""Which training backend a run has, by the name in `backend`.

    local                    torch in this process: `rllm.trainer.backends.torch`
    verl, tinker             an entry point of the group `rllm.backends`: of this package, or of yours
    package.module:NAME      an object of your own

Everything but `local` is a `BackendKind`, found by name alone: the trainer imports none of them.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rllm.config.schema import LOCAL, TrainConfig
from rllm.errors import ConfigError
from rllm.trainer.backends.base import SeparateCritic, TrainingBackend
from rllm.types.names import object_named

log = logging.getLogger(__name__)
BACKEND_VARIABLE = "RLLM_BACKEND"


@runtime_checkable
class BackendKind(Protocol):
    """The maker of a run's learners, and what of a configuration they honour."""

    @property
    def shards(self) -> bool:
        """Whether its learners share updates among the processes of a run, of which each holds a part."""
        ...

    def translated(self, config: Any, num_tasks: int) -> Any:
        """Our configuration from one in the backend's own keys, for `num_tasks` training tasks; as it is,
        where it has ours. Raises ConfigError for the first key that has no counterpart."""
        ...

    def require(self, config: TrainConfig) -> None:
        """Raises ConfigError, before any work, for the first key that it would not honour, and
        MissingExtraError where its library is not installed."""
        ...

    def policy(
        self, config: TrainConfig, policy_model: Any, publish: Callable[[int], None]
    ) -> TrainingBackend:
        """The learner of a policy that is sampled from `policy_model`, a `LoadedModel`; `publish` tells the
        sampler that its weights have changed."""
        ...

    def critic(self, config: TrainConfig, policy_model: Any) -> SeparateCritic:
        """A critic with a trunk like `policy_model`."""
        ...


@runtime_checkable
class ServiceKind(BackendKind, Protocol):
    """One whose models are in a service, which samples from them too."""

    def load(self, config: TrainConfig) -> Any:
        """A `LoadedModel` without weights. Raises ConfigError where the service has no such model."""
        ...

    def client(self, config: TrainConfig, policy_model: Any) -> Any:
        """The client that samples from it, as `LocalClient` does."""
        ...

    def save(self, policy_model: Any, model: Path, adapter: Path) -> None:
        """Write a trained model, and its adapter beside, into these two directories."""
        ...


def service_kind(name: str) -> ServiceKind | None:
    """The backend, where it is a service; None for all others."""
    kind = backend_kind(name)
    return kind if isinstance(kind, ServiceKind) else None


def backend_kind(name: str) -> BackendKind | None:
    """The backend that `name` means; None for `local`. Raises ConfigError where there is no such backend."""
    if name == LOCAL:
        return None
    try:
        kind = object_named(name, group="rllm.backends", what="training backend")
    except ConfigError as error:
        raise ConfigError(f"`backend` is {name!r}: {error} `{LOCAL}` is torch in this process.") from error
    if not isinstance(kind, BackendKind):
        raise ConfigError(
            f"`backend` is {name!r}, which is {kind!r:.100}; it must have `shards`, `translated`, `require`, "
            "`policy` and `critic`, as rllm.trainer.backends.named.BackendKind describes."
        )
    return kind


def published_backend(config: Any) -> str:
    """The backend that a published configuration names in `rllm.backend`; "" where it is another's."""
    section = config.get("rllm") if isinstance(config, Mapping) else None
    if isinstance(section, Mapping) and "actor_rollout_ref" in config:
        return str(section.get("backend") or "verl")  # scripts of 2025 leave it to the trainer's default
    return str(section.get("backend") or "tinker") if isinstance(section, Mapping) else ""


def published_output(config: Any) -> Path:
    """The run directory of a published configuration, named by its project and experiment."""
    for section in (config.get("rllm"), config) if isinstance(config, Mapping) else ():
        trainer = section.get("trainer") if isinstance(section, Mapping) else None
        if isinstance(trainer, Mapping) and trainer.get("project_name"):
            name = f"{trainer['project_name']}-{trainer.get('experiment_name') or 'default'}"
            return Path("runs") / re.sub(r"[^\w.=+-]+", "_", name)
    return Path("runs/latest")


def chosen_backend(backend: str) -> str:
    """`backend`, unless the environment variable RLLM_BACKEND names another one, which is logged.

    A script that names a service or a cluster so runs on this machine: RLLM_BACKEND=local.
    """
    instead = os.environ.get(BACKEND_VARIABLE, "")
    if backend and instead and instead != backend:
        log.warning("`backend` is %s, and %s=%s runs in its place.", backend, BACKEND_VARIABLE, instead)
        return instead
    return backend


def require_backend(config: TrainConfig, *, plays_agent: bool) -> None:
    """Raises ConfigError for a backend that there is not, and for what it cannot honour."""
    if service_kind(config.backend) is not None and not plays_agent:
        raise ConfigError(
            f"`backend` is {config.backend!r}, a service that samples for agents in environments alone; "
            f"programs and workflows take `local`. {BACKEND_VARIABLE}=local runs a script that names it on "
            "this machine."
        )
    if (kind := backend_kind(config.backend)) is not None:
        kind.require(config)
