"""Learning from preferences: better and worse answers in, a run directory with a better model out.

    rows of a file ──┐                       ┌─► how likely the reference finds them: once, kept in the run
    attempts of ─────┴─► Examples: rows of ──┤
    a stored run         one group, +1, -1   └─► updates on whole groups: PairLoss, or KTOLoss

The loop, resume and everything else that a run owes its user is `rllm.trainer.supervised`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllm.config.preference import DpoConfig, PreferenceDataConfig
from rllm.errors import ConfigError
from rllm.store.episodes import TRAIN_PHASE, EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.tracking.base import Tracker
from rllm.trainer.chat_rows import ChatEncoder, Problems, fetcher_for, with_fetched_images
from rllm.trainer.examples import Example, ExampleSets, row_limit, split_heldout
from rllm.trainer.preference_rows import PreferenceRow, comparisons_of, read_comparisons
from rllm.trainer.samples import trajectory_rows
from rllm.trainer.stored_attempts import StoredAttempt, at_most, pairs_of, plays_of
from rllm.trainer.supervised import SupervisedTrainer
from rllm.trainer.traces import (
    Trace,
    model_of_run,
    require_same_tokens,
    task_key,
    to_learn,
    tokenizer_directories,
)
from rllm.types.episode import Trajectory

if TYPE_CHECKING:
    from rllm.trainer.policies import PolicyModel
    from rllm.trainer.preference_job import PreferenceJob

Rows = str | Path | Iterable[Mapping[str, Any]]
"""A JSONL file, or rows as dicts."""
ROLE = "preference"
"""The role of the rows of a dataset."""


class AgentDPOTrainer(SupervisedTrainer[DpoConfig]):
    """Trains a model on preferences, or on what succeeded and what failed in a stored run."""

    kind = "dpo"
    config_class = DpoConfig

    def __init__(
        self,
        config: DpoConfig | Mapping[str, Any] | str | Path | Iterable[str] | None = None,
        train_dataset: Rows | None = None,
        val_dataset: Rows | None = None,
        output: str | Path = "runs/latest",
        tracker: Tracker | None = None,
    ) -> None:
        """
        `train_dataset`: a JSONL file or dicts, `{"prompt": ..., "chosen": ..., "rejected": ...}`, for kto
        `{"prompt": ..., "completion": ..., "label": True}`; `data.dataset` or `data.run` where None.
        `val_dataset`: the same for what is held out; a share of the examples where None. `output`: the run
        directory; a run that is there goes on.
        """
        self._train: Rows | None = train_dataset
        base = {"data": {"heldout_fraction": 0.0}} if val_dataset is not None else {}
        super().__init__(config, output=output, tracker=tracker, base=base)
        data = self.config.data
        self._train = _one_of("train_dataset", train_dataset, "data.dataset", data.dataset)
        self._val = _one_of("val_dataset", val_dataset, "data.val_dataset", data.val_dataset)
        if self._train is None and not data.run:
            raise ConfigError(
                "There is nothing to train on; give a dataset, or a run whose attempts are compared "
                "(`data.dataset`, `data.run`)."
            )
        if self._train is not None and data.run:
            raise ConfigError(f"`train_dataset` is given, and `data.run` is {data.run!r}; give one of them.")

    def default_model(self) -> str:
        from_run = self.config.data.run and self._train is None
        return str(model_of_run(self.config.data)) if from_run else super().default_model()

    def make_job(self, policy: "PolicyModel") -> "PreferenceJob":
        from rllm.trainer.preference_job import PreferenceJob

        return PreferenceJob(policy, self.config, self._dataset(policy))

    @property
    def _is_paired(self) -> bool:
        return self.config.preference.loss != "kto"

    def _dataset(self, policy: "PolicyModel") -> ExampleSets:
        data = self.config.data
        limit = row_limit(data.max_length, policy.loaded_model.max_positions)
        counts: dict[str, int] = {}
        if data.run:
            examples, counts = _examples_of_run(data, policy, is_paired=self._is_paired)
        else:
            assert self._train is not None, "the constructor checked it"
            examples = self._examples_of(self._train, policy)
        train, num_dropped = _fitting(examples, limit, data)
        if self._val is not None:
            heldout, more = _fitting(self._examples_of(self._val, policy), limit, data)
            return ExampleSets(
                train=train, heldout=heldout, is_heldout=True, num_dropped=num_dropped + more, counts=counts
            )
        train, heldout = split_heldout(train, data.heldout_fraction, self.config.seed)
        return ExampleSets(
            train=train,
            heldout=heldout or train,
            is_heldout=bool(heldout),
            num_dropped=num_dropped,
            counts=counts,
        )

    def _examples_of(self, source: Rows, policy: "PolicyModel") -> list[Example]:
        """Raises ConfigError naming the rows that cannot be learned from."""
        encoder = ChatEncoder(
            policy.renderer,
            policy.loaded_model.end_token_ids,
            policy.end_token_id,
            policy.loaded_model.tokenizer.begin_token_id,
        )
        comparisons = (
            read_comparisons(Path(source), is_paired=self._is_paired)
            if isinstance(source, str | Path)
            else comparisons_of(source, is_paired=self._is_paired)
        )
        hosts = self.config.data.allowed_media_domains
        fetcher = fetcher_for(hosts, policy.renderer, self.image_album)
        chats = iter(with_fetched_images([chat for each in comparisons for _, chat in each.answers], fetcher))
        examples: list[Example] = []
        problems = Problems()
        for comparison in comparisons:
            answers = tuple((sign, next(chats)) for sign, _ in comparison.answers)
            comparison = replace(comparison, answers=answers)
            try:
                examples.append(_example_of_row(comparison, encoder))
            except ConfigError as error:
                problems.note(comparison.where, error)
        problems.raise_any()
        return examples


# ---- where examples come from ------------------------------------------------------------------------------


def _example_of_row(comparison: PreferenceRow, encoder: ChatEncoder) -> Example:
    """Raises ConfigError, without the row, for an answer that cannot be learned from."""
    sides = [(sign, Trajectory(name=ROLE, steps=encoder.steps(chat))) for sign, chat in comparison.answers]
    example = _example(comparison.where, comparison.where, sides)
    ids = {tuple(row.token_ids_T.tolist()) for row in example.rows}
    if len(ids) < len(example.rows):
        raise ConfigError("both answers are the same tokens to this model; leave the row out.")
    first = example.rows[0]
    prompt_T = first.token_ids_T[: first.trainable_T.argmax()]
    return replace(example, task=prompt_T.tobytes().hex())  # rows of one prompt are held out together


def _examples_of_run(
    data: PreferenceDataConfig, policy: "PolicyModel", *, is_paired: bool
) -> tuple[list[Example], dict[str, int]]:
    from rllm.models.tokenizer import HuggingFaceTokenizer

    run = RunDirectory.read(Path(data.run))
    model_directories = tokenizer_directories(data)
    with EpisodeStore.open(run.store_path, read_only=True) as store:
        attempts, counts = plays_of(store.episodes(TRAIN_PHASE), task_key, data)
    if is_paired:
        comparisons = [((1, better), (-1, worse)) for better, worse in pairs_of(attempts, data, counts)]
    else:
        attempts_taken = at_most(attempts, data.max_per_task, counts)
        comparisons = [((1 if each.success else -1, each),) for each in attempts_taken]
    if not comparisons:
        raise ConfigError(
            f"Nothing in {data.run} can be compared: {counts.successes} successes (paid `data.min_reward` = "
            f"{data.min_reward:g} or more), {counts.failures} failures, and {counts.tasks_with_both} of "
            f"{counts.tasks} tasks with both after one prompt. Set `data.min_reward` between what was paid "
            "for good and for bad attempts, or take a run with more attempts a task."
        )
    examples = [_example_of_attempts(number, sides) for number, sides in enumerate(comparisons)]
    if not model_directories:
        raise ConfigError(
            f"{data.run} has no model directory any more, so nobody knows which tokenizer its ids belong to; "
            "put the model back where its `config.json` says."
        )
    traces = [
        Trace(where=each.where, task=each.task, reward=0.0, trajectory=each.trajectory)
        for sides in comparisons
        for _, each in sides
    ]
    theirs = HuggingFaceTokenizer(model_directories[0])
    require_same_tokens(traces, theirs, policy.renderer.tokenizer, data.run)
    return examples, asdict(counts)


def _example_of_attempts(number: int, sides: Sequence[tuple[int, StoredAttempt]]) -> Example:
    to_compare = [
        (
            sign,
            Trajectory(
                name=each.trajectory.name,
                steps=[to_learn(step, each.where) for step in each.trajectory.steps],
            ),
        )
        for sign, each in sides
    ]
    first = sides[0][1]
    return replace(_example(f"comparison {number}", first.where, to_compare), task=first.task)


def _example(group: str, where: str, sides: Sequence[tuple[int, Trajectory]]) -> Example:
    """`group` names the comparison among all of the run."""
    rows = [
        row
        for side, (sign, trajectory) in enumerate(sides)
        for row in trajectory_rows(trajectory, group, side, 0, float(sign))
        if row.num_trainable
    ]
    return Example(where=where, task=where, rows=rows)


def _fitting(
    examples: Sequence[Example], limit: int, data: PreferenceDataConfig
) -> tuple[list[Example], int]:
    """Examples whose rows have at most `limit` tokens, and how many are left out."""
    long = [each for each in examples if each.longest > limit]
    if long and data.max_length_policy == "refuse":
        raise ConfigError(
            f"{len(long)} of {len(examples)} examples have a row of more than {limit} tokens (first "
            f"{long[0].where}; the longest {max(each.longest for each in long)}); raise `data.max_length` as "
            "far as the model can read, or set `data.max_length_policy` to drop."
        )
    fitting = [each for each in examples if each.longest <= limit]
    if not fitting:
        raise ConfigError(f"No example fits into {limit} tokens; raise `data.max_length`.")
    return fitting, len(long)


def _one_of(name: str, rows: Rows | None, key: str, configured_name: str) -> Rows | None:
    if rows is not None and configured_name:
        raise ConfigError(f"`{name}` is given, and `{key}` is {configured_name!r}; give one of them.")
    return rows if rows is not None else configured_name or None
