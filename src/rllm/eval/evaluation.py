"""An evaluation on disk: begun once, interrupted as often as you like, every attempt made and counted once.

plan, tasks, engine ──► run_ways ──► store.sqlite (episodes, a batch at a time) ──► summary.json
                           ▲                 │
                           └── attempts that are there are not made again; failures of the infrastructure are
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from rllm.engine.attempts import EpisodeEngine
from rllm.engine.failures import MAX_INITIAL_FAILURES
from rllm.errors import ConfigError, InferenceError
from rllm.eval.plan import EvaluationPlan, hash_of, require_evaluation, require_same_plan
from rllm.eval.report import NO_PRICES, Prices, details_of, report_of
from rllm.eval.results import AGAIN, Result, asked_of, newest_episodes, prompt_of, result_of
from rllm.eval.skill import score_of
from rllm.eval.task_facts import NO_FACTS, TaskFacts
from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.types.episode import Episode
from rllm.types.task import EpisodeId, task_id_of

_BATCH = 64
_BATCH_S = 2.0
"""Episodes are saved so many at a time, or so often: what a kill can cost."""
MAX_CONSECUTIVE_INFRA_FAILURES = 100
"""Attempts in a row that the infrastructure failed: a server that is gone is not asked for ever."""
_PROMPTS_HASHED = 64
"""Tasks whose first prompts, as they were really sent, enter the stamp."""
_STATE = "evaluation"
"""The state beside the episodes: the number of the next batch, and the hashes of prompts."""
_INSTANCES = "instances"
"""The instances of the tasks, by id, as their world said."""


class Evaluation:
    """One evaluation, in a directory of its own that this process alone writes."""

    def __init__(self, directory: Path, plan: EvaluationPlan) -> None:
        """Raises ConfigError where `directory` holds something else, or an evaluation by another plan."""
        self.plan = plan
        with ExitStack() as closed_unless_all_is_well:
            self.run = RunDirectory.create_or_open(directory)
            closed_unless_all_is_well.callback(self.run.close)
            run_config = self.run.config()
            if run_config:
                require_same_plan(run_config, plan.to_dict(), directory)
            self.store = closed_unless_all_is_well.enter_context(EpisodeStore.open(self.run.store_path))
            if not run_config and self.store.count():
                raise ConfigError(
                    f"{directory} holds episodes, and no config.json that says of what; restore it, or "
                    "choose another --output."
                )
            self.results = {way: self._stored_results(way) for way in plan.ways}
            state = self.store.value(_STATE, {"next_batch": 0, "prompts": {}})
            self._next_batch: int = state["next_batch"]
            self._prompts: dict[str, str] = state["prompts"]
            closed_unless_all_is_well.pop_all()

    def done(self, way: str) -> set[EpisodeId]:
        """Attempts that need not be made again."""
        return {each for each, result in self.results[way].items() if result.outcome not in AGAIN}

    @property
    def num_done(self) -> int:
        """The same, of all ways."""
        return sum(len(self.done(way)) for way in self.plan.ways)

    async def run_ways(
        self,
        engine: EpisodeEngine,
        tasks: Sequence[Any],
        on_result: Callable[[str, Result], None] = lambda way, result: None,
    ) -> None:
        """Make every attempt that is still to be made. Interrupted, it has saved what was finished."""
        self._begin()
        sample = {task_id_of(task, place) for place, task in enumerate(tasks[:_PROMPTS_HASHED])}
        for way, sampling in self.plan.ways.items():
            running = engine.run(
                tasks,
                group_size=self.plan.attempts,
                purpose=f"eval/{way}",
                sampling=sampling,
                skip=self.done(way),
            )
            batch: list[Episode] = []
            saved_at, failed_in_a_row, initial_unjudged = time.monotonic(), 0, 0
            try:
                async with aclosing(running) as episodes:
                    async for episode in episodes:
                        batch.append(episode)
                        result = result_of(episode)
                        self.results[way][episode.episode_id] = result
                        if episode.task_id in sample and (prompt := prompt_of(episode)):
                            self._prompts.setdefault(episode.task_id, hash_of(prompt))
                        on_result(way, result)
                        failed_in_a_row = failed_in_a_row + 1 if result.outcome in AGAIN else 0
                        # An unbroken row from the first attempt on.
                        # It is -1 as soon as one attempt was judged.
                        if initial_unjudged >= 0:
                            initial_unjudged = initial_unjudged + 1 if result.is_unjudged else -1
                        # A judge with a mistake in it is not asked for ever.
                        if (
                            failed_in_a_row >= MAX_CONSECUTIVE_INFRA_FAILURES
                            or initial_unjudged >= MAX_INITIAL_FAILURES
                        ):
                            raise _given_up(failed_in_a_row, result)
                        if len(batch) >= _BATCH or time.monotonic() - saved_at >= _BATCH_S:
                            self._save(way, batch)
                            batch, saved_at = [], time.monotonic()
            finally:
                self._save(way, batch)

    def report(
        self, *, ks: Sequence[int] = (), prices: Prices = NO_PRICES, facts: TaskFacts = NO_FACTS
    ) -> dict[str, Any]:
        """The whole report as plain JSON: a part for each way, what simple policies come to on its tasks,
        and the stamp."""
        self.store.set_value(_INSTANCES, dict(facts.instances))
        reports: dict[str, Any] = {}
        for way in self.plan.ways:
            results = facts.described(list(self.results[way].values()))
            reports[way] = {
                **report_of(results).to_dict(),
                **score_of(results, facts),
                **details_of(results, ks=ks, prices=prices),
            }
        stamp = {**self.plan.to_dict(), "prompt_hash": hash_of(self._prompts)}
        return {"stamp": stamp, "baselines": facts.means(), "reports": reports}

    def finish(self, report: Mapping[str, Any]) -> None:
        """The result, for whoever reads the directory later."""
        self._begin()
        self.run.write_summary(dict(report))

    def close(self) -> None:
        self.store.close()
        self.run.close()

    def __enter__(self) -> "Evaluation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.store.close()
        self.run.__exit__(kind, error, traceback)  # one that was refused before it began leaves nothing

    def _begin(self) -> None:
        if not self.run.config():
            self.run.write_config(self.plan.to_dict())

    def _save(self, way: str, batch: Sequence[Episode]) -> None:
        if not batch:
            return
        number, self._next_batch = self._next_batch, self._next_batch + 1
        # The number is taken before it is used: a kill between the two wastes one, and overwrites no batch.
        self.store.set_value(_STATE, {"next_batch": self._next_batch, "prompts": self._prompts})
        self.store.save_episodes(way, number, batch)

    def _stored_results(self, way: str) -> dict[EpisodeId, Result]:
        """Results so far; of an attempt that was made again, the newest."""
        return {episode.episode_id: result_of(episode) for episode in newest_episodes(self.store, way)}


def _given_up(count: int, last: Result) -> InferenceError:
    return InferenceError(
        f"The last {count} attempts failed ({last.reason or last.outcome}), so the others were not made. "
        "What was finished is kept: mend the cause, and the same command goes on."
    )


def results_in(directory: Path) -> dict[str, list[Result]]:
    """The results of each way of a stored evaluation, with what was asked.

    Raises ConfigError for another kind of directory.
    """
    run = RunDirectory.read(directory)
    config = run.config()
    require_evaluation(config, directory)
    with EpisodeStore.open(run.store_path, read_only=True) as store:
        facts = TaskFacts(instances=store.value(_INSTANCES, {}))
        return {
            way: facts.described(
                [replace(result_of(each), asked=asked_of(each.task)) for each in newest_episodes(store, way)]
            )
            for way in config["ways"]
            if way in store.phases()
        }
