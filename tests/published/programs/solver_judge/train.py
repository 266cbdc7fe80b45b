"""Two solvers and a judge: a workflow in the published style, with its own training script."""

import asyncio

from rllm.agents.agent import BaseAgent
from rllm.engine.rollout.rollout_engine import RolloutEngine
from rllm.rewards.reward_fn import math_reward_fn
from rllm.trainer.unified_trainer import AgentTrainer
from rllm.types import Episode, Step, Trajectory
from rllm.workflows.workflow import Workflow

assert BaseAgent.__module__ == "rllm.agents.base"


class SolverJudgeWorkflow(Workflow):
    def __init__(self, rollout_engine: RolloutEngine, n_solutions: int = 2, **kwargs) -> None:
        super().__init__(rollout_engine, **kwargs)
        self.n_solutions = n_solutions

    async def ask(self, name: str, text: str) -> Trajectory:
        messages = [{"role": "user", "content": text}]
        output = await self.rollout_engine.get_model_response(messages, role=name)
        messages.append({"role": "assistant", "content": output.text})
        step = Step(
            chat_completions=messages, model_response=output.text, action=output.text, model_output=output
        )
        return Trajectory(name=name, steps=[step])

    async def run(self, task: dict, uid: str, **kwargs) -> Episode:
        self.reset(task, uid)
        question = task["question"]
        solvers = await asyncio.gather(*(self.ask("solver", question) for _ in range(self.n_solutions)))
        for solver in solvers:
            solver.reward = math_reward_fn(task, solver.steps[-1].action).reward
        judge = await self.ask("judge", f"{question} {solvers[0].steps[-1].action[:8]}?")
        judge.reward = solvers[0].reward
        return Episode(id=uid, task=task, trajectories=[*solvers, judge], is_correct=bool(solvers[0].reward))


def main(config):
    rows = [{"task_id": f"sum-{n}", "question": f"{n} + 1?", "ground_truth": str(n + 1)} for n in range(8)]
    trainer = AgentTrainer(
        workflow_class=SolverJudgeWorkflow,
        workflow_args={"n_solutions": 2},
        config=config,
        train_dataset=rows,
        val_dataset=rows[:2],
        backend="tinker",
    )
    return trainer.train()


if __name__ == "__main__":
    import hydra

    hydra.main(config_path="pkg://rllm.experimental.config", config_name="unified", version_base=None)(main)()
