"""Which bugs are tried, in which order.

    sources ──► operators ──► Candidate, in rounds: one of every function, then a second, …
    commits, the latest first ──► their sources' change taken back ──► Candidate    (these come first)

The order is a function of the seed and the text, so the same seed tries the same bugs everywhere.
"""

import ast
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rllm.data.swe_factory.edits import with_edits
from rllm.data.swe_factory.operators import functions_of, mutations
from rllm.data.swe_factory.project import Project
from rllm.data.swe_factory.sources import Source, git
from rllm.errors import ConfigError

MAX_COMMITS = 300
"""Looked at of a history, the latest first."""
MAX_FILES_OF_COMMIT = 5
"""Sources that a commit may have changed: larger ones are no single bug."""
REVERTED = "reverted_commit"


@dataclass(kw_only=True, slots=True, frozen=True)
class Candidate:
    """One bug that may become a task."""

    key: str
    """Tells it from all others of its project, and in every build."""
    operator: str
    functions: tuple[str, ...]
    """`path:qualified name` of those that it changes."""
    files: dict[str, str]
    """Path -> text with the bug."""
    lines: dict[str, range]
    """Path -> lines of the plain text that are concerned."""


def texts_of(tree: Path, project: Project) -> dict[str, str]:
    """The sources that are UTF-8 and that this Python can read; others get no bugs."""
    texts: dict[str, str] = {}
    for path in project.sources:
        try:
            text = (tree / path).read_bytes().decode("utf-8")
            ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        if "\r" not in text and "\f" not in text and "\ufeff" not in text:
            texts[path] = text
    return texts


def operator_candidates(texts: Mapping[str, str], seed: int) -> list[Candidate]:
    """The first candidate of every function, then the second of every function, and so on."""
    ranked_candidates: list[tuple[int, str, Candidate]] = []
    for path, text in texts.items():
        by_function: dict[str, list[tuple[str, Candidate]]] = {}
        for each in mutations(text):
            key = _hash(path, each.operator, each.edit.start, each.edit.end, each.edit.text)
            candidate = Candidate(
                key=key,
                operator=each.operator,
                functions=(f"{path}:{each.function}",),
                files={path: with_edits(text, [each.edit])},
                lines={path: range(each.line, text.count("\n", 0, each.edit.end) + 2)},
            )
            by_function.setdefault(each.function, []).append((_hash(seed, key), candidate))
        for several in by_function.values():
            several.sort(key=lambda each: each[0])
            ranked_candidates += [
                (place, order, candidate) for place, (order, candidate) in enumerate(several)
            ]
    ranked_candidates.sort(key=lambda each: each[:2])
    return [candidate for _, _, candidate in ranked_candidates]


def commit_candidates(source: Source, texts: Mapping[str, str]) -> list[Candidate]:
    """The changes that commits made to the sources, each taken back from the latest state, where that still
    applies."""
    repository = source.repository
    if repository is None:
        return []
    commit_list = git("log", "--no-merges", "--format=%H", f"-n{MAX_COMMITS}", source.commit, at=repository)
    candidates: list[Candidate] = []
    for commit in commit_list.split():
        candidate = _revert_of(repository, commit, texts)
        if candidate is not None:
            candidates.append(candidate)
    return candidates


def _revert_of(repository: Path, commit: str, texts: Mapping[str, str]) -> Candidate | None:
    parents = git("rev-list", "--parents", "-n1", commit, at=repository).split()[1:]
    if len(parents) != 1:
        return None
    words = ("diff", "--name-only", "--diff-filter=M", "--no-renames", "-z", parents[0], commit)
    names = [each for each in git(*words, at=repository).split("\0") if each in texts]
    if not 0 < len(names) <= MAX_FILES_OF_COMMIT:
        return None
    work = repository.parent / "reverting"
    work.mkdir(exist_ok=True)
    for name in names:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_bytes(texts[name].encode())
    patch = repository.parent / "reverting.patch"
    diff = git("diff", "--no-color", "--no-ext-diff", commit, parents[0], "--", *names, at=repository)
    patch.write_bytes(diff.encode("utf-8", "surrogateescape"))
    try:
        # Within a repository further up, `git apply` would take the paths as those of that one.
        git("apply", "--whitespace=nowarn", str(patch), at=work, GIT_CEILING_DIRECTORIES=str(work.parent))
        files = {name: (work / name).read_bytes().decode("utf-8") for name in names}
    except (ConfigError, UnicodeDecodeError):
        return None  # later commits changed the same lines: there is no such bug any more
    changed_texts = {name: text for name, text in files.items() if text != texts[name]}
    functions, lines = [], {}
    for name, text in changed_texts.items():
        before = _bodies(texts[name])
        after = _bodies(text)
        if before is None or after is None:
            return None
        differing = [each for each, (body, _) in before.items() if after.get(each, ("",))[0] != body]
        functions += [f"{name}:{each}" for each in differing]
        if differing:
            lines[name] = range(
                min(before[each][1].start for each in differing),
                max(before[each][1].stop for each in differing),
            )
    if not functions:
        return None
    return Candidate(
        key=_hash(REVERTED, commit),
        operator=REVERTED,
        functions=tuple(functions),
        files=changed_texts,
        lines=lines,
    )


def _bodies(text: str) -> dict[str, tuple[str, range]] | None:
    """Function -> what it does, whatever its formatting, and its lines."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    return {each.name: (ast.dump(each.node), range(each.first, each.last + 1)) for each in functions_of(tree)}


def body_hashes(texts: Mapping[str, str]) -> dict[str, str]:
    """`path:function` -> a hash of what it does without its name: copies of one function have the same."""
    hashes: dict[str, str] = {}
    for path, text in texts.items():
        for each in functions_of(ast.parse(text)):
            body = "".join(ast.dump(statement) for statement in each.node.body)
            hashes[f"{path}:{each.name}"] = _hash(ast.dump(each.node.args), body)
    return hashes


def _hash(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogatepass")).hexdigest()[:16]
