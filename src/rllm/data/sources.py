"""Where the rows of a data set come from, and how to get them.

    [source] of a catalogue file ──source_of──► HubSource | ArchiveSource | PackageSource
                                                       │
    pull(source, split) ──► files, downloaded where they are not here ──► Pulled(rows, facts about them)

A row that comes from one of several configurations says which under `subset`.
"""

import fnmatch
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any

from rllm.data.downloads import download
from rllm.data.hub import CONVERTED, hub_files
from rllm.data.rows import format_of, rows_in
from rllm.data.unpacking import Archive, gunzip
from rllm.errors import ConfigError, MissingExtraError, choices_of

SUBSET = "subset"


@dataclass(kw_only=True, slots=True, frozen=True)
class Split:
    """One part of a data set, as it is published."""

    rows: int | None = None
    """The number of rows; None where nobody says, or there are as many as one likes."""
    published: str = ""
    """The name that its publishers use."""
    files: tuple[str, ...] = ()
    """Patterns of its files, for repositories that are not laid out as the hub converts them;
    `data.zip!a/*.jsonl` are members of an archive."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Join:
    """Another file with more columns for the same rows."""

    files: tuple[str, ...]
    on: str
    """The column that both have."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Documents:
    """Texts in an archive of the same repository, that a row names; they become its column `context`."""

    archive: str
    names: str
    """The column with their names, between semicolons."""
    folder: str
    """Where a row's texts lie in the archive, with {columns} of it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class HubSource:
    """A data set on the Hugging Face hub."""

    repo: str
    configs: tuple[str, ...] = ("default",)
    revision: str = CONVERTED
    """A branch, tag or commit. What it is at the first pull is written down."""
    gated: bool = False
    """Whether one has to accept terms first."""
    explode: str = ""
    """A column that holds several questions: each becomes a row, beside the other columns."""
    join: Join | None = None
    documents: Documents | None = None

    @property
    def address(self) -> str:
        return f"https://huggingface.co/datasets/{self.repo}"


@dataclass(kw_only=True, slots=True, frozen=True)
class ArchiveSource:
    """A file of rows, or an archive with such files, at an address."""

    url: str
    sha256: str = ""
    """The hash that the file must have; where it is not known, that of the first download."""
    lines: tuple[str, ...] = ()
    """For parallel texts: names of the columns, one for each file of a split, whose lines belong together."""
    explode: str = ""

    @property
    def address(self) -> str:
        return self.url


@dataclass(kw_only=True, slots=True, frozen=True)
class PackageSource:
    """A file inside an installed Python package: it works without a network."""

    package: str
    """As pip knows it."""
    module: str
    file: str
    extra: str

    @property
    def address(self) -> str:
        return f"https://pypi.org/project/{self.package}"


Source = HubSource | ArchiveSource | PackageSource
KINDS: dict[str, type[Source]] = {"hub": HubSource, "archive": ArchiveSource, "package": PackageSource}


@dataclass(kw_only=True, slots=True)
class Pulled:
    """The rows of a split, and what they are of."""

    rows: list[dict[str, Any]]
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """`address`, and `revision` or `file_sha256`: enough to get the same again."""


def source_of(table: Mapping[str, Any], where: str) -> Source:
    """A `[source]` table. Raises ConfigError, beginning with `where`, for what it does not know."""
    kind = table.get("kind")
    if kind not in KINDS:
        raise ConfigError(f"{where}: `source.kind` is {kind!r}; {choices_of(kind, KINDS)}.")
    names = {each.name for each in fields(KINDS[kind])}
    settings = {name: value for name, value in table.items() if name != "kind"}
    if "config" in settings:
        settings["configs"] = [settings.pop("config")]
    for name in settings:
        if name not in names:
            raise ConfigError(f"{where}: there is no `source.{name}`; there are {', '.join(sorted(names))}.")
    if "join" in settings:
        settings["join"] = Join(files=tuple(settings["join"]["files"]), on=settings["join"]["on"])
    arguments = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    make: Any = KINDS[kind]
    try:
        if "documents" in arguments:
            arguments["documents"] = Documents(**settings["documents"])
        return make(**arguments)
    except TypeError as error:
        raise ConfigError(f"{where}: `source` is incomplete: {error}.") from error


def pull(
    source: Source,
    split: Split,
    *,
    revision: str = "",
    endpoint: str | None = None,
    on_progress: Callable[[str], None] = lambda what: None,
) -> Pulled:
    """Every row of a split. Raises ConfigError that says what to do when they cannot be had.

    `revision` takes another one of a hub's data set than the catalogue's; `endpoint` is another hub.
    """
    if isinstance(source, HubSource):
        return _from_hub(source, split, revision or source.revision, endpoint, on_progress)
    if revision:
        raise ConfigError(f"{source.address} has no revisions; leave out --revision.")
    if isinstance(source, ArchiveSource):
        return _from_archive(source, split, on_progress)
    return _from_package(source)


def _from_hub(
    source: HubSource, split: Split, revision: str, endpoint: str | None, on_progress: Callable[[str], None]
) -> Pulled:
    patterns = list(split.files) or [f"{each}/{split.published}/*.parquet" for each in source.configs]
    join_files = list(source.join.files) if source.join else []
    archives = [source.documents.archive] if source.documents else []
    files = list(dict.fromkeys(each.partition("!")[0] for each in patterns))
    repository_files = hub_files(
        source.repo,
        [*files, *join_files, *archives],
        revision=revision,
        endpoint=endpoint,
        on_file=on_progress,
    )
    rows: list[dict[str, Any]] = []
    more: list[dict[str, Any]] = []
    for file in repository_files.files:
        name = f"{source.repo}/{file.name}"
        if file.name in archives:
            continue
        if any(fnmatch.fnmatch(file.name, each) for each in join_files):
            more += list(_rows_of_file(file.path, name, ()))
            continue
        # The hub's conversion lays files out as CONFIG/SPLIT/NAME.parquet.
        subset = PurePosixPath(file.name).parts[0] if len(source.configs) > 1 else ""
        inside = [
            each.partition("!")[2] for each in patterns if fnmatch.fnmatch(file.name, each.partition("!")[0])
        ]
        own = _rows_of_file(file.path, name, [each for each in inside if each])
        rows += [{SUBSET: subset, **row} if subset else row for row in own]
    if source.join:
        rows = _join(rows, more, source.join.on, source.repo)
    if source.documents:
        archive = next(each.path for each in repository_files.files if each.name in archives)
        rows = _with_documents(rows, Archive(archive), source.documents, source.repo)
    rows = _explode(rows, source.explode, source.repo) if source.explode else rows
    return Pulled(rows=rows, facts={"address": source.address, "revision": repository_files.commit})


def _from_archive(source: ArchiveSource, split: Split, on_progress: Callable[[str], None]) -> Pulled:
    on_progress(source.url)
    got = download(source.url, sha256=source.sha256)
    facts = {"address": source.url, "file_sha256": got.sha256}
    if source.lines:
        return Pulled(rows=_parallel_lines(got.path, split.files, source), facts=facts)
    rows = list(_rows_of_file(got.path, got.path.name, split.files))
    rows = _explode(rows, source.explode, source.url) if source.explode else rows
    return Pulled(rows=rows, facts=facts)


def _from_package(source: PackageSource) -> Pulled:
    """The file is found without running any code of the package."""
    spec = importlib.util.find_spec(source.module)
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError(source.package, source.extra)
    path = Path(next(iter(spec.submodule_search_locations))) / source.file
    if not path.is_file():
        raise ConfigError(
            f"The installed package {source.package} has no file {source.file}; install it again: "
            f"pip install --force-reinstall {source.package}"
        )
    from importlib.metadata import version

    facts = {"address": source.address, "revision": version(source.package)}
    return Pulled(rows=rows_in(path.read_bytes(), path.name), facts=facts)


def _rows_of_file(path: Path, name: str, patterns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a file, or of the members of an archive that match."""
    if not Archive.is_one(path):
        yield from rows_in(path.read_bytes(), name)
        return
    archive = Archive(path)
    members = archive.names()
    matches = [each for pattern in patterns or ("*",) for each in fnmatch.filter(sorted(members), pattern)]
    if not matches:
        raise ConfigError(
            f"{name} holds no file that matches {', '.join(patterns)}; it holds "
            f"{', '.join(sorted(members)[:8])}."
        )
    for member in matches:
        if _is_rows(member):
            yield from rows_in(archive.read(member), f"{name}: {member}", archive.allowance)


def _is_rows(name: str) -> bool:
    try:
        return bool(format_of(name))
    except ConfigError:
        return False


def _parallel_lines(path: Path, names: Sequence[str], source: ArchiveSource) -> list[dict[str, Any]]:
    """Line n of each file together make row n."""
    if len(names) != len(source.lines):
        raise ConfigError(f"{source.url}: {len(names)} files for the columns {', '.join(source.lines)}.")
    texts: list[list[str]] = []
    archive = Archive(path)
    for name in names:
        data = archive.read(name)
        data = gunzip(data, name, archive.allowance) if name.endswith(".gz") else data
        # Not `splitlines`: what it takes for ends of lines, such as U+2028, stands within sentences.
        lines = data.decode("utf-8").removesuffix("\n").split("\n")
        texts.append([line.removesuffix("\r") for line in lines])
    if len({len(each) for each in texts}) != 1:
        counts = ", ".join(f"{name}: {len(each)}" for name, each in zip(names, texts, strict=True))
        raise ConfigError(f"{source.url}: the texts are not parallel, they differ in lines ({counts}).")
    return [dict(zip(source.lines, each, strict=True)) for each in zip(*texts, strict=True)]


def _explode(rows: list[dict[str, Any]], column: str, where: str) -> list[dict[str, Any]]:
    """Each entry of a list in `column` beside the other columns of its row."""
    rows_out: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        entries = row.get(column)
        if not isinstance(entries, list):
            raise ConfigError(f"{where}: row {number} has no list in `{column}`.")
        rest = {name: value for name, value in row.items() if name != column}
        rows_out += [{**rest, **entry} for entry in entries]
    return rows_out


def _with_documents(
    rows: list[dict[str, Any]], archive: Archive, documents: Documents, where: str
) -> list[dict[str, Any]]:
    """Rows with the texts that they name, each read once."""
    there = set(archive.names())
    texts: dict[str, str] = {}
    rows_out: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        try:
            folder = documents.folder.format_map(row)
        except KeyError as error:
            raise ConfigError(f"{where}: row {number} has no `{error.args[0]}`.") from error
        names = [each.strip() for each in str(row.get(documents.names) or "").split(";") if each.strip()]
        paths = [f"{folder}/{name}" for name in names]
        missing = [each for each in paths if each not in there]
        if missing or not paths:
            raise ConfigError(
                f"{where}: row {number} names {missing[0] if missing else 'no document'}"
                f"{f', which {documents.archive} does not hold' if missing else ''}."
            )
        for path in paths:
            if path not in texts:
                texts[path] = archive.read(path).decode("utf-8")
        context = [
            {"title": name, "paragraph_text": texts[path]} for name, path in zip(names, paths, strict=True)
        ]
        rows_out.append({**row, "context": context})
    return rows_out


def _join(
    rows: list[dict[str, Any]], more: list[dict[str, Any]], on: str, where: str
) -> list[dict[str, Any]]:
    """Rows with the columns of the rows in `more` that have the same key."""
    by_key = {row.get(on): row for row in more}
    for number, row in enumerate(rows):
        if row.get(on) not in by_key:
            raise ConfigError(
                f"{where}: row {number} with `{on}` {row.get(on)!r:.60} has no partner to join."
            )
    return [{**by_key[row[on]], **row} for row in rows]
