"""What workers did in service ──► rows to learn from.

    runs.sqlite ──filter──► run ──► its last attempt's session ──calls/──► conversations ──► SFT rows
                                                     secrets and personal data masked, doubles left out

One row a conversation that a model of the run had: its messages and the answer, as `rllm sft` takes them.
Where somebody corrected the outputs, they are the answer of a model that gave the outputs itself. What the
model of a program should have said instead nobody knows: such a run is left out.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError
from rllm.gateway.ledger import Ledger
from rllm.gateway.wire import CallRecord, CallStatus
from rllm.redaction import values_without_keys, without_keys
from rllm.worker.store import RunStore

_PERSONAL = {
    "[email]": re.compile(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}"),
    "[secret]": re.compile(
        r"\b(?:sk|pk|rk|ghp|gho|ghs|xox[abp])[-_][A-Za-z0-9_-]{16,}|\bAKIA[0-9A-Z]{16}\b|"
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----",
        re.DOTALL,
    ),
    "[card]": re.compile(r"\b(?:\d[ -]?){13,19}\b"),
    "[phone]": re.compile(r"(?<![\w.])\+\d{1,3}[ ()./-]*(?:\d[ ()./-]*){7,12}(?!\w)"),
}


OUTCOMES = ("kept", "filtered", "unfinished", "without_calls", "not_correctable", "double")
"""Of every run, exactly one."""


class RunExport:
    """The runs of a directory that no process is writing, as rows. `counts` says what became of every run."""

    def __init__(self, directory: Path, keep: Callable[[Mapping[str, Any]], bool]) -> None:
        if not (directory / "runs.sqlite").is_file():
            raise ConfigError(f"{directory} holds no runs of workers.")
        self.directory = directory
        self.counts: Counter[str] = Counter()
        """`runs`; what became of each, one of `OUTCOMES`; `rows`; texts that were `masked`."""
        self._keep = keep
        self._digests: set[bytes] = set()

    def rows(self) -> Iterator[dict[str, Any]]:
        """SFT rows, the oldest run first."""
        store = RunStore(self.directory, read_only=True)
        try:
            runs = list(store.runs())[::-1]
            for run in runs:
                self.counts["runs"] += 1
                yield from self._rows_of(run, store)
        finally:
            store.close()

    def _rows_of(self, run: dict[str, Any], store: RunStore) -> Iterator[dict[str, Any]]:
        feedback = store.feedback(run["run_id"])
        response = run["response"] or {}
        facts = {
            **{name: run[name] for name in ("worker_id", "key", "status", "attempts", "inputs")},
            **{name: response.get(name) for name in ("version", "outputs", "error")},
            **{name: feedback.get(name) for name in ("score", "label")},
        }
        if run["response"] is None:
            self.counts["unfinished"] += 1
            return
        if not self._keep(facts):
            self.counts["filtered"] += 1
            return
        attempts = store.attempts(run["run_id"])
        chats = self._chats(run["worker_id"], attempts[-1]["session"]) if attempts else []
        if not chats:
            self.counts["without_calls"] += 1
            return
        if feedback.get("outputs") is not None and not _is_answer(chats):
            self.counts["not_correctable"] += 1
            return
        num_rows = 0
        for messages, tools in chats:
            row = self._row(run, facts, messages, tools, feedback.get("outputs"))
            if row is not None:
                num_rows += 1
                yield row
        self.counts["kept" if num_rows else "double"] += 1
        self.counts["rows"] += num_rows

    def _row(
        self,
        run: Mapping[str, Any],
        facts: Mapping[str, Any],
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        corrected: Mapping[str, Any] | None,
    ) -> dict[str, Any] | None:
        """None for a conversation that is there already."""
        if corrected is not None:
            answer = {name: value for name, value in corrected.items() if name not in ("run_id", "status")}
            messages = [
                *messages[:-1],
                {"role": "assistant", "content": json.dumps(answer, ensure_ascii=False)},
            ]
        masked = self._masked({"messages": messages} | ({"tools": tools} if tools else {}))
        digest = hashlib.blake2b(json.dumps(masked, sort_keys=True).encode(), digest_size=16).digest()
        if digest in self._digests:
            return None
        self._digests.add(digest)
        about = {name: facts[name] for name in ("worker_id", "status", "score", "label")}
        return {**masked, "run": {"id": run["run_id"], "corrected": corrected is not None, **about}}

    def _chats(self, worker: str, session: str) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
        """The conversations of a session, each as long as it became."""
        calls = self.directory / "calls" / worker
        if not calls.is_dir():
            return []
        with Ledger.open(calls, read_only=True) as ledger:
            records = [each for each in ledger.traces(session) if each.status is CallStatus.OK]
        last: dict[tuple[int, int], CallRecord] = {
            (each.conversation, each.segment): each for each in records if each.prompt is None
        }
        return [([*each.messages, each.response], each.tools) for each in last.values()]

    def _masked(self, value: Any) -> Any:
        if isinstance(value, str):
            text = without_keys(value)
            for mark, pattern in _PERSONAL.items():
                text = pattern.sub(lambda match, mark=mark: _mask(match, mark), text)
            self.counts["masked"] += text != value
            return text
        if isinstance(value, Mapping):
            return {str(values_without_keys(name)): self._masked(each) for name, each in value.items()}
        if isinstance(value, list):
            return [self._masked(each) for each in value]
        return value


def _is_answer(chats: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]) -> bool:
    """Whether the model was asked once and what it said are the outputs."""
    if len(chats) != 1 or any(each.get("role") == "assistant" for each in chats[0][0][:-1]):
        return False
    try:
        return isinstance(json.loads(chats[0][0][-1].get("content") or ""), dict)
    except (ValueError, RecursionError):
        return False


def _mask(match: re.Match[str], mark: str) -> str:
    """The mark; a number that cannot be one of a card stays."""
    return mark if mark != "[card]" or _is_card(match[0]) else match[0]


def _is_card(text: str) -> bool:
    """Luhn's check sum (ISO/IEC 7812-1), which nine of ten other numbers do not meet."""
    digits = [int(each) for each in text if each.isdecimal()][::-1]
    doubled = (sum(divmod(2 * digit, 10)) for digit in digits[1::2])
    return (sum(digits[::2]) + sum(doubled)) % 10 == 0
