"""GGUF files as models: `--model file.gguf`, and what `rllm model import` and `export` do.

file.gguf ──sha256──► RLLM_HOME/models/gguf/NAME-HASH, made once ──► any command
model     ──► file.gguf
"""

import logging
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError, MissingExtraError
from rllm.files.atomic import StorageErrors, file_sha256
from rllm.files.home import rllm_home

log = logging.getLogger(__name__)

SUFFIX = ".gguf"
PRECISIONS = ("f16", "q8_0")


def gguf_directory(path: Path) -> Path:
    """Return the model directory of a GGUF file, which is made when the file is first used."""
    directory = rllm_home() / "models" / "gguf" / f"{path.stem}-{file_sha256(path)[:16]}"
    if not (directory / "config.json").is_file():
        log.warning("Reading %s: its weights are written as float32, and kept in %s.", path, directory)
        _import(path, directory)
    return directory


def import_file(path: Path, directory: Path) -> dict[str, Any]:
    """Write the model in a GGUF file to a directory that is absent or empty. Returns what it was."""
    if not path.is_file():
        raise ConfigError(f"{path} is no file; give a GGUF file.")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is not empty; choose a directory that is absent or empty.")
    return _import(path, directory)


def _import(path: Path, directory: Path) -> dict[str, Any]:
    try:
        from rllm.models.gguf.reading import import_gguf
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "train") from error
    with StorageErrors(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
    file = import_gguf(path, directory)
    return {"family": file.family.model_type, "weights": ", ".join(file.quantizations)}


def export_model(directory: Path, path: Path, precision: str) -> None:
    """Write a model directory as a GGUF file, its matrices in one of `PRECISIONS`."""
    try:
        from rllm.models.gguf.writing import Precision, export_gguf
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "train") from error
    export_gguf(directory, path, Precision(precision))
