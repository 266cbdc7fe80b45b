"""The repository of a software-engineering task, made once and kept: what an agent starts from, and no more.

    source (clone, bundle, URL | archive | directory) ──► the tree at `base_commit` ──► `bug_patch` applied
        ──► hidden tests taken out ──► a new repository with one commit ──► RLLM_HOME/swe/repositories/KEY/

There are no commits after the base one in it, no reflogs and no dangling objects, because the repository is
new: `git log --all` shows one commit. A directory of the cache is there whole or not at all.
"""

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

from rllm.data.swe_rows import ARCHIVES, SWETask
from rllm.data.unpacking import Archive
from rllm.errors import ConfigError
from rllm.files.atomic import write_atomic
from rllm.files.home import rllm_home
from rllm.sandbox.made_once import made_once

PLACE = "/testbed"
"""Where the repository lies in every world."""
GIT_TIMEOUT_S = 1800.0
_FORM = 2
"""The form of a directory in the cache; another number makes all of them anew."""
_FACTS = "facts.json"
_LFS = b"version https://git-lfs.github.com/spec/"
_CONFIG = (
    ("core", "hooksPath", "/dev/null"),
    ("core", "fsmonitor", "false"),
    ("core", "attributesFile", "/dev/null"),
    ("core", "autocrlf", "false"),
    ("core", "logAllRefUpdates", "false"),
    ("safe", "directory", "*"),
    ('protocol "ext"', "allow", "never"),
    ("init", "defaultBranch", "main"),
    ("gc", "auto", "0"),
    ("advice", "detachedHead", "false"),
)
AUTHOR = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "rllm"), ("EMAIL", "rllm@localhost"), ("DATE", "2000-01-01T00:00:00Z"))
}
"""Variables that make a commit of equal content equal everywhere."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Repository:
    """The part of a task's source that goes into worlds."""

    path: Path
    """The path in the cache."""
    hidden_files: dict[str, str]
    """Hidden tests, path -> content: those of the row, and what was taken out of the tree."""
    gold: str
    """The reference solution as a diff of this repository; empty where the row has none."""

    @property
    def layer(self) -> Path:
        """A layer of a writable root that has the tree, with its `.git`, at PLACE."""
        return (self.path / "layer").absolute()


def repository_of(task: SWETask) -> Repository:
    """The repository that an agent starts from, from the cache or made now.

    Raises ConfigError that names the row: no source, or none that can be read here; a commit that is not in
    it; a patch that does not apply; submodules; LFS pointers.
    """
    _require_source(task)
    target = rllm_home() / "swe" / "repositories" / _key(task)
    with made_once(target) as part:
        if part is not None:
            _make(task, part)
    facts = json.loads((target / _FACTS).read_text("utf-8"))
    return Repository(path=target, hidden_files=facts["hidden"], gold=facts["gold"])


def git(
    *words: str, cwd: Path, stdin: str | bytes = "", env: Mapping[str, str] = {}, task: str = ""
) -> bytes:
    """stdout of a git command that no hook, filter or setting of anybody's steers. ConfigError where it
    fails."""
    done = _git(*words, cwd=cwd, stdin=stdin, env=env)
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip()[-400:]
        raise ConfigError(
            f"{_error_prefix(task)}`git {words[0]}` failed with code {done.returncode}: {message}"
        )
    return done.stdout


def _git(
    *words: str, cwd: Path, stdin: str | bytes = "", env: Mapping[str, str] = {}
) -> "subprocess.CompletedProcess[bytes]":
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    own = {
        "GIT_CONFIG_GLOBAL": str(_config_file()),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_LFS_SKIP_SMUDGE": "1",
        "LC_ALL": "C",
    }
    data = stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else stdin
    try:
        return subprocess.run(
            ["git", *words],
            cwd=cwd,
            env=variables | own | dict(env),
            input=data,
            capture_output=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise ConfigError("`git` is not installed; run: apt-get install git") from error


def _config_file() -> Path:
    """All settings of git's here. A file, because a fetch hands variables with settings on to no child."""
    text = "".join(f"[{section}]\n\t{key} = {value}\n" for section, key, value in _CONFIG)
    path = rllm_home() / "swe" / "gitconfig"
    if not path.is_file() or path.read_text("utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    return path.resolve()


def _error_prefix(instance_id: str) -> str:
    return f"{instance_id}: " if instance_id else ""


def _require_source(task: SWETask) -> None:
    if not task.source:
        place = f" Or set `backend` to docker for its image, {task.image}." if task.image else ""
        raise ConfigError(
            f"{task.instance_id} has no `source`; give the path of a clone, bundle, archive or directory, or "
            f"the URL of a git repository.{place}"
        )
    if not task.is_url and not Path(task.source).exists():
        raise ConfigError(f"{task.instance_id}: its `source` {task.source} is not there.")


def _key(task: SWETask) -> str:
    """Everything that the repository depends on. A source without commits is told by its content."""
    about = {
        "form": _FORM,
        "base_commit": task.base_commit,
        "source": task.source if task.is_git_source else _content_hash(Path(task.source)),
        "bug_patch": task.bug_patch,
        "patch": task.patch,
        "test_files": task.test_files,
        "hides": [] if task.test_files or task.test_patch else sorted(_files_of(task.fail_to_pass)),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def _content_hash(source: Path) -> str:
    """A hash of the content of a file or a directory, read again when a file's time or size has changed."""
    files = [source] if source.is_file() else sorted(_files_below(source))
    about = [(str(path), path.lstat()) for path in files]
    states = tuple((name, each.st_mode, each.st_size, each.st_mtime_ns, each.st_ino) for name, each in about)
    return _hash_of_states(source, states)


@lru_cache(maxsize=64)
def _hash_of_states(source: Path, states: tuple[tuple[str, int, int, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for name, mode, *_ in states:
        path = Path(name)
        digest.update(f"{path.relative_to(source)}\0{mode}\0".encode())
        if path.is_symlink():
            digest.update(os.readlink(path).encode())
        elif path.is_file():
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _files_below(source: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(source):
        folders[:] = [each for each in folders if each != ".git"]
        yield from (Path(folder) / name for name in (*folders, *names) if name != ".git")


def _files_of(ids: tuple[str, ...]) -> set[str]:
    """Files in which tests are that have the ids of pytest."""
    return {each.partition("::")[0] for each in ids if "::" in each}


def _make(task: SWETask, part: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="rllm-swe-") as folder:
        work = Path(folder)
        tree = Path(f"{part}/layer{PLACE}").absolute()
        tree.mkdir(parents=True)
        _lay_out(task, tree, work)
        _refuse_pointers(task, tree)
        gold = _break(task, tree, work)
        # Before the commit, so that no object of the new repository holds them.
        hidden_files = _hide(task, tree)
        _commit(tree)
        facts = json.dumps({"hidden": hidden_files, "gold": gold, "instance_id": task.instance_id})
        (part / _FACTS).write_text(facts, "utf-8")


def _lay_out(task: SWETask, tree: Path, work: Path) -> None:
    """The files of the source at the base commit, without any `.git`."""
    source = Path(task.source)
    if task.is_git_source:
        _check_out(task, tree, work)
    elif source.is_dir() or task.source.endswith(ARCHIVES):
        try:
            _copy(source, tree) if source.is_dir() else _unpack(task, source, tree)
        except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error) as error:
            reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error
            raise ConfigError(
                f"{task.instance_id}: its `source` {source} cannot be read: {str(reason)[:300]}"
            ) from error
    else:
        raise ConfigError(
            f"{task.instance_id}: its `source` {source} is neither a directory nor a git bundle, and ends "
            f"with none of {', '.join(ARCHIVES)}."
        )
    if not any(tree.iterdir()):
        raise ConfigError(f"{task.instance_id}: its `source` {task.source} has no files.")


def _copy(source: Path, tree: Path) -> None:
    shutil.copytree(
        source, tree, symlinks=True, dirs_exist_ok=True, ignore=lambda _, names: {".git"} & {*names}
    )


def _check_out(task: SWETask, tree: Path, work: Path) -> None:
    store = work / "store.git"
    git("init", "-q", "--bare", str(store), cwd=work, task=task.instance_id)
    is_whole = len(task.base_commit) == 40
    shallow = ("fetch", "-q", "--no-tags", "--depth", "1", task.source, task.base_commit)
    # A server may refuse to send a commit by its name. Then all refs are fetched.
    if not (task.is_url and is_whole and _git(*shallow, cwd=store).returncode == 0):
        # A bundle may have no HEAD, or nothing else; a clone may stand on a commit of no branch.
        fetch = ("fetch", "-q", "--no-tags", task.source)
        refs = git("ls-remote", task.source, cwd=store, task=task.instance_id).decode().split()[1::2]
        if "HEAD" in refs:
            git(*fetch, "+HEAD:refs/rllm/head", cwd=store, task=task.instance_id)
        if refs != ["HEAD"]:
            git(*fetch, "+refs/*:refs/*", cwd=store, task=task.instance_id)
    commit = f"{task.base_commit}^{{commit}}"
    if _git("rev-parse", "-q", "--verify", commit, cwd=store).returncode:
        raise ConfigError(
            f"{task.instance_id}: its `base_commit` {task.base_commit} is not among the commits of "
            f"{task.source}."
        )
    entries = git("ls-tree", "-r", "-z", commit, cwd=store, task=task.instance_id)
    links = [
        each.partition(b"\t")[2].decode() for each in entries.split(b"\0") if each.startswith(b"160000 ")
    ]
    if links:
        raise ConfigError(
            f"{task.instance_id}: its repository has the submodule {links[0]}, and submodules are not "
            "fetched; give a `source` that has their files in it."
        )
    words = (f"--git-dir={store}", f"--work-tree={tree}", "checkout", "-q", "-f", task.base_commit, "--", ".")
    git(*words, cwd=tree, task=task.instance_id)


def _unpack(task: SWETask, source: Path, tree: Path) -> None:
    """The files of an archive; a single directory at its top is left out of their paths."""
    archive = Archive(source)
    names = [each for each in archive.names() if not each.endswith("/")]
    tops = {each.split("/")[0] for each in names}
    top = f"{tops.pop()}/" if len(tops) == 1 and all("/" in each for each in names) else ""
    executable = _executables(source)
    for name in names:
        place = (tree / name.removeprefix(top)).resolve()
        if not place.is_relative_to(tree.resolve()) or ".git" in place.relative_to(tree.resolve()).parts:
            raise ConfigError(f"{task.instance_id}: {source} has a file {name!r} that leads out of it.")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(archive.read(name))
        place.chmod(0o755 if name in executable else 0o644)


def _executables(source: Path) -> set[str]:
    if not tarfile.is_tarfile(source):
        return set()
    with tarfile.open(source) as archive:
        return {each.name for each in archive if each.isfile() and each.mode & 0o100}


def _refuse_pointers(task: SWETask, tree: Path) -> None:
    for path in tree.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 1024:
            with path.open("rb") as stream:
                if stream.read(len(_LFS)) == _LFS:
                    raise ConfigError(
                        f"{task.instance_id}: {path.relative_to(tree)} is a pointer of git-lfs and not the "
                        "file; give a `source` that was cloned with git-lfs."
                    )


def _break(task: SWETask, tree: Path, work: Path) -> str:
    """Apply the patch that makes the bug; returns the gold patch, which is looked at too."""
    # A repository apart, so that no object of the tree without the bug comes into that of the agent.
    scratch = {"GIT_DIR": str(work / "scratch.git"), "GIT_WORK_TREE": str(tree)}
    if not (task.bug_patch or task.patch):
        return ""
    git("init", "-q", cwd=tree, env=scratch, task=task.instance_id)
    git("add", "-A", "-f", ".", cwd=tree, env=scratch, task=task.instance_id)
    git("commit", "-q", "--allow-empty", "-m", "base", cwd=tree, env={**scratch, **AUTHOR})
    gold = task.patch
    if task.bug_patch:
        _apply(task, "bug_patch", task.bug_patch, tree, scratch)
        diff = git("diff", "--cached", "--binary", "--no-renames", "-R", "HEAD", cwd=tree, env=scratch)
        gold = gold or diff.decode("utf-8", "surrogateescape")
    if task.patch:
        _apply(task, "patch", task.patch, tree, scratch, check=True)
    return gold


def _apply(
    task: SWETask, name: str, patch: str, tree: Path, env: Mapping[str, str], *, check: bool = False
) -> None:
    how = "--check" if check else "--index"
    done = _git("apply", how, "--whitespace=nowarn", "-", cwd=tree, stdin=patch, env=env)
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip()[-300:]
        raise ConfigError(
            f"{task.instance_id}: its `{name}` does not apply to {task.base_commit or 'its tree'}: {message}"
        )


def _hide(task: SWETask, tree: Path) -> dict[str, str]:
    """Take hidden tests out of the tree that are in it as they are; returns all hidden files.

    Of a row that brings no tests (SWE-smith), those are the files in which its FAIL_TO_PASS tests are.
    """
    hidden_files = dict(task.test_files)
    if not (task.test_files or task.test_patch):
        for name in sorted(_files_of(task.fail_to_pass)):
            if _is_inside(tree, name):
                hidden_files[name] = (tree / name).read_text("utf-8", "surrogateescape")
    for name, text in hidden_files.items():
        path = tree / name
        if _is_inside(tree, name) and path.read_bytes() == text.encode("utf-8", "surrogateescape"):
            path.unlink()
    return hidden_files


def _is_inside(tree: Path, name: str) -> bool:
    """Whether that is a plain file of the tree, through no link and no `..`."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        return False
    return (tree / name).is_file() and (tree / name).resolve() == tree.resolve() / name


def _commit(tree: Path) -> None:
    git("init", "-q", cwd=tree)
    for name, value in (("checkStat", "minimal"), ("trustctime", "false")):  # of owners, worlds differ
        git("config", f"core.{name}", value, cwd=tree)
    git("add", "-A", "-f", ".", cwd=tree)
    git("commit", "-q", "--allow-empty", "-m", "base", cwd=tree, env=AUTHOR)
    git("repack", "-adq", cwd=tree)
    for name in ("hooks", "logs", "branches", "description"):
        path = tree / ".git" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
