"""`rllm dataset build swe`: projects in, rows of software-engineering tasks out.

    source ──► tree, project, environment ──► baseline (two runs of all tests)
           ──► candidates in their order ──► workers, each with a sandbox ──► journal.jsonl, a line a verdict
           ──► enough are kept ──► splits ──► tasks.jsonl, SPLIT/rows.jsonl, sources, manifest.json

Until the manifest is there, OUT/.build holds what was done; the same command goes on from it. What is written
is a function of the sources, the settings and the versions in the manifest: no time and no path is in it.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rllm.data.rows import jsonl_bytes
from rllm.data.swe_environment import package_environment
from rllm.data.swe_factory.archive import PlainRepository
from rllm.data.swe_factory.baseline import Baseline, baseline_jobs, baseline_of
from rllm.data.swe_factory.bench import BenchLimits, TestBench
from rllm.data.swe_factory.candidates import (
    Candidate,
    body_hashes,
    commit_candidates,
    operator_candidates,
    texts_of,
)
from rllm.data.swe_factory.project import Project, project_of
from rllm.data.swe_factory.requirements import Requirements, requirements_of
from rllm.data.swe_factory.sifting import KEPT, REASONS, Sieve, SiftVerdict
from rllm.data.swe_factory.sources import Source, open_source
from rllm.data.swe_factory.splits import SPLITS, splits_of
from rllm.data.swe_rows import ROWS_FILE, SWETask
from rllm.errors import ConfigError, CountError
from rllm.files.atomic import write_atomic
from rllm.sandbox.backends import require_backend

MANIFEST, TASKS, WORK, SOURCES = "manifest.json", "tasks.jsonl", ".build", "sources"
FORMAT = 1
BATCH = 6
"""Candidates that a worker takes at a time."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Settings:
    """The settings that decide which tasks are made."""

    max_tasks: int = 20
    """The number of tasks of each source."""
    seed: int = 0
    extra_requirements: tuple[str, ...] = ()
    """The requirements of the tests, beside those that the projects name."""
    limits: BenchLimits = field(default_factory=BenchLimits)

    def __post_init__(self) -> None:
        for name, value, least in (
            ("max_tasks", self.max_tasks, 1),
            ("cpu_s", self.limits.cpu_s, 1),
            ("memory_mb", self.limits.memory_mb, 128),
        ):
            if value < least:
                raise ConfigError(f"`{name}` is {value}; choose {least} or more.")


@dataclass(kw_only=True, slots=True, frozen=True)
class Progress:
    """Where a build stands."""

    source: str
    doing: str
    num_tried: int = 0
    num_kept: int = 0
    max_tasks: int = 0


@dataclass(kw_only=True, slots=True, frozen=True)
class _Built:
    """The yield of one source."""

    source: Source
    project: Project
    requirements: Requirements
    baseline: Baseline
    num_candidates: int
    verdicts: list[SiftVerdict]
    """The verdicts on all candidates that were tried, in order."""
    rows: list[dict[str, Any]]


def build(
    addresses: Sequence[str],
    out: Path,
    settings: Settings,
    *,
    backend: str = "bubblewrap",
    workers: int = 1,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Make the tasks, or go on making them; returns the manifest.

    Raises ConfigError for a source that is no project with tests that pass, for two sources of one name, and
    for an `out` that holds something else.
    """
    require_backend(backend)
    if backend == "docker":
        raise ConfigError("The factory runs tests with this machine's Python; use bubblewrap or unshare.")
    if workers < 1:
        raise ConfigError(f"`workers` is {workers}; choose 1 or more.")
    request = {"sources": list(addresses), **_settings_json(settings)}
    if (out / MANIFEST).is_file():
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        if manifest["asked"] != request:
            raise ConfigError(f"{out} holds the tasks of another build; choose another --out, or delete it.")
        return manifest
    out = out.resolve()  # git is run in other directories
    work = _work_folder(out, request)
    open_sources: list[tuple[Source, Project]] = []
    for place, address in enumerate(addresses):
        on_progress(Progress(source=address, doing="opening"))
        source = _open_source(address, work / str(place))
        if any(source.name == other.name for other, _ in open_sources):
            raise ConfigError(f"Two sources are named {source.name}; build them into two directories.")
        open_sources.append((source, project_of(source)))
    built = [
        _build_source(source, project, work / str(place), settings, backend, workers, on_progress)
        for place, (source, project) in enumerate(open_sources)
    ]
    manifest = _finish(built, out, work, settings, request)
    shutil.rmtree(work)
    return manifest


def _settings_json(settings: Settings) -> dict[str, Any]:
    values = asdict(settings)
    return {"format": FORMAT, **values, "extra_requirements": list(settings.extra_requirements)}


def _work_folder(out: Path, request: dict[str, Any]) -> Path:
    work = out / WORK
    plan = work / "asked.json"
    if plan.is_file():
        if json.loads(plan.read_text(encoding="utf-8")) != request:
            raise ConfigError(
                f"{out} holds an unfinished build of other sources or settings; give those, or delete it."
            )
        return work
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty; choose another --out.")
    work.mkdir(parents=True, exist_ok=True)
    write_atomic(plan, json.dumps(request))
    return work


# ---- one source --------------------------------------------------------------------------------------------


def _build_source(
    source: Source,
    project: Project,
    work: Path,
    settings: Settings,
    backend: str,
    workers: int,
    on_progress: Callable[[Progress], None],
) -> _Built:
    on_progress(Progress(source=source.name, doing="installing"))
    requirements = requirements_of(project, settings.extra_requirements)
    environment = package_environment(requirements.install, name=source.name, backend=backend)

    def bench() -> TestBench:
        return TestBench(source.tree, project, environment, backend, settings.limits)

    on_progress(Progress(source=source.name, doing="running tests twice"))
    baseline = _baseline(work / "baseline.json", bench, project, settings.limits)
    texts = texts_of(source.tree, project)
    tests = {name: (source.tree / name).read_text("utf-8", "replace") for name in project.test_files}
    sieve = Sieve(project=project, baseline=baseline, texts=texts, test_texts=tests, limits=settings.limits)
    candidates = [*commit_candidates(source, texts), *operator_candidates(texts, settings.seed)]
    journal = _Journal(work / "journal.jsonl")

    def tell(num_tried: int, num_kept: int) -> None:
        on_progress(
            Progress(
                source=source.name,
                doing="trying bugs",
                num_tried=num_tried,
                num_kept=num_kept,
                max_tasks=settings.max_tasks,
            )
        )

    verdicts = _sift_candidates(candidates, sieve, journal, bench, settings.max_tasks, workers, tell)
    rows = _rows(source, project, requirements, baseline, candidates, verdicts, texts, work)
    return _Built(
        source=source,
        project=project,
        requirements=requirements,
        baseline=baseline,
        num_candidates=len(candidates),
        verdicts=verdicts,
        rows=rows,
    )


def _open_source(address: str, work: Path) -> Source:
    """Fetched once for a build; what a kill cut off is fetched anew."""
    facts, folder = work / "opened", work / "source"
    if facts.is_file():
        stored_source = json.loads(facts.read_text(encoding="utf-8"))
        repository = Path(stored_source["repository"]) if stored_source["repository"] else None
        return Source(**{**stored_source, "tree": Path(stored_source["tree"]), "repository": repository})
    if folder.is_dir():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    source = open_source(address, folder)
    write_atomic(facts, json.dumps(asdict(source), default=str))
    return source


def _baseline(path: Path, bench: Callable[[], TestBench], project: Project, limits: BenchLimits) -> Baseline:
    if path.is_file():
        return Baseline.from_json(json.loads(path.read_text(encoding="utf-8")))
    results = []
    for job in baseline_jobs(limits):
        with bench() as fresh:
            results += fresh.run([job])
    baseline = baseline_of(*results, project=project.name, limits=limits)
    write_atomic(path, json.dumps(baseline.to_json()))
    return baseline


class _Journal:
    """Verdicts as they are made, a line each; one that was cut off by a kill is not there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.verdicts: dict[str, SiftVerdict] = {}
        lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
        for line in lines[:-1]:
            verdict = SiftVerdict.from_json(json.loads(line))
            self.verdicts[verdict.key] = verdict
        # Without this the next verdict would be appended to the line that was cut off.
        if lines and lines[-1]:
            write_atomic(path, "".join(f"{line}\n" for line in lines[:-1]))

    def add(self, verdicts: Sequence[SiftVerdict]) -> None:
        with self._path.open("a", encoding="utf-8") as stream:
            for each in verdicts:
                self.verdicts[each.key] = each
                stream.write(json.dumps(each.to_json()) + "\n")


def _sift_candidates(
    candidates: Sequence[Candidate],
    sieve: Sieve,
    journal: _Journal,
    bench: Callable[[], TestBench],
    max_tasks: int,
    workers: int,
    tell: Callable[[int, int], None],
) -> list[SiftVerdict]:
    """The verdicts up to the one that makes `max_tasks`, whoever was quicker."""
    waiting = _batches([each for each in candidates if each.key not in journal.verdicts])
    benches = [bench() for _ in range(workers)]
    running: dict[Future[list[SiftVerdict]], TestBench] = {}
    with ThreadPoolExecutor(workers) as pool:
        try:
            while True:
                verdicts = _settle_verdicts(candidates, journal.verdicts, max_tasks)
                tell(len(verdicts), sum(each.reason == KEPT for each in verdicts))
                is_done = sum(each.reason == KEPT for each in verdicts) == max_tasks
                free = [each for each in benches if each not in running.values()]
                for each in free if not is_done else []:
                    batch = next(waiting, None)
                    if batch is not None:
                        running[pool.submit(sieve.verdicts, each, batch)] = each
                if is_done or not running:
                    return verdicts
                first = next(iter(running))  # in their order: what comes first is settled first
                journal.add(first.result())
                del running[first]
        finally:  # what runs for later candidates is not waited for
            for each in benches:
                each.close()
            pool.shutdown(cancel_futures=True)


def _batches(candidates: Sequence[Candidate]) -> Iterator[list[Candidate]]:
    for start in range(0, len(candidates), BATCH):
        yield list(candidates[start : start + BATCH])


def _settle_verdicts(
    candidates: Sequence[Candidate], verdicts_by_key: dict[str, SiftVerdict], max_tasks: int
) -> list[SiftVerdict]:
    """Verdicts without a gap, up to the one that makes `max_tasks`."""
    verdicts: list[SiftVerdict] = []
    num_kept = 0
    for each in candidates:
        if each.key not in verdicts_by_key or num_kept == max_tasks:
            break
        verdicts.append(verdicts_by_key[each.key])
        num_kept += verdicts_by_key[each.key].reason == KEPT
    return verdicts


def _rows(
    source: Source,
    project: Project,
    requirements: Requirements,
    baseline: Baseline,
    candidates: Sequence[Candidate],
    verdicts: Sequence[SiftVerdict],
    texts: dict[str, str],
    work: Path,
) -> list[dict[str, Any]]:
    plain = PlainRepository(source.tree, work / "plain.git")
    plain.bundle(work / f"{source.name}.bundle")
    hashes = body_hashes(texts)
    by_key = {each.key: each for each in candidates}
    rows: list[dict[str, Any]] = []
    for verdict in verdicts:
        if verdict.reason != KEPT:
            continue
        candidate = by_key[verdict.key]
        bug, gold = plain.diffs(candidate.files)
        failing = set(verdict.fail_to_pass)
        task = SWETask(
            instance_id=f"{source.name}__{verdict.key}",
            repo=project.name,
            base_commit=plain.commit,
            problem_statement=verdict.problem_statement,
            version=project.version,
            patch=gold,
            bug_patch=bug,
            fail_to_pass=verdict.fail_to_pass,
            pass_to_pass=tuple(each for each in baseline.tests if each not in failing),
            source=f"../{SOURCES}/{source.name}.bundle",
            install=requirements.install,
            test_command=project.test_command,
            python=requirements.python,
        )
        details = {
            "operator": candidate.operator,
            "functions": list(candidate.functions),
            "function_hashes": sorted({hashes[each] for each in candidate.functions if each in hashes}),
        }
        rows.append({**task.to_row(), **details})
    return rows


# ---- all of them -------------------------------------------------------------------------------------------


def _finish(
    built: Sequence[_Built], out: Path, work: Path, settings: Settings, request: dict[str, Any]
) -> dict[str, Any]:
    rows = [row for each in built for row in each.rows]
    names = {
        row["instance_id"]: [*(f"{row['repo']} {each}" for each in row["functions"]), *row["function_hashes"]]
        for row in rows
    }
    splits = splits_of(names, settings.seed)
    (out / SOURCES).mkdir(exist_ok=True)
    files: dict[str, str] = {}
    for place, each in enumerate(built):
        name = f"{SOURCES}/{each.source.name}.bundle"
        shutil.copyfile(work / str(place) / f"{each.source.name}.bundle", out / name)
        files[name] = _sha256((out / name).read_bytes())
    for split in SPLITS:
        rows_of_split = [row for row in rows if splits[row["instance_id"]] == split]
        if rows_of_split:
            (out / split).mkdir(exist_ok=True)
            files |= _write_rows(out, f"{split}/{ROWS_FILE}", rows_of_split)
    whole = [
        {**row, "split": splits[row["instance_id"]], "source": row["source"].removeprefix("../")}
        for row in rows
    ]
    files |= _write_rows(out, TASKS, whole)
    manifest = {
        "asked": request,
        "sources": [_source_json(each) for each in built],
        "tasks": len(rows),
        "splits": {split: sum(each == split for each in splits.values()) for split in SPLITS},
        "operators": dict(sorted(Counter(row["operator"] for row in rows).items())),
        "files": files,
    }
    # Last, because a directory with a manifest counts as a whole build.
    write_atomic(out / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return manifest


def _write_rows(out: Path, name: str, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    data = jsonl_bytes(rows)
    write_atomic(out / name, data)
    return {name: _sha256(data)}


def _sha256(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def _source_json(built: _Built) -> dict[str, Any]:
    """Counts that add up: candidates = tried + not tried, tried = kept + dropped for each reason."""
    reasons = Counter(each.reason for each in built.verdicts)
    num_tried = len(built.verdicts)
    if num_tried != reasons[KEPT] + sum(reasons[each] for each in REASONS) or reasons[KEPT] != len(
        built.rows
    ):
        raise CountError(
            f"{built.source.name}: {num_tried} bugs were tried, and {dict(reasons)} became of them."
        )
    return {
        "name": built.source.name,
        "version": built.project.version,
        "kind": built.source.kind,
        "sha256": built.source.digest,
        "commit": built.source.commit,
        "python": built.requirements.python,
        "packages": list(built.requirements.versions),
        "requirements_left_out": list(built.requirements.left_out),
        "tests": built.baseline.counts,
        "not_importable": built.baseline.errors,
        "candidates": built.num_candidates,
        "not_tried": built.num_candidates - num_tried,
        "tried": num_tried,
        "kept": reasons[KEPT],
        "dropped": {each: reasons[each] for each in REASONS if reasons[each]},
    }
