"""Sandboxes by name. What is asked for and not there is an error: nothing falls back to something weaker.

"bubblewrap"   rootless namespaces by bwrap: the one to use
"unshare"      the same walls, built by util-linux's unshare and this library
"docker"       a container, where there is a Docker engine
"subprocess"   UNSAFE: no walls at all, only limits; for programs that you trust
"""

from collections.abc import Sequence

from rllm.errors import ConfigError, choices_of
from rllm.sandbox.base import Sandbox
from rllm.sandbox.docker import DEFAULT_IMAGE, DockerSandbox
from rllm.sandbox.docker_api import engine
from rllm.sandbox.launch import SURROUNDINGS
from rllm.sandbox.session import WardenSandbox
from rllm.sandbox.types import DEFAULT_LIMITS, Limits, Root, Snapshot

BACKENDS = ("bubblewrap", "unshare", "docker", "subprocess")


def require_backend(name: str) -> None:
    """Raises ConfigError for a name that is none, and for what this machine lacks, with how to get it."""
    if name not in BACKENDS:
        raise ConfigError(f"Sandbox backend {name!r} does not exist; {choices_of(name, BACKENDS)}.")
    if name == "docker":
        engine()  # says itself what is missing
        return
    why = SURROUNDINGS[name].missing()
    if why is not None:
        raise ConfigError(
            f"Sandbox backend `{name}` cannot be used here: {why}. Nothing weaker is used instead."
        )


def open_sandbox(
    backend: str,
    *,
    limits: Limits = DEFAULT_LIMITS,
    snapshot: Snapshot | None = None,
    image: str | None = None,
    packages: Sequence[str] = (),
    root: Root | None = None,
) -> Sandbox:
    """A new sandbox, with the files of `snapshot` in its working directory. Close it, or use it in a `with`.

    With a `root`, programs can write everywhere: its paths are real ones, and the working directory is `/`.

    `packages` are names of distributions that are installed here, which `python3` inside can import. `image`
    is for docker alone. Raises ConfigError for a backend or a package that this machine does not
    have, SandboxError where the backend is there and does not work.
    """
    require_backend(backend)
    if backend == "docker":
        if packages:
            raise ConfigError(
                f"`packages` ({', '.join(packages)}) are those of this machine; with docker install them "
                "in the image, and name that with `image`."
            )
        if root is not None and (root.tree or root.layers):
            raise ConfigError(
                "`tree` and `layers` are for bubblewrap and unshare; docker takes an image itself: `image`."
            )
        if root is not None and root.mounts:
            raise ConfigError(
                "`mounts` are for bubblewrap and unshare; with docker, put them into the image."
            )
        return DockerSandbox(image or DEFAULT_IMAGE, limits=limits, snapshot=snapshot, root=root)
    if image is not None:
        raise ConfigError(f"`image` is for docker; `{backend}` shows this machine's own system, read-only.")
    if root is not None and backend == "subprocess":
        raise ConfigError(
            "Backend `subprocess` has no file system of its own, so it has no writable root; use bubblewrap, "
            "unshare or docker."
        )
    return WardenSandbox(backend, limits=limits, snapshot=snapshot, packages=packages, root=root)
