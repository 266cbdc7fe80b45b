"""The surroundings of runs: data sets, models, runs of workers, and the sessions of gateways.

RLLM_HOME/datasets, models.json ──► datasets_page, dataset_page, models_page
DIR/…/runs.sqlite               ──► workers_page, worker_run_page
DIR/…/ledger.sqlite             ──► sessions_page, session_page
"""

import json
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from rllm.build.model_settings import ModelSettings
from rllm.data.registry import DatasetRegistry, require_dataset
from rllm.errors import ConfigError
from rllm.files.foreign import MOST_JSON_BYTES, read_regular
from rllm.files.home import rllm_home
from rllm.store.run_directory import RunDirectory
from rllm.view.messages import shown_message, shown_value
from rllm.view.query import Query
from rllm.view.run_facts import facts_of
from rllm.view.sources import Sources, may_look_into

MAX_ROWS = 200
MAX_CALLS = 100
"""Calls of a session that are shown at a time."""
_SHAPE = (
    "architectures",
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
)


def datasets_page(sources: Sources, query: Query) -> dict[str, Any]:
    """Every registered data set with its splits."""
    names = DatasetRegistry.get_dataset_names()
    return {"datasets": [{"name": name, **(DatasetRegistry.get_dataset_info(name) or {})} for name in names]}


def dataset_page(sources: Sources, query: Query) -> dict[str, Any]:
    """A window of the rows of a split; `q` keeps those in whose JSON it stands."""
    name, words = query.text("name"), query.text("q").strip().lower()
    rows = require_dataset(name, query.text("split"))
    limit, offset = query.number("limit", 50, low=1, high=MAX_ROWS), query.number("offset", 0)
    numbers = range(len(rows))
    if words:
        numbers = [
            each
            for each in numbers
            if words in json.dumps(rows[each], default=str, ensure_ascii=False).lower()
        ]
    return {
        "name": name,
        "split": rows.split,
        "info": DatasetRegistry.get_dataset_info(name),
        "total": len(numbers),
        "offset": offset,
        "rows": [
            {"number": each, "fields": {key: shown_value(value) for key, value in rows[each].items()}}
            for each in numbers[offset : offset + limit]
        ],
    }


def models_page(sources: Sources, query: Query) -> dict[str, Any]:
    """Models on servers by name, and those that the runs here made."""
    settings = ModelSettings.load()
    return {
        "named": [
            {"name": each.name, "provider": each.provider, "model": each.model, "base_url": each.base_url}
            | {"is_default": each.name == settings.default}
            for each in settings.entries.values()
        ],
        "trained": [row for key, run in sources.runs().items() for row in _models_of(key, run)],
    }


def _models_of(key: str, run: RunDirectory) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    if not may_look_into(run.path):
        return rows
    for path in (run.model_path, *sorted((run.path / "models").glob("*")), run.path / "adapter"):
        names = [name for name in ("config.json", "adapter_config.json") if (path / name).is_file()]
        if not names:
            continue
        files = [each for each in path.iterdir() if each.is_file()]
        rows.append(
            {
                "run": key,
                "name": path.relative_to(run.path).as_posix(),
                "bytes": sum(each.stat().st_size for each in files),
                "made_at": max(each.stat().st_mtime for each in files),
                "shape": _shape_of(path / names[0]),
                "reports": _reports_of(run),
            }
        )
    return rows


def _shape_of(path: Path) -> dict[str, Any]:
    """Nothing of a file that is damaged or closed: the model is listed all the same."""
    try:
        config = json.loads(read_regular(path, MOST_JSON_BYTES))
    except (OSError, ValueError, RecursionError, ConfigError):
        return {}
    fields = config if isinstance(config, dict) else {}
    return {name: fields[name] for name in (*_SHAPE, "r", "peft_type") if fields.get(name)}


def _reports_of(run: RunDirectory) -> dict[str, dict[str, Any]]:
    """None of a run that cannot be read: the page of runs says why."""
    try:
        return facts_of(run).reports
    except (ConfigError, PermissionError):
        return {}


def workers_page(sources: Sources, query: Query) -> dict[str, Any]:
    """Runs of workers, the newest first, of every store below the directories."""
    from rllm.worker.store import RunStore

    name, stores = query.text("worker"), []
    for key, directory in _worker_stores(sources).items():
        with closing(RunStore(directory, read_only=True)) as store:
            rows = list(islice(store.runs(name), query.number("limit", 100, low=1, high=1_000)))
            for row in rows:
                row["inputs"] = shown_value(row["inputs"])[:400]
                row["response"] = "" if row["response"] is None else shown_value(row["response"])[:400]
                row["feedback"] = store.feedback(row["run_id"])
        stores.append({"key": key, "runs": rows})
    return {"stores": stores}


def worker_run_page(sources: Sources, query: Query) -> dict[str, Any]:
    """One run of a worker: what was asked, every attempt, what was answered."""
    from rllm.worker.store import RunStore

    with closing(
        RunStore(_directory_of(_worker_stores(sources), query.text("store")), read_only=True)
    ) as store:
        row = next((each for each in store.runs() if each["run_id"] == query.text("id")), None)
        if row is None:
            raise ConfigError(
                f"There is no run {query.text('id')[:80]!r} of a worker in {query.text('store')}."
            )
        attempts = store.attempts(row["run_id"])
        feedback = store.feedback(row["run_id"])
    for name in ("inputs", "response"):
        row[name] = (
            "" if row[name] is None else shown_value(json.dumps(row[name], indent=2, ensure_ascii=False))
        )
    return {**row, "attempts_made": attempts, "feedback": feedback, "store": query.text("store")}


def sessions_page(sources: Sources, query: Query) -> dict[str, Any]:
    """Sessions of every gateway's ledger below the directories, by name."""
    from rllm.gateway.ledger import Ledger

    ledger_name, after, ledgers = query.text("ledger"), query.text("after"), []
    for key, directory in sources.directories_with("ledger.sqlite").items():
        if ledger_name in ("", key):
            with Ledger.open(directory, read_only=True) as ledger:
                sessions = ledger.sessions(limit=100, after=after if ledger_name else "")
                for session in sessions:
                    session["data"] = shown_value(session["data"])[:400]
                ledgers.append({"key": key, "counts": ledger.counts(), "sessions": sessions})
    return {"ledgers": ledgers}


def session_page(sources: Sources, query: Query) -> dict[str, Any]:
    """The calls of a session in the order in which they were recorded, each with what is new in it."""
    from rllm.gateway.ledger import Ledger

    offset = query.number("offset", 0)
    with Ledger.open(
        _directory_of(sources.directories_with("ledger.sqlite"), query.text("ledger")), read_only=True
    ) as ledger:
        data, records = ledger.session_data(query.text("id")), ledger.traces(query.text("id"))
    if data is None:
        raise ConfigError(f"There is no session {query.text('id')[:80]!r} in {query.text('ledger')}.")
    calls: list[dict[str, Any]] = []
    num_before: dict[tuple[int, int], int] = {}
    for number, record in enumerate(records):
        row = (record.conversation, record.segment)
        # One more for the answer, which the next call of this row repeats as a message.
        begin, num_before[row] = num_before.get(row, 0), len(record.messages) + 1
        if not offset <= number < offset + MAX_CALLS:
            continue
        calls.append(
            {
                "number": number,
                "id": record.id,
                "status": record.status,
                "dialect": record.dialect,
                "model": record.model,
                "conversation": record.conversation,
                "segment": record.segment,
                "messages": [shown_message(each) for each in record.messages[begin:]],
                "prompt": shown_value(record.prompt) if record.prompt else "",
                "response": shown_message({"role": "assistant", **record.response})
                if record.response
                else None,
                "error": shown_value(record.error) if record.error else "",
                "finish_reason": record.finish_reason,
                "num_prompt_ids": len(record.prompt_ids),
                "num_completion_ids": len(record.completion_ids),
                "usage": record.usage,
                "no_ids_because": record.no_ids_because,
            }
        )
    return {
        "id": query.text("id"),
        "data": shown_value(data),
        "total": len(records),
        "offset": offset,
        "calls": calls,
    }


def _worker_stores(sources: Sources) -> dict[str, Path]:
    """Those below the directories, and those in the home of workers that were given no directory."""
    at_home = sorted((rllm_home() / "workers").glob("*/runs.sqlite"))
    return sources.directories_with("runs.sqlite") | {
        f"home/{each.parent.name}": each.parent for each in at_home
    }


def _directory_of(directories: dict[str, Path], key: str) -> Path:
    if key not in directories:
        raise ConfigError(
            f"There is nothing under the name {key[:80]!r} here; there are {', '.join(directories)}."
        )
    return directories[key]
