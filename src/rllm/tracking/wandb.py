# pyright: reportMissingImports=false
"""Numbers to Weights & Biases; project, entity and mode are those of its environment variables.

`WANDB_MODE=offline` keeps them in RUN/wandb, for `wandb sync`.
"""

import hashlib
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from rllm.errors import ConfigError, MissingExtraError, choices_of
from rllm.tracking.base import Metric
from rllm.tracking.sinks import SinkRun, metric_names

try:
    import wandb
except ModuleNotFoundError as error:
    raise MissingExtraError(error.name or "wandb", "wandb") from error

MODES = ("online", "offline", "disabled", "shared")


def require_usable() -> None:
    """Raises ConfigError for an unknown mode, and where nobody is logged in."""
    mode = os.environ.get("WANDB_MODE", "online")
    if mode not in MODES:
        raise ConfigError(f"WANDB_MODE is {mode!r}; {choices_of(mode, MODES)}.")
    address = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if urlsplit(address).scheme not in ("http", "https"):
        raise ConfigError(f"WANDB_BASE_URL is {address!r}; it begins with http:// or https://.")
    if mode == "online" and not (
        os.environ.get("WANDB_API_KEY") or _has_login(urlsplit(address).hostname or "")
    ):
        raise ConfigError(
            "`tracking.sinks` has wandb, and nobody is logged in: run `wandb login`, set WANDB_API_KEY, or "
            "keep the numbers here with WANDB_MODE=offline."
        )


def _has_login(host: str) -> bool:
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class WandbSink:
    def __init__(self, run: SinkRun) -> None:
        # The same run directory is the same run there, so that one that is resumed goes on.
        run_id = hashlib.blake2b(os.fsencode(run.directory.absolute()), digest_size=8).hexdigest()
        self._run = wandb.init(
            id=run_id,
            resume="allow",
            name=run.name,
            project=os.environ.get("WANDB_PROJECT", "rllm"),
            dir=str(run.directory),
            config=dict(run.config),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._phases: set[str] = set()

    def log(self, step: int, phase: str, metrics: Mapping[str, Metric]) -> None:
        # Steps begin at 0 in every phase, and W&B's own counter only grows: each phase gets its own axis.
        if phase not in self._phases:
            self._phases.add(phase)
            self._run.define_metric(f"{phase}/step")
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
        self._run.log({**metric_names(phase, metrics), f"{phase}/step": step})

    def close(self) -> None:
        self._run.finish()


def open_sink(run: SinkRun) -> WandbSink:
    return WandbSink(run)
