"""Files of data sets and models on the Hugging Face hub. The one home of huggingface_hub.

    repo, revision, patterns ──dataset_info──► commit, files, checksums ──hf_hub_download──► RLLM_HOME/hub
                                                                              └──► sha256 (or git id) compared

A revision is resolved to its commit once, and every file is of that commit. huggingface_hub resumes what
broke off and asks with the token of HF_TOKEN or `hf auth login`. The default revision is the one into which
the hub itself converts every data set: `CONFIG/SPLIT/0000.parquet`, whatever the authors uploaded.

    hub_model("org/name") ──► RLLM_HOME/models/hub/org/name, a link to the files of one commit
"""

import fnmatch
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError, MissingExtraError
from rllm.files.atomic import StorageErrors, file_sha256
from rllm.files.home import rllm_home

log = logging.getLogger(__name__)

CONVERTED = "refs/convert/parquet"
MODEL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
"""The files of a model directory beside its weights; weights as pickles and the like are never read."""
_MODEL_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?", re.ASCII)
_OWN_FOLDERS = ("runs", "evals", "models", "examples")
"""Beginnings of paths that people mistype, which are never taken for an organisation."""


@dataclass(kw_only=True, slots=True, frozen=True)
class HubFile:
    """A file that is here, whole."""

    name: str
    """Its path in the repository."""
    path: Path


@dataclass(kw_only=True, slots=True, frozen=True)
class HubFiles:
    commit: str
    """40 hex digits: what the revision was when it was asked for."""
    files: list[HubFile]
    """In the order of the patterns, then of the names."""


def hub_files(
    repo: str,
    patterns: Iterable[str],
    *,
    revision: str = CONVERTED,
    endpoint: str | None = None,
    on_file: Callable[[str], None] = lambda name: None,
    repo_type: str = "dataset",
    optional: Sequence[str] = (),
) -> HubFiles:
    """The files of a data set, or of a `model`, that match, downloaded where they are not here yet.

    `optional` are patterns that need not match anything; of a model, files in folders are left out.
    Raises ConfigError that says what to do: no network, no such repository, terms that have to be accepted,
    no matching file, a file whose checksum is another one.
    """
    hub = _huggingface_hub()
    endpoint = endpoint or hub.constants.ENDPOINT
    patterns = list(patterns)
    what = "data set" if repo_type == "dataset" else repo_type
    try:
        api = hub.HfApi(endpoint=endpoint)
        info = api.repo_info(repo, repo_type=repo_type, revision=revision, files_metadata=True)
        entries = {each.rfilename: each for each in info.siblings or []}
        there = sorted(name for name in entries if repo_type == "dataset" or "/" not in name)
        names = _matching(repo, revision, patterns, there)
        more = [name for pattern in optional for name in fnmatch.filter(there, pattern)]
        names = list(dict.fromkeys([*names, *more]))
        files: list[HubFile] = []
        for name in names:
            on_file(name)
            with StorageErrors(rllm_home() / "hub"):
                path = hub.hf_hub_download(
                    repo,
                    name,
                    repo_type=repo_type,
                    revision=info.sha,
                    cache_dir=rllm_home() / "hub",
                    endpoint=endpoint,
                )
            _verify(Path(path), entries[name], repo)
            files.append(HubFile(name=name, path=Path(path)))
    except hub.errors.GatedRepoError as error:
        raise ConfigError(
            f"The {what} {repo} asks people to accept its terms: do that at https://huggingface.co/"
            f"{'datasets/' if repo_type == 'dataset' else ''}{repo}, then set HF_TOKEN to a token of yours."
        ) from error
    except hub.errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"The {what} {repo} has no revision `{revision}`; give one with "
            f"{'--revision' if repo_type == 'dataset' else f'{repo}@REVISION'}."
        ) from error
    except hub.errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"There is no {what} {repo} on the hub, or it is private: check the name, and set HF_TOKEN "
            "if it is "
            "yours."
        ) from error
    except _unreachable(hub) as error:
        raise ConfigError(
            f"The {what} {repo} is not here and the hub cannot be reached ({_first_line(error)}). "
            "Pulling needs "
            "the network once: connect (and unset HF_HUB_OFFLINE), or copy RLLM_HOME from a machine that "
            "has it."
        ) from error
    return HubFiles(commit=info.sha or revision, files=files)


def is_model_id(name: str) -> bool:
    """Whether a name is one of a model on the hub, `org/name` or `org/name@revision`, and no path here."""
    match = _MODEL_ID.fullmatch(name)
    folder = name.partition("/")[0]
    return match is not None and folder not in _OWN_FOLDERS and not Path(folder).exists()


def hub_model(name: str, *, endpoint: str | None = None) -> Path:
    """The directory of a model on the hub, fetched once and kept; what is kept is never asked for again.

    Raises ConfigError where it cannot be had, or holds no weights as safetensors.
    """
    match = _MODEL_ID.fullmatch(name)
    assert match is not None, "`is_model_id` holds"
    repo, revision = match[1], match[2] or "main"
    organisation, _, rest = name.partition("/")  # with the revision, which may have slashes of its own
    directory = rllm_home() / "models" / "hub" / organisation / rest.replace("/", "_")
    if (directory / "config.json").is_file():
        return directory
    log.warning("Fetching the model %s from the hub; it is kept in %s.", name, directory)
    files = hub_files(
        repo,
        ("config.json", "*.safetensors"),
        revision=revision,
        endpoint=endpoint,
        repo_type="model",
        optional=MODEL_FILES,
        on_file=lambda file: log.warning("  %s", file),
    )
    # The link is made last, so that where there is one, all files are there.
    target = next(each.path.parent for each in files.files if each.name == "config.json")
    with StorageErrors(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        link = directory.with_name(f".{directory.name}.{secrets.token_hex(8)}")  # of this call alone
        link.symlink_to(target, target_is_directory=True)
        os.replace(link, directory)
    return directory


def cached_model(repo: str) -> Path:
    """Return the snapshot of a model in the cache of huggingface_hub (HF_HOME). Its weights are compared with
    their hashes.

    Raises ConfigError where it is not there, whole.
    """
    hub = _huggingface_hub()
    try:
        snapshot = Path(hub.snapshot_download(repo, local_files_only=True))
    except (hub.errors.LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ConfigError(f"{repo} is not in {hub.constants.HF_HUB_CACHE}.") from error
    weights = sorted(snapshot.glob("*.safetensors"))
    if not weights or not (snapshot / "config.json").is_file():
        raise ConfigError(f"{snapshot} has no config.json with weights as safetensors.")
    for path in weights:
        blob = path.resolve()
        # A file of LFS is kept under its sha256.
        if re.fullmatch(r"[0-9a-f]{64}", blob.name) and file_sha256(blob) != blob.name:
            raise ConfigError(f"{blob} is damaged: its sha256 is not its name. Delete it.")
    return snapshot


def push_directory(directory: Path, repo: str, *, private: bool, endpoint: str | None = None) -> str:
    """Upload the files of a model directory in one commit, and make the repository if it is not there.

    Returns the address of the commit. Raises ConfigError that says what to do.
    """
    hub = _huggingface_hub()
    if _MODEL_ID.fullmatch(repo) is None or "@" in repo:
        raise ConfigError(f"{repo!r} is no name of a repository; write ORGANISATION/NAME.")
    api = hub.HfApi(endpoint=endpoint or hub.constants.ENDPOINT)
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.upload_folder(
            folder_path=directory,
            repo_id=repo,
            commit_message="Upload with rLLM",
            ignore_patterns=["manifest.json"],
        )
    except (hub.errors.HfHubHTTPError, hub.errors.LocalTokenNotFoundError) as error:
        raise ConfigError(
            f"{repo} cannot be written ({_first_line(error)}); set HF_TOKEN to a token of yours with the "
            "right to write, and check the name."
        ) from error
    except _unreachable(hub) as error:
        raise ConfigError(
            f"The hub cannot be reached ({_first_line(error)}); connect, and push again."
        ) from error
    return str(commit.commit_url)


def _matching(repo: str, revision: str, patterns: list[str], names: list[str]) -> list[str]:
    unique_names: dict[str, None] = {}
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            folders = sorted({name.rpartition("/")[0] or name for name in names})
            raise ConfigError(
                f"{repo} at {revision} has no file that matches {pattern}; it has "
                f"{', '.join(folders[:12]) or 'none'}"
                f"{', …' if len(folders) > 12 else ''}."
            )
        unique_names |= dict.fromkeys(matches)
    return list(unique_names)


def _verify(path: Path, entry: Any, repo: str) -> None:
    """Compare with what the hub says: a sha256 of files in LFS, the git id of others."""
    lfs = getattr(entry, "lfs", None)
    if lfs is not None:
        actual, expected = file_sha256(path), lfs.sha256
    elif entry.blob_id:
        data = path.read_bytes()
        actual = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        expected = entry.blob_id
    else:
        return
    if actual != expected:
        # The path is a link into the store of the hub. Its
        # content goes too, else the next try finds it again.
        for each in {path, path.resolve()}:
            each.unlink(missing_ok=True)
        raise ConfigError(
            f"{entry.rfilename} of {repo} arrived with the checksum {actual[:16]}… instead of "
            f"{expected[:16]}…; it was "
            "thrown away. Pull again."
        )


def _huggingface_hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "huggingface_hub", "data") from error
    return huggingface_hub


def _unreachable(hub: Any) -> tuple[type[BaseException], ...]:
    """The exceptions of huggingface_hub for a host that does not answer, or not sensibly."""
    errors = hub.errors
    return (
        errors.OfflineModeIsEnabled,
        errors.LocalEntryNotFoundError,
        errors.HfHubHTTPError,
        errors.HTTPError,  # of the HTTP library below, whichever it is in this version
        ConnectionError,
        TimeoutError,
    )


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0].rstrip(".")
