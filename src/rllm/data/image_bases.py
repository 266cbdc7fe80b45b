"""Which images of Docker this machine's system stands for: those of its own release, and its Python's."""

import os
import re

from rllm.errors import ConfigError
from rllm.sandbox.interpreter import SYSTEM_PYTHON, interpreter
from rllm.sandbox.system_layer import machine_release

CODENAMES = {
    "debian": {"buster": "10", "bullseye": "11", "bookworm": "12", "trixie": "13", "forky": "14"},
    "ubuntu": {"focal": "20.04", "jammy": "22.04", "noble": "24.04", "plucky": "25.04"},
}
RELATED = {("ubuntu", "22.04"): ("debian", "12"), ("ubuntu", "24.04"): ("debian", "13")}
"""Releases of Ubuntu, with the one of Debian that was made of the same packages; either stands for the
other."""
_IMAGE = re.compile(
    r"(?:.*/)?(debian|ubuntu|python)(?:-(\d+)-(\d+))?(?::([\w.-]+))?(?:@sha256:\w+)?", re.ASCII
)


def require_fitting(reference: str, where: str) -> bool:
    """Whether the image is one of Python's. Raises ConfigError for one that this machine's system is not."""
    match = _IMAGE.fullmatch(reference)
    if match is None:
        raise ConfigError(
            f"{where}: `FROM {reference}` cannot be built here; images of debian, ubuntu and python "
            f"are, over this "
            "machine's system."
        )
    name, major, minor, tag = match.groups()
    if major is not None and not (tag or "").startswith(major):
        tag = f"{major}.{minor}" if name != "debian" else major
    words = [
        each for each in (tag or "latest").split("-") if each not in ("slim", "latest", "stable", "backports")
    ]
    if name == "python":
        here = interpreter()
        versions = [each for each in words if each[0].isdigit()]
        rest = [each for each in words if each not in versions]
        version = versions[0].split(".")[:2] if versions else []
        if here.path != os.path.realpath(SYSTEM_PYTHON) or version != here.version.split(".")[: len(version)]:
            raise ConfigError(
                f"{where}: `FROM {reference}` wants another Python than this machine's, {here.version}."
            )
        name, words = "debian", [each for each in rest if each in CODENAMES["debian"]]
        if len(rest) > len(words):
            raise ConfigError(
                f"{where}: `FROM {reference}` is no image of Debian, which this machine's system is."
            )
        _require_release("debian", words, reference, where)
        return True
    _require_release(name, words, reference, where)
    return False


def _require_release(name: str, words: list[str], reference: str, where: str) -> None:
    release = machine_release()
    here = release.get("ID", "unknown"), release.get("VERSION_ID", "")
    version = CODENAMES[name].get(words[0], words[0]) if words else ""
    if name == "debian":
        version = version.split(".")[0]
    release_name = (name, version)
    is_related = RELATED.get(release_name) == here or RELATED.get(here) == release_name
    fits = not version or release_name == here or is_related
    if not fits or here[0] not in CODENAMES:
        raise ConfigError(
            f"{where}: `FROM {reference}` is {name} {version or '(any)'}, and this machine's system is "
            f"{here[0]} {here[1]}, which it would be built over."
        )
