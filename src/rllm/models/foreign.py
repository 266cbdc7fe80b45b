"""Checks of a model directory that somebody else wrote: looked at before anything in it is opened.

    directory ──► regular files of bounded size, and links to files beside them ──► read
                  auto_map that only the directory's own Python explains        ──► run, or refused

A directory in the cache of huggingface_hub holds links into `blobs/` two folders up: those are its own.
"""

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rllm.errors import ModelDirectoryError

TRUST_FLAG = "--trust-remote-code"
TRUST_KEY = "model.trust_remote_code"

MAX_SETTINGS_BYTES = 16 << 20
"""The size of a JSON file or a template; the largest published `config.json` has a hundredth of it."""
MAX_TOKENIZER_BYTES = 128 << 20
"""The size of a vocabulary; a tokenizer of 262,144 tokens takes 33 MB, and forty times its file while it is
read."""
_TOKENIZER_FILES = frozenset({"tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt"})
_SETTINGS_SUFFIXES = frozenset({".json", ".jinja"})
_TEMPLATES = "additional_chat_templates"


def require_plain_files(directory: Path) -> None:
    """Raises ModelDirectoryError naming the first file that leads elsewhere, is none, or is far too large."""
    for path in _files(directory):
        try:
            facts = path.stat()
        except OSError as error:  # a link to nothing, or in a circle
            raise ModelDirectoryError(f"{path} cannot be read: {error.strerror}; copy it again.") from error
        if path.is_symlink():
            _require_inside(path, directory)
        if stat.S_ISDIR(facts.st_mode):
            continue
        if not stat.S_ISREG(facts.st_mode):
            raise ModelDirectoryError(f"{path} is no regular file; remove it from the model directory.")
        limit = _limit(path)
        if limit is not None and facts.st_size > limit:
            raise ModelDirectoryError(
                f"{path} has {facts.st_size:,} bytes, which is more than the {limit:,} that such a file may "
                "have; take the model from where it was published."
            )


def require_no_code(directory: Path, config: dict[str, Any]) -> None:
    """Raises ModelDirectoryError where transformers has no class of its own for the model, and would take
    the directory's."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    family = str(config.get("model_type"))
    for role, known_classes in (
        ("AutoConfig", CONFIG_MAPPING),
        ("AutoModelForCausalLM", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    ):
        reference = own_class(config, role)
        if reference and family not in known_classes:
            raise code_refused(directory / "config.json", role, reference)


def code_refused(path: Path, role: str, reference: str) -> ModelDirectoryError:
    """That the file asks for Python of the directory's own, which would run with all that this user may."""
    # `other/repository--modeling_new.NewModel` is in `modeling_new.py`.
    code = path.parent / f"{reference.rpartition('--')[2].partition('.')[0]}.py"
    return ModelDirectoryError(
        f"{path} asks to run Python that comes with the model: {role} is {reference} ({code}). Read that "
        f"file first; to run it, pass {TRUST_FLAG}, or set {TRUST_KEY} = true where there is a configuration."
    )


def own_class(settings: dict[str, Any], role: str) -> str:
    """The class that `auto_map` names for `AutoConfig`, `AutoTokenizer` and so on; empty where it names
    none."""
    auto_map = settings.get("auto_map")
    reference = (
        auto_map.get(role) if isinstance(auto_map, dict) else auto_map if role == "AutoTokenizer" else None
    )
    if isinstance(reference, list | tuple):  # a slow tokenizer and a fast one
        reference = next((each for each in reversed(reference) if each), None)
    return str(reference or "")


def json_object(path: Path) -> dict[str, Any]:
    """Raises ModelDirectoryError for what is no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelDirectoryError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelDirectoryError(f"{path} holds a JSON {type(value).__name__}; it must hold an object.")
    return value


def _files(directory: Path) -> Iterator[Path]:
    yield from sorted(directory.iterdir())
    if (directory / _TEMPLATES).is_dir():
        yield from sorted((directory / _TEMPLATES).iterdir())


def _require_inside(path: Path, directory: Path) -> None:
    home = directory.resolve()
    target = path.resolve()
    is_snapshot = home.parent.name == "snapshots"
    if target.is_relative_to(home) or (is_snapshot and target.is_relative_to(home.parent.parent / "blobs")):
        return
    raise ModelDirectoryError(
        f"{path} is a link out of the model directory, to {target}; if that is the file you want, put a copy "
        "of it there."
    )


def _limit(path: Path) -> int | None:
    if path.name in _TOKENIZER_FILES:
        return MAX_TOKENIZER_BYTES
    return MAX_SETTINGS_BYTES if path.suffix in _SETTINGS_SUFFIXES else None


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a model directory. Raises ModelDirectoryError when it is absent or no JSON object."""
    path = directory / "config.json"
    if directory.is_dir():
        require_plain_files(directory)
    if not path.is_file():
        raise ModelDirectoryError(f"{directory} is no model directory: it has no config.json.")
    return json_object(path)
