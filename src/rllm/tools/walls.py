"""Whether a tool may run what a model writes on a backend: one without walls only for who says so."""

import logging
import os

from rllm.errors import ConfigError
from rllm.sandbox import require_backend

_log = logging.getLogger(__name__)

WITHOUT_WALLS = "subprocess"


def require_walls(tool: str, backend: str, *, allow_root: bool) -> None:
    """Raises ConfigError for a backend that is not there, and for one without walls where the programs would
    be root's and nobody allowed that; says once a tool what such programs can do."""
    require_backend(backend)
    if backend != WITHOUT_WALLS:
        return
    if os.geteuid() == 0 and not allow_root:
        raise ConfigError(
            f"The backend `{backend}` of the tool `{tool}` has no walls, and this process is root's: what a "
            "model writes could do anything to this machine. Use bubblewrap or unshare, run as another user, "
            "or pass allow_root=True on a machine that may be lost."
        )
    _log.warning(
        "UNSAFE: the backend `%s` of the tool `%s` has no walls; what a model writes can read, change and "
        "send whatever %s can.",
        backend,
        tool,
        "root" if os.geteuid() == 0 else "you",
    )
