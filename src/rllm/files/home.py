"""Where rLLM keeps what belongs to a person and not to a run: data sets, downloads, settings."""

import os
from pathlib import Path

from rllm.errors import ConfigError


def rllm_home() -> Path:
    """`RLLM_HOME`, or `~/.rllm`. Not made before something is written there.

    Raises ConfigError where a file stands in its way.
    """
    variable = os.environ.get("RLLM_HOME", "")
    home = Path(variable).expanduser() if variable else Path.home() / ".rllm"
    nearest = next(each for each in (home, *home.parents, Path()) if os.path.lexists(each))
    if not nearest.is_dir():
        raise ConfigError(
            f"RLLM_HOME is {home}, but {nearest} is no directory; set it to a directory, or to a place "
            "where one can be made."
        )
    return home
