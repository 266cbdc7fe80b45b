"""Seconds per GRPO step, beside TRL's GRPOTrainer: same model, prompts, groups, batch and lengths, in turn.

    this process: AgentTrainer, the loop of `rllm train` ─step─► Baton ─`run N`─► trl_side.py, in .venv-trl
                                                        ◄─ seconds of its N steps ─┘

    python benchmarks/train_step.py [--model builtin:small | DIR] [--threads N] [--quick] [--json]
        [--trl-python PATH | --alone | --trees]

`--trees` times updates alone: rows as trees, each beginning computed once, beside the same rows apart, in
turn; CPU seconds, medians.

Both sides sample every attempt, reward it, and update the weights with all rows, in `--updates` equal
shares of the batch (2 is rLLM's default); rewards are a hash of the text, so no group ties and no row is
skipped. rLLM's step is the whole one: rollout through agent and environment, episodes written to the store,
advantages, updates, publish, canary, metrics. TRL saves and logs nothing. What differs by design: rLLM
computes the prompt that a group shares once, forward and backward, and takes the log-probabilities of the
rollout as the old ones; TRL computes old ones anew where there is more than one update.

TRL is installed into `.venv-trl` at the root of the repository on first use, which takes minutes.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from trl_side import cpu_seconds, reward_of

from rllm.agents.base import BaseAgent
from rllm.algorithms.losses import PolicyLoss
from rllm.config.optimizer import OptimizerConfig
from rllm.environments.base import BaseEnv
from rllm.models.builtin import create_model
from rllm.models.directory import load_model
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.rendering.chat import ChatRenderer
from rllm.trainer import AgentTrainer
from rllm.trainer.backends.torch import TorchBackend
from rllm.types.episode import Action, Step, Trajectory
from rllm.types.messages import Message
from rllm.types.sample import NOT_SAMPLED, TrainingSample

ROOT = Path(__file__).resolve().parent.parent
TRL = "trl==1.16.0"
LEARNING_RATE = 5e-4
THEIRS = (("trl_s", 3), ("ratio", 2), ("ratio_cpu", 2))
"""Figures of TRL, with their decimals; left out with `--alone`."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Setting:
    """The shape of a step."""

    name: str
    prompt: int
    """Tokens of every prompt."""
    completion: int
    """Most tokens of a completion; a model with random weights seldom stops earlier."""
    tasks_per_step: int
    group_size: int = 8
    target: float
    """How many times faster than TRL a step is to be."""


SETTINGS = (
    Setting(name="128 short completions", prompt=32, completion=8, tasks_per_step=16, target=3.0),
    Setting(name="prompt 4 × completion", prompt=192, completion=48, tasks_per_step=4, target=5.0),
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Shape:
    """Rows of an update, and how many times faster than apart they are to be as trees."""

    name: str
    paths: tuple[tuple[int, ...], ...]
    """Of each row, how many tokens each part of its path has, the last of them trained; paths with the same
    beginning share it."""
    target: float


SHAPES = (
    Shape(name="16 attempts, prompt 4 × answer", paths=((384, 96),) * 16, target=3.5),
    Shape(
        name="a row for each of 20 turns",
        paths=tuple((48,) * (turn + 1) for turn in range(1, 21)),
        target=5.0,
    ),
    Shape(name="16 rows that share nothing", paths=((480,),) * 16, target=1.0),
)


class HashEnv(BaseEnv):
    """One question, one answer, and a reward that is a hash of the answer."""

    def __init__(self, question: str) -> None:
        self.question = question

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return self.question, {}

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return "", reward_of(action), True, {}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "HashEnv":
        return HashEnv(info["question"])


class EchoAgent(BaseAgent):
    """The question goes in as a user message; the answer is the action."""

    def __init__(self) -> None:
        self.reset()

    @property
    def chat_completions(self) -> list[Message]:
        return self._messages

    @property
    def trajectory(self) -> Trajectory:
        return self._trajectory

    def reset(self) -> None:
        self._messages: list[Message] = []
        self._trajectory = Trajectory()

    def update_from_env(
        self, observation: str, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        if not done:
            self._messages.append({"role": "user", "content": observation})

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        self._messages.append({"role": "assistant", "content": response})
        self._trajectory.steps.append(Step(chat_completions=list(self._messages), model_response=response))
        return Action(action=response)


@dataclass(slots=True)
class Spent:
    """Seconds of one turn of one side."""

    wall: float
    cpu: float


@dataclass(slots=True)
class Baton:
    """A tracker that hands over to TRL after every `turn_steps` steps, and keeps the times of both."""

    trl: "TrlSide | None"
    turn_steps: int
    warmup_steps: int
    rllm_turns: list[Spent] = field(default_factory=list[Spent])
    trl_turns: list[Spent] = field(default_factory=list[Spent])
    rollout_s: list[float] = field(default_factory=list[float])
    _wall: float = 0.0
    _cpu: float = 0.0

    def advance(self, done: int, total: int) -> None: ...

    def begin(self, phase: str) -> None: ...

    def log(self, step: int, phase: str, metrics: Mapping[str, float | int | str]) -> None:
        if phase != "train":
            return
        done = step + 1 - self.warmup_steps
        if done > 0:
            self.rollout_s.append(float(metrics["rollout_s"]))
        if done > 0 and done % self.turn_steps == 0:
            self.rllm_turns.append(Spent(time.perf_counter() - self._wall, cpu_seconds() - self._cpu))
            if self.trl is not None:
                self.trl_turns.append(self.trl.run(self.turn_steps))
        elif done == 0 and self.trl is not None:
            self.trl.run(self.warmup_steps)
        if done >= 0 and done % self.turn_steps == 0:
            self._wall, self._cpu = time.perf_counter(), cpu_seconds()

    def close(self) -> None: ...


class TrlSide:
    """The process of `trl_side.py`, or of another script that is spoken to in the same way."""

    def __init__(self, python: Path, settings: dict[str, Any], script: str = "trl_side.py") -> None:
        self.process = subprocess.Popen(
            [python, Path(__file__).with_name(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._say(json.dumps(settings))
        self.prompt_lengths: list[int] = self._hear()["ready"]

    def run(self, num_steps: int) -> Spent:
        self._say(f"run {num_steps}")
        answer = self._hear()
        self.completion_length = answer["tokens"]
        return Spent(answer["wall"], answer["cpu"])

    def close(self) -> None:
        self._say("stop")
        self.process.communicate(timeout=60)

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            command = " ".join(map(str, self.process.args))
            raise RuntimeError(
                f"The TRL process ended with exit code {self.process.wait()}; run `{command}` by hand "
                "with the same settings to see why."
            )
        return json.loads(line)


def tasks_of(setting: Setting, count: int, renderer: ChatRenderer) -> list[dict[str, Any]]:
    """Distinct questions whose prompts have exactly `setting.prompt` tokens.

    Digits are one token each in most vocabularies; where they are not, that is said.
    """
    template = len(renderer.render([{"role": "user", "content": "7"}])) - 1
    num_digits = setting.prompt - template
    tasks = []
    for number in range(count):
        question = (f"{number:05d}" * num_digits)[:num_digits]
        num_tokens = len(renderer.render([{"role": "user", "content": question}]))
        if num_tokens != setting.prompt:
            raise RuntimeError(
                f"A prompt has {num_tokens} tokens; {setting.prompt} are needed. This model joins "
                "digits; choose one that does not."
            )
        tasks.append({"task_id": f"{number:05d}", "question": question})
    return tasks


def compare(setting: Setting, model: Path, scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Both sides in turn; seconds per step are medians over the turns."""
    renderer = ChatRenderer(HuggingFaceTokenizer(model))
    turns, turn_steps, warmup = (2, 3, 2) if options.quick else (options.turns, options.turn_steps, 3)
    num_steps = warmup + turns * turn_steps
    tasks = tasks_of(setting, setting.tasks_per_step * num_steps, renderer)
    prompts = [
        renderer.tokenizer.apply_template(
            [{"role": "user", "content": task["question"]}], add_generation_prompt=True
        )
        for task in tasks
    ]
    trl: TrlSide | None = None
    if not options.alone:
        trl = TrlSide(
            options.trl_python,
            {
                "model": str(model),
                "prompts": prompts,
                "threads": options.threads,
                "tasks_per_step": setting.tasks_per_step,
                "group_size": setting.group_size,
                "completion": setting.completion,
                "updates_per_step": options.updates,
                "learning_rate": LEARNING_RATE,
                "scratch": str(scratch / "trl"),
            },
        )
        if trl.prompt_lengths != [setting.prompt]:
            raise RuntimeError(
                f"Prompts have {trl.prompt_lengths} tokens at TRL; {setting.prompt} were asked for."
            )
    baton = Baton(trl, turn_steps, warmup)
    trainer = AgentTrainer(
        config_of(setting, model, num_steps, options),
        tasks,
        tasks[:1],
        agent_class=EchoAgent,
        env_class=HashEnv,
        output=scratch / "run",
        tracker=baton,
    )
    trainer.train()
    if trl is None:
        return {**asdict(setting), **own_summary_of(baton)}
    trl.close()
    return {**asdict(setting), "completion_mean_trl": trl.completion_length, **summary_of(baton)}


def config_of(setting: Setting, model: Path, num_steps: int, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "steps": num_steps,
        "threads": options.threads,
        "model": {"path": str(model)},
        "inference": {
            "num_slots": setting.tasks_per_step * setting.group_size,
            "max_context": setting.prompt + setting.completion,
        },
        "rollout": {
            "tasks_per_step": setting.tasks_per_step,
            "group_size": setting.group_size,
            "max_turns": 1,
            "max_tokens_per_turn": setting.completion,
        },
        "algorithm": {"updates_per_step": options.updates},
        "optimizer": {"learning_rate": LEARNING_RATE, "final_lr_fraction": 1.0},
        "warm_start": {"steps": 0},
        "evaluation": {"num_tasks": 1},
        "checkpoint": {"every_steps": 10 * num_steps},
    }


def own_summary_of(baton: Baton) -> dict[str, Any]:
    steps = baton.turn_steps
    return {
        "rllm_s": statistics.median(ours.wall for ours in baton.rllm_turns) / steps,
        "rllm_cpu_s": statistics.median(ours.cpu for ours in baton.rllm_turns) / steps,
        "rollout_s": statistics.median(baton.rollout_s),
    }


def summary_of(baton: Baton) -> dict[str, Any]:
    pairs = list(zip(baton.rllm_turns, baton.trl_turns, strict=True))
    steps = baton.turn_steps
    return {
        **own_summary_of(baton),
        "trl_s": statistics.median(theirs.wall for _, theirs in pairs) / steps,
        "trl_cpu_s": statistics.median(theirs.cpu for _, theirs in pairs) / steps,
        "ratio": statistics.median(theirs.wall / ours.wall for ours, theirs in pairs),
        "ratio_cpu": statistics.median(theirs.cpu / ours.cpu for ours, theirs in pairs),
        "ratios": [round(theirs.wall / ours.wall, 2) for ours, theirs in pairs],
    }


def rows_of(shape: Shape, vocab_size: int) -> list[TrainingSample]:
    """The last part of each path is its own where a path of that many parts is there more than once; where
    all have different numbers of parts, each goes on where the one before it ends."""
    rng = np.random.default_rng(0)
    common = rng.integers(7, vocab_size, max(map(sum, shape.paths)))
    is_chain = len({len(path) for path in shape.paths}) == len(shape.paths)
    samples: list[TrainingSample] = []
    for number, path in enumerate(shape.paths):
        length, own = sum(path), path[-1]
        ids_T = common[:length].copy()
        if not is_chain:
            ids_T[length - own :] = rng.integers(7, vocab_size, own)
        is_trained_T = np.arange(length) >= max(1, length - own)
        samples.append(
            TrainingSample(
                token_ids_T=ids_T,
                policy_versions_T=np.where(is_trained_T, 0, NOT_SAMPLED),
                logprobs_T=np.where(is_trained_T, -6.0, 0.0).astype(np.float32),
                advantages_T=np.where(is_trained_T, (-1.0) ** number, 0.0).astype(np.float32),
                group_key=("t", "agent"),
                order_key=("t", number, 0, 0),
            )
        )
    return samples


def compare_trees(shape: Shape, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    loaded = load_model(model)
    samples = rows_of(shape, loaded.model.vocab_size)
    learners = [
        TorchBackend(
            loaded.model, publish=lambda version: None, config=OptimizerConfig(), share_prefixes=is_tree
        )
        for is_tree in (True, False)
    ]
    spent: list[tuple[float, float]] = []
    for turn in range(5 if options.quick else 9):
        times = [0.0, 0.0]
        for which in (0, 1) if turn % 2 else (1, 0):
            begin = time.process_time()
            learners[which].update(samples, PolicyLoss(), 0.0)
            times[which] = time.process_time() - begin
        spent.append((times[0], times[1]))
    tree_s, apart_s = (statistics.median(column) for column in zip(*spent[1:], strict=True))
    return {
        "name": shape.name,
        "tree_cpu_s": tree_s,
        "apart_cpu_s": apart_s,
        "ratio": statistics.median(apart / tree for tree, apart in spent[1:]),
        "target": shape.target,
    }


def show_trees(rows: Sequence[dict[str, Any]], title: str) -> None:
    table = Table("rows", "trees, CPU s", "apart, CPU s", "×", "target", title=title)
    for row in rows:
        figures = (row[name] for name in ("tree_cpu_s", "apart_cpu_s", "ratio", "target"))
        table.add_row(row["name"], *(f"{each:.2f}" for each in figures))
    Console(width=130).print(table)


def trl_python() -> Path:
    """Python of `.venv-trl`, which is made when it is not there."""
    directory = ROOT / ".venv-trl"
    python, stamp = directory / "bin" / "python", directory / ".installed"
    if not stamp.exists():
        print(f"Installing {TRL} into {directory} …", file=sys.stderr)
        shutil.rmtree(directory, ignore_errors=True)
        venv.create(directory, with_pip=True)
        pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        constraints = ["-c", ROOT / "constraints.txt"]
        torch = next(
            line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith("torch==")
        )
        # torch first and alone, as in the Makefile: its build is then settled.
        subprocess.run([*pip, *constraints, torch], check=True)
        subprocess.run([*pip, *constraints, TRL], check=True)
        stamp.touch()
    return python


def show(rows: Sequence[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    for name in (
        "step",
        "rows × (prompt + completion)",
        "rLLM s",
        "of it rollout",
        "TRL s",
        "× wall",
        "× CPU",
        "target",
    ):
        table.add_column(name, justify="left" if name == "step" else "right")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['tasks_per_step'] * row['group_size']} × ({row['prompt']} + {row['completion']})",
            f"{row['rllm_s']:.3f}",
            f"{row['rollout_s']:.3f}",
            *(f"{row[name]:.{digits}f}" if name in row else "–" for name, digits in THEIRS),
            f"{row['target']:.1f}",
        )
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin:tiny", help="builtin:NAME or a model directory")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--updates", type=int, default=2, help="optimizer updates per step, on shares of its groups"
    )
    parser.add_argument("--turns", type=int, default=5, help="turns of each side")
    parser.add_argument("--turn-steps", type=int, default=5, help="steps in a turn")
    parser.add_argument("--quick", action="store_true", help="two turns of three steps")
    parser.add_argument("--alone", action="store_true", help="without TRL")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--trl-python", type=Path, help="a Python that has TRL; without it, .venv-trl is made"
    )
    parser.add_argument("--trees", action="store_true", help="updates alone: rows as trees beside rows apart")
    options = parser.parse_args()
    if not options.alone and not options.trees:
        options.trl_python = options.trl_python or trl_python()
    rows: list[dict[str, Any]] = []
    for setting in SHAPES if options.trees else SETTINGS:
        with tempfile.TemporaryDirectory() as scratch:
            model = Path(options.model)
            if options.model.startswith("builtin:"):
                model = Path(scratch) / "model"
                create_model(model, options.model.removeprefix("builtin:"))
            if isinstance(setting, Shape):
                rows.append(compare_trees(setting, model, options))
            else:
                rows.append(compare(setting, model, Path(scratch), options))
    if options.json:
        print(json.dumps({"model": options.model, "threads": options.threads, "rows": rows}, indent=2))
    elif options.trees:
        show_trees(rows, f"{options.model}, {options.threads} thread(s); medians of updates, in turn")
    else:
        show(
            rows,
            f"{options.model}, {options.threads} thread(s), {options.updates} update(s) a step; "
            "medians per step",
        )


if __name__ == "__main__":
    main()
