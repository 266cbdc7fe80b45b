"""Two models learn together: one solves countdown problems, the other judges which of two answers is right.

    imitation of noisy experts ──► reinforcement: problem ──► 2 answers of the solver ──► the judge's pick
          (both roles)                    paid for being right ◄──┘     paid for beating a coin ◄──┘

python solver_judge.py             both from random weights, on a CPU: runs/solver_judge
python measure.py                  what each of them learned, and the picture
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rllm import AgentTrainer, Episode
from rllm.environments.countdown import countdown_tasks, demonstration, problem_of, solutions
from rllm.rewards.countdown_reward import compute_score
from rllm.workflows import SolverJudgeWorkflow

OPERATORS = "+-"
PROBLEMS: dict[str, Any] = {"num_numbers": 3, "operators": OPERATORS}
LETTERS = "AB"
CONFIG: dict[str, Any] = {
    "steps": 80,
    "policies": {
        "solver": {"path": "builtin:tiny"},
        "judge": {"path": "builtin:tiny", "learning_rate": 1e-3},
    },
    "roles": {"solver": {"max_tokens": 8}, "judge": {"max_tokens": 2, "estimator": "reinforce"}},
    "warm_start": {"steps": 300, "episodes_per_step": 64, "learning_rate": 1e-2, "noise": 0.5},
    "rollout": {"tasks_per_step": 32, "group_size": 8},
    "algorithm": {"clip_high": 0.28},
    "optimizer": {"name": "muon", "learning_rate": 5e-4},
    "inference": {"max_context": 64},
    "evaluation": {"num_tasks": 512},
    "checkpoint": {"every_steps": 20},
}


def to_solver(task: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": problem_of(task).text}]


def to_judge(task: dict[str, Any], answers: list[str]) -> list[dict[str, Any]]:
    lines = [f"{letter}: {answer}" for letter, answer in zip(LETTERS, answers, strict=True)]
    return [{"role": "user", "content": "\n".join([problem_of(task).text, *lines])}]


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
        """The judge is paid for what it adds to tossing a coin: nothing where both answers are alike."""
        episode = await super().run(task, uid, **kwargs)
        *solvers, judge = episode.trajectories
        judge.reward = (judge.reward or 0.0) - sum(each.reward or 0.0 for each in solvers) / len(solvers)
        return episode


def experts(task: dict[str, Any], noise: float, rng: np.random.Generator) -> list[Any]:
    """What both roles imitate: a solver and a judge who err on purpose, so that rewards can teach them."""
    problem = problem_of(task)
    answer = demonstration(task, noise=noise, rng=rng, operators=OPERATORS)
    right = solutions(problem, OPERATORS)[0]
    while is_right(task, wrong := "".join(rng.choice([*OPERATORS]) if c in OPERATORS else c for c in right)):
        pass  # a solver errs in the signs
    pair = [right, wrong] if rng.random() < 0.5 else [wrong, right]
    pick = LETTERS[rng.integers(2) if rng.random() < noise else pair.index(right)]
    return [("solver", [(to_solver(task), answer)]), ("judge", [(to_judge(task, pair), pick)])]


def trainer(run: Path, config: Mapping[str, Any]) -> AgentTrainer:
    return AgentTrainer(
        config,
        train_dataset=countdown_tasks("train", 20_000, **PROBLEMS),
        val_dataset=countdown_tasks("test", config["evaluation"]["num_tasks"], **PROBLEMS),
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
