"""The runs of workers in service ──► rows to learn from.

    runs.sqlite ──filter──► run ──► its last attempt's session ──calls/──► conversations ──► SFT rows
                             │      earlier attempts' answers, which were worse ──────────► preferences
                             └────► inputs and outputs ───────────────────────────────────► tasks

An SFT row is one conversation that a model of the run had, as `rllm sft` takes it. Where somebody corrected
the outputs, they are the answer of a model that gave the outputs itself. What the model of a program should
have said instead nobody knows: such a run is left out.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rllm.contracts.contract import RunStatus
from rllm.data.curation import CleanRows, PastConversation, RowKind, preference_rows, sft_row
from rllm.errors import ConfigError
from rllm.gateway.ledger import Ledger
from rllm.types.wire import CallRecord, CallStatus
from rllm.worker.store import RunStore

RUN_FIELDS = (
    "worker_id", "version", "key", "status", "attempts", "inputs", "outputs", "error", "score", "label"
)  # fmt: skip
"""The fields that a filter may name."""
OUTCOMES = ("kept", "filtered", "unfinished", "without_calls", "not_correctable", "without_outputs", "double")
"""The outcomes of runs; every run has exactly one."""


@dataclass(kw_only=True, slots=True)
class _ServedRun:
    """A run that the filter keeps."""

    id: str
    worker: str
    facts: Mapping[str, Any]
    corrected: Mapping[str, Any] | None
    """Outputs as somebody said that they should have been."""
    attempts: list[dict[str, Any]]

    @property
    def about(self) -> dict[str, Any]:
        names = ("worker_id", "status", "score", "label")
        return {"id": self.id, "corrected": self.corrected is not None} | {
            name: self.facts[name] for name in names
        }


class RunExport:
    """The runs of a directory as rows; a server may go on writing. `counts` says what became of every run."""

    def __init__(self, directory: Path, keep: Callable[[Mapping[str, Any]], bool], kind: RowKind) -> None:
        if not (directory / "runs.sqlite").is_file():
            raise ConfigError(f"{directory} holds no runs of workers.")
        self.directory = directory
        self.counts: Counter[str] = Counter()
        """`runs`; what became of each, one of `OUTCOMES`; `rows`; texts that were `masked`."""
        self._keep = keep
        self._kind = kind
        self._clean = CleanRows()

    def rows(self) -> Iterator[dict[str, Any]]:
        """The oldest run first; of preferences, those of one prompt together."""
        make = {
            RowKind.SFT: self._sft_rows,
            RowKind.PREFERENCES: self._preference_rows,
            RowKind.TASKS: self._task_rows,
        }
        yield from make[self._kind]()
        self.counts["masked"] = self._clean.num_masked

    def _runs(self) -> Iterator[_ServedRun]:
        store = RunStore(self.directory, read_only=True)
        try:
            for row in list(store.runs())[::-1]:
                self.counts["runs"] += 1
                feedback = store.feedback(row["run_id"])
                response = row["response"] or {}
                facts = {
                    **{name: row[name] for name in ("worker_id", "key", "status", "attempts", "inputs")},
                    **{name: response.get(name) for name in ("version", "outputs", "error")},
                    **{name: feedback.get(name) for name in ("score", "label")},
                }
                if row["response"] is None:
                    self.counts["unfinished"] += 1
                elif not self._keep(facts):
                    self.counts["filtered"] += 1
                else:
                    yield _ServedRun(
                        id=row["run_id"],
                        worker=row["worker_id"],
                        facts=facts,
                        corrected=feedback.get("outputs"),
                        attempts=store.attempts(row["run_id"]),
                    )
        finally:
            store.close()

    # ---- kinds of rows -------------------------------------------------------------------------------------

    def _sft_rows(self) -> Iterator[dict[str, Any]]:
        for run in self._runs():
            conversations = self._last_conversations(run)
            if conversations is None:
                continue
            rows = [self._clean.clean(sft_row(each)) for each in conversations]
            new_rows = [{**row, "run": run.about} for row in rows if row is not None]
            self.counts["kept" if new_rows else "double"] += 1
            self.counts["rows"] += len(new_rows)
            yield from new_rows

    def _preference_rows(self) -> Iterator[dict[str, Any]]:
        """Answers of all runs are compared, so a run is kept where it had some."""
        conversations: list[PastConversation] = []
        for run in self._runs():
            last = self._last_conversations(run)
            if last is None:
                continue
            self.counts["kept"] += 1
            conversations += last
            # What the model said itself is the worse answer of the pair.
            if run.corrected is not None:
                conversations += self._conversations(run, run.attempts[-1])
            for attempt in run.attempts[:-1]:
                if attempt["status"] == RunStatus.INVALID_OUTPUT:
                    conversations += self._conversations(run, attempt)
        for row, better, worse in preference_rows(conversations):
            clean_row = self._clean.clean(row)
            if clean_row is not None:
                self.counts["rows"] += 1
                yield {**clean_row, "run": {"chosen": better.about["id"], "rejected": worse.about["id"]}}

    def _task_rows(self) -> Iterator[dict[str, Any]]:
        """Inputs and the outputs that are right, as `rllm worker promote` and `rllm train` read it."""
        for run in self._runs():
            outputs = run.corrected if run.corrected is not None else run.facts["outputs"]
            if outputs is None:
                self.counts["without_outputs"] += 1
                continue
            inputs, answer = _content(run.facts["inputs"]), _content(outputs)
            row = {"question": _text(inputs), "answer": _text(answer), "inputs": inputs, "outputs": answer}
            clean_row = self._clean.clean(row)
            self.counts["double" if clean_row is None else "kept"] += 1
            if clean_row is not None:
                self.counts["rows"] += 1
                yield {**clean_row, "run": run.about}

    # ---- conversations -------------------------------------------------------------------------------------

    def _last_conversations(self, run: _ServedRun) -> list[PastConversation] | None:
        """Those of the last attempt, with the corrected answer where there is one; None for a run without,
        which is counted."""
        conversations = self._conversations(run, run.attempts[-1]) if run.attempts else []
        if not conversations:
            self.counts["without_calls"] += 1
            return None
        if run.corrected is None:
            return conversations
        if not _is_answer(conversations):
            self.counts["not_correctable"] += 1
            return None
        answer = {"role": "assistant", "content": _text(_content(run.corrected))}
        (conversation,) = conversations
        messages = [*conversation.messages[:-1], answer]
        return [replace(conversation, messages=messages, is_corrected=True)]

    def _conversations(self, run: _ServedRun, attempt: Mapping[str, Any]) -> list[PastConversation]:
        """The conversations of one attempt, each as long as it became."""
        calls = self.directory / "calls" / run.worker
        if not calls.is_dir():
            return []
        with Ledger.open(calls, read_only=True) as ledger:
            records = [each for each in ledger.traces(attempt["session"]) if each.status is CallStatus.OK]
        # Later calls of a segment repeat the messages of the earlier ones, so the last one has them all.
        last: dict[tuple[int, int], CallRecord] = {
            (each.conversation, each.segment): each for each in records if each.prompt is None
        }
        is_last = attempt is run.attempts[-1]
        return [
            PastConversation(
                messages=[*each.messages, each.response],
                tools=each.tools,
                is_right=attempt["status"] == RunStatus.OK,
                # The feedback is about the response, which came from the last attempt.
                score=run.facts["score"] if is_last else None,
                about=run.about,
            )
            for each in last.values()
        ]


def _content(values: Mapping[str, Any]) -> dict[str, Any]:
    """All that says something about the task: not the run's name and how it ended."""
    return {name: value for name, value in values.items() if name not in ("run_id", "status")}


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _is_answer(conversations: list[PastConversation]) -> bool:
    """Whether the model was asked once and what it said are the outputs."""
    if len(conversations) != 1 or len(conversations[0].answer) != 1:
        return False
    try:
        return isinstance(json.loads(conversations[0].messages[-1].get("content") or ""), dict)
    except (ValueError, RecursionError):
        return False
