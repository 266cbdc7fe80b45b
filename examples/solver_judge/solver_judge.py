"""Two models learn together: one solves countdown problems, the other judges which of two answers is right.

    imitation of noisy experts ──► reinforcement: problem ──► 2 answers of the solver ──► 2 picks of the judge
          (both roles)                    paid for being right ◄──┘     paid for beating a coin ◄──┘

python solver_judge.py             both from random weights, on a CPU: runs/solver_judge
python measure.py                  what each of them learned, and the picture
"""

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rllm import AgentTrainer, Episode, Step, Trajectory
from rllm.environments.countdown import countdown_tasks, problem_of
from rllm.rewards.countdown_reward import compute_score
from rllm.workflows import SolverJudgeWorkflow

OPERATORS = "+-"
PROBLEMS: dict[str, Any] = {"num_numbers": 2, "max_number": 50, "operators": OPERATORS}
LETTERS = "AB"
FONDNESS = 0.7
"""How often the judge that is imitated picks the sum, whatever the target: who imitates it does so always."""
CONFIG: dict[str, Any] = {
    "steps": 160,
    "policies": {
        "solver": {"path": "builtin:tiny", "learning_rate": 1e-4},
        "judge": {"path": "builtin:tiny", "learning_rate": 1e-3},
    },
    "roles": {"solver": {"max_tokens": 8}, "judge": {"max_tokens": 2, "estimator": "reinforce"}},
    "warm_start": {"steps": 55, "episodes_per_step": 256, "learning_rate": 1e-2, "noise": 0.5},
    "rollout": {"tasks_per_step": 128, "group_size": 2},
    "algorithm": {"clip_high": 0.28},
    "optimizer": {"name": "muon"},
    "inference": {"max_context": 64},
    "evaluation": {"num_tasks": 512},
    "checkpoint": {"every_steps": 20},
}


def to_solver(task: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": problem_of(task).text}]


def to_judge(task: dict[str, Any], answers: list[str]) -> list[dict[str, Any]]:
    lines = [f"{letter}: {answer}" for letter, answer in zip(LETTERS, answers, strict=True)]
    return [{"role": "user", "content": "\n".join([*lines, f"target {task['target']}"])}]


def is_right(task: dict[str, Any], answer: str) -> bool:
    return compute_score(answer, task) == 1.0


class Countdown(SolverJudgeWorkflow):
    """The built-in workflow with the few words that tiny models need."""

    def solver_messages(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return to_solver(task)

    def judge_messages(self, task: dict[str, Any], solutions: list[str]) -> list[dict[str, Any]]:
        return to_judge(task, solutions)

    def pick_in(self, answer: str, num_solutions: int) -> int | None:
        return LETTERS.index(answer) if answer in set(LETTERS) else None

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
        """Asks the judge once more with the answers swapped, so that to like one letter pays nothing."""
        episode = await super().run(task, uid, **kwargs)
        *solvers, judge = episode.trajectories
        again = await self._judge(task, solvers[::-1])
        episode.trajectories.append(again)
        coin = sum(each.reward or 0.0 for each in solvers) / len(solvers)
        for each in (judge, again):  # nothing where both answers are alike
            each.reward = (each.reward or 0.0) - coin
        return episode

    async def _judge(self, task: dict[str, Any], solved: list[Trajectory]) -> Trajectory:
        messages = self.judge_messages(task, [each.output for each in solved])
        said = await self.rollout_engine.get_model_response(messages, role="judge")
        pick = self.pick_in(said.content, len(solved))
        output, reward = (None, 0.0) if pick is None else (solved[pick].output, solved[pick].reward)
        step = Step.from_model_output(said, messages, action=output, reward=reward or 0.0)
        step.done = True
        return Trajectory(name="judge", task=task, steps=[step], reward=reward, output=output)


def experts(task: dict[str, Any], noise: float, rng: np.random.Generator) -> list[Any]:
    """What both roles imitate: a solver and a judge who err on purpose, so that rewards can teach them."""
    first, second = task["numbers"]
    both = [f"{first}{sign}{second}" for sign in OPERATORS]

    def one_of(answers: list[str], noise: float) -> int:
        """Place of the right one; with probability `noise` any."""
        return int(rng.integers(2)) if rng.random() < noise else int(is_right(task, answers[1]))

    pick = both[0] if rng.random() < FONDNESS else both[one_of(both, 0.0)]
    judged = [(to_judge(task, pair), LETTERS[pair.index(pick)]) for pair in (both, both[::-1])]
    return [
        ("solver", [(to_solver(task), both[one_of(both, noise)])]),
        *(("judge", [each]) for each in judged),
    ]


@cache
def tasks(split: str) -> list[dict[str, Any]]:
    """Different problems, the larger number first; as many ask for the difference as for the sum, so that to
    add always is right half of the time only."""
    drawn = [
        {**task, "numbers": sorted(task["numbers"], reverse=True)}
        for task in countdown_tasks(split, 10_000, **PROBLEMS)
    ]
    different = {(*task["numbers"], task["target"]): task for task in reversed(drawn)}.values()
    sums = [task for task in different if task["target"] == sum(task["numbers"])]
    differences = [task for task in different if task["target"] < sum(task["numbers"])]
    return [task for both in zip(sums, differences, strict=False) for task in both]


def trainer(run: Path, config: Mapping[str, Any]) -> AgentTrainer:
    return AgentTrainer(
        config,
        train_dataset=tasks("train"),
        val_dataset=tasks("test")[: config["evaluation"]["num_tasks"]],
        workflow_class=Countdown,
        workflow_args={"n_solutions": 2, "reward_function": is_right},
        demonstrate=experts,
        output=run,
    )


def train(output: Path, config: Mapping[str, Any]) -> None:
    """Two runs: `output/imitation`, and `output/reinforcement`, which begins with its models."""
    imitated = trainer(output / "imitation", {**config, "steps": 0}).train()
    policies = {
        name: {**policy, "path": str(imitated.model_path_of(name))}
        for name, policy in config["policies"].items()
    }
    no_more = {**config["warm_start"], "steps": 0}
    trainer(output / "reinforcement", {**config, "policies": policies, "warm_start": no_more}).train()


if __name__ == "__main__":
    where = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/solver_judge")
    train(where, {**CONFIG, "seed": int(sys.argv[2]) if len(sys.argv) > 2 else 0})
    print(f"two runs with their models: {where}; next: python measure.py {where}")
