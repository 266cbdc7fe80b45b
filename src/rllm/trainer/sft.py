"""Supervised fine-tuning: conversations, or what a stored run did well, in; a model that answers so out.

    JSONL, list of dicts ──ChatEncoder──► Steps ──┐
    store of a run ──successful_traces──► Steps ──┴─ trajectory_rows ──► rows ──► Epochs ──► ImitationLoss

The labels are the tokens that the model would have had to sample, end tokens included, and nothing else.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllm.config.supervised import ChatDataConfig, SftConfig
from rllm.errors import ConfigError
from rllm.tracking.base import Tracker
from rllm.trainer.chat_rows import (
    Chat,
    ChatEncoder,
    chats_of,
    encode_all,
    fetcher_for,
    read_chats,
    with_fetched_images,
)
from rllm.trainer.epochs import Epochs
from rllm.trainer.examples import (
    Example,
    ExampleSets,
    largest_examples,
    row_limit,
    rows_sha256,
    split_heldout,
)
from rllm.trainer.samples import trajectory_rows
from rllm.trainer.supervised import SupervisedJob, SupervisedTrainer
from rllm.trainer.traces import (
    Trace,
    model_of_run,
    require_same_tokens,
    successful_traces,
    tokenizer_directories,
)
from rllm.types.episode import Trajectory
from rllm.types.sample import TrainingSample

if TYPE_CHECKING:
    from rllm.trainer.policies import PolicyModel

Rows = str | Path | Iterable[Chat | Mapping[str, Any]]
"""A JSONL file, or conversations as dicts."""


class AgentSFTTrainer(SupervisedTrainer[SftConfig]):
    """Fine-tunes a model on conversations, or on the successful episodes of a stored run."""

    kind = "sft"
    config_class = SftConfig

    def __init__(
        self,
        config: SftConfig | Mapping[str, Any] | str | Path | Iterable[str] | None = None,
        train_dataset: Rows | None = None,
        val_dataset: Rows | None = None,
        output: str | Path = "runs/latest",
        tracker: Tracker | None = None,
    ) -> None:
        """
        `train_dataset`: a JSONL file or dicts, `{"messages": [...], "tools": [...]}` or `{"prompt": ...,
        "completion": ...}`; `data.dataset` or `data.run` where None. `val_dataset`: the same for what is held
        out; a share of the examples where None. `output`: the run directory; a run that is there goes on.
        """
        base = {"data": {"heldout_fraction": 0.0}} if val_dataset is not None else {}
        super().__init__(config, output=output, tracker=tracker, base=base)
        data = self.config.data
        self._train = _one_of("train_dataset", train_dataset, data.dataset)
        self._val = _one_of("val_dataset", val_dataset, data.val_dataset)
        if self._train is None and not data.run:
            raise ConfigError(
                "There is nothing to train on; give a dataset, or a run whose successes are learned "
                "(`data.dataset`, `data.run`)."
            )
        if self._train is not None and data.run:
            raise ConfigError(f"`train_dataset` is given, and `data.run` is {data.run!r}; give one of them.")

    def default_model(self) -> str:
        return str(model_of_run(self.config.data)) if self.config.data.run else super().default_model()

    def make_job(self, policy: "PolicyModel") -> "SftJob":
        return SftJob(policy, self.config, self._dataset(policy))

    def _dataset(self, policy: "PolicyModel") -> ExampleSets:
        data = self.config.data
        limit = row_limit(data.max_length, policy.loaded_model.max_positions)
        dataset = ExampleSets(train=[], heldout=[], is_heldout=True)
        if data.run:
            examples = _examples_of_run(data, policy)
        else:
            assert self._train is not None, "the constructor checked it"
            examples = self._examples_of(self._train, policy)
        examples = _fitting(examples, limit, data, dataset)
        if self._val is not None:
            heldout = _fitting(self._examples_of(self._val, policy), limit, data, dataset)
            return replace(dataset, train=examples, heldout=heldout)
        train, heldout = split_heldout(examples, data.heldout_fraction, self.config.seed)
        return replace(dataset, train=train, heldout=heldout or train, is_heldout=bool(heldout))

    def _examples_of(self, source: Rows, policy: "PolicyModel") -> list[Example]:
        chats = read_chats(Path(source)) if isinstance(source, str | Path) else chats_of(source)
        hosts = self.config.data.allowed_media_domains
        fetcher = fetcher_for(hosts, policy.renderer, self.image_album)
        return _examples_of_chats(with_fetched_images(chats, fetcher), _encoder_of(policy))


class SftJob(SupervisedJob):
    """Imitation of rows, in the order of `Epochs`."""

    def __init__(self, policy: "PolicyModel", config: SftConfig, dataset: ExampleSets) -> None:
        from rllm.algorithms.losses import ImitationLoss

        super().__init__(policy)
        self.config = config
        self.dataset = dataset
        self.epochs = Epochs(len(dataset.train), config)
        self.steps = self.epochs.num_steps
        self.loss = ImitationLoss(aggregation=config.aggregation)
        examples = dataset.heldout[: config.evaluation.num_rows]
        self.measured_rows = [row for example in examples for row in example.rows]

    def samples(self, step: int) -> list[TrainingSample]:
        return [row for index in self.epochs.batch(step) for row in self.dataset.train[index].rows]

    def largest_update(self) -> list[TrainingSample]:
        return largest_examples(self.dataset.train, self.config.batch_size)

    def evaluate(self) -> dict[str, float]:
        """Loss in nats per labelled token, and the share of them that are the model's first choice."""
        from rllm.trainer.backends.torch_measure import measure_rows

        metrics = measure_rows(
            self.policy.loaded_model.model,
            self.measured_rows,
            micro_batch_tokens=self.config.optimizer.micro_batch_tokens,
            logits_mb=self.config.optimizer.logits_mb,
        )
        return {"loss": metrics.loss, "token_accuracy": metrics.token_accuracy}

    def plan(self) -> dict[str, int | float | str]:
        rows = [row for example in self.dataset.train for row in example.rows]
        num_tokens, num_trained = sum(row.num_tokens for row in rows), sum(row.num_trainable for row in rows)
        share = self.config.batch_size / len(self.dataset.train)
        return {
            "examples": len(self.dataset.train),
            "heldout_examples": len(self.dataset.heldout) if self.dataset.is_heldout else 0,
            "rows": len(rows),
            "tokens": num_tokens,
            "labelled_tokens": num_trained,
            "longest_row": max(row.num_tokens for row in rows),
            "dropped_examples": self.dataset.num_dropped,
            "truncated_examples": self.dataset.counts.get("truncated", 0),
            "optimizer_updates": self.steps,
            "updates_per_epoch": self.epochs.steps_per_epoch,
            "tokens_per_update": round(num_tokens * min(1.0, share)),
            "labelled_tokens_per_update": round(num_trained * min(1.0, share)),
        }

    def identity(self) -> dict[str, Any]:
        return {"rows_sha256": rows_sha256(self.dataset.all())}

    def facts(self) -> dict[str, Any]:
        return {
            "examples": len(self.dataset.train),
            "measured_on": f"{len(self.dataset.heldout[: self.config.evaluation.num_rows])} "
            + ("held-out examples" if self.dataset.is_heldout else "examples that were trained on"),
            "dropped_examples": self.dataset.num_dropped,
            "truncated_examples": self.dataset.counts.get("truncated", 0),
        }


# ---- where examples come from ------------------------------------------------------------------------------


def _encoder_of(policy: "PolicyModel") -> ChatEncoder:
    model = policy.loaded_model
    return ChatEncoder(
        policy.renderer, model.end_token_ids, policy.end_token_id, model.tokenizer.begin_token_id
    )


def _examples_of_chats(chats: Sequence[Chat], encoder: ChatEncoder) -> list[Example]:
    def encode(chat: Chat) -> Example:
        trajectory = Trajectory(name="assistant", steps=encoder.steps(chat))
        rows = [row for row in trajectory_rows(trajectory, chat.where, 0, 0, 1.0) if row.num_trainable]
        example = Example(where=chat.where, task="", rows=rows)
        return replace(example, task=rows_sha256([example]))  # the same conversation twice is held out twice

    return encode_all(chats, encode)


def _examples_of_run(data: ChatDataConfig, policy: "PolicyModel") -> list[Example]:
    from rllm.models.tokenizer import HuggingFaceTokenizer

    traces = successful_traces(data)
    directories = tokenizer_directories(data)
    if not directories:
        raise ConfigError(
            f"{data.run} has no model directory any more, so nobody knows which tokenizer its ids belong to; "
            "put the model back where its `config.json` says."
        )
    require_same_tokens(traces, HuggingFaceTokenizer(directories[0]), policy.renderer.tokenizer, data.run)
    return [_example_of(trace, number) for number, trace in enumerate(traces)]


def _example_of(trace: Trace, number: int) -> Example:
    rows = trajectory_rows(trace.trajectory, trace.task, number, 0, 1.0)
    return Example(where=trace.where, task=trace.task, rows=[row for row in rows if row.num_trainable])


def _fitting(
    examples: Sequence[Example], limit: int, data: ChatDataConfig, dataset: ExampleSets
) -> list[Example]:
    """Examples whose rows have at most `limit` tokens, by the policy for longer ones; counts what it does."""
    long = [each for each in examples if each.longest > limit]
    if long and data.max_length_policy == "refuse":
        raise ConfigError(
            f"{len(long)} of {len(examples)} examples have more than {limit} tokens (first {long[0].where}; "
            f"the longest {max(each.longest for each in long)}); raise `data.max_length` as far as the model "
            "can read, or set `data.max_length_policy` to drop or truncate."
        )
    fitting: list[Example] = []
    for example in examples:
        rows = [_cut(row, limit) for row in example.rows] if data.max_length_policy == "truncate" else []
        if example.longest <= limit:
            fitting.append(example)
        elif rows_with_labels := [row for row in rows if row.num_trainable]:
            dataset.counts["truncated"] = dataset.counts.get("truncated", 0) + 1
            fitting.append(replace(example, rows=rows_with_labels))
        else:
            dataset.num_dropped += 1
    if not fitting:
        raise ConfigError(f"No example fits into {limit} tokens; raise `data.max_length`.")
    return fitting


def _cut(row: TrainingSample, limit: int) -> TrainingSample:
    return replace(
        row,
        token_ids_T=row.token_ids_T[:limit],
        policy_versions_T=row.policy_versions_T[:limit],
        logprobs_T=row.logprobs_T[:limit],
        advantages_T=row.advantages_T[:limit],
    )


def _one_of(name: str, rows: Rows | None, configured_name: str) -> Rows | None:
    if rows is not None and configured_name:
        raise ConfigError(
            f"`{name}` is given, and `data.{name.replace('train_', '')}` is {configured_name!r}; give one."
        )
    if rows is None or isinstance(rows, str | Path):
        return rows or configured_name or None
    return list(rows)  # it is gone through again when the run goes on
