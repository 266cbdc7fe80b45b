"""Three steps on the recorded episodes of a run, by one backend, for each case; a test or torchrun starts it.

learned.py RUN BACKEND OUT ──► OUT/CASE.json (metrics by step), OUT/CASE-STEP.safetensors (weights)
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from rllm.build.configs import training_config
from rllm.build.training import build_run
from rllm.store.episodes import EpisodeStore
from rllm.trainer.learning import learn
from rllm.trainer.policies import load_initial_models

SHORT = (
    *("threads=1", "task.num_train_tasks=16", "evaluation.num_tasks=2", "evaluation.every_steps=0"),
    *("evaluation.split=validation", "rollout.tasks_per_step=6", "rollout.group_size=4"),
    *("optimizer.name=adamw", "algorithm.updates_per_step=1"),
)
CASES = {
    "ppo": ("algorithm.updates_per_step=2",),
    "gspo": ("algorithm.loss=gspo", "algorithm.aggregation=sequence_mean"),
    "kl": ("algorithm.kl_coef=0.1", "algorithm.estimator=rloo"),
    "entropy": ("algorithm.entropy_coef=0.05", "optimizer.weight_decay=0.1"),
    "value": ("algorithm.estimator=gae", "critic.trunk=separate"),
    "small": ("optimizer.micro_batch_tokens=200", "rollout.temperature=0.7", "algorithm.ties=drop"),
    "trainer": ("algorithm.old_logprobs=trainer", "algorithm.correction=truncate"),
    "odd": ("algorithm.estimator=reinforce", "optimizer.micro_batch_tokens=40"),
    "alone": ("algorithm.estimator=reinforce", "optimizer.micro_batch_tokens=40"),
}
PAID = {"odd": 3, "alone": 1}
"""Of the episodes that were paid, those that a case sees; with `reinforce` no other has a gradient, so two
ranks have two rows and one, or one and none, in micro-batches of one row."""


def main() -> None:
    run, backend, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    with EpisodeStore.open(run / "store.sqlite", read_only=True) as store:
        episodes = list(store.episodes("train", 0))
    for name, assignments in CASES.items():
        own = (f"model.path={run / 'model'}", f"backend={backend}", "steps=10", "warm_start.steps=0")
        config = training_config("frozenlake", None, (*SHORT, *own, *assignments), 0)
        models = load_initial_models(config, run)
        learner = build_run(config, run).make_learner(models)
        paid, unpaid = (
            [each for each in episodes if bool(each.reward) == is_paid] for is_paid in (True, False)
        )
        played = unpaid + paid[: PAID[name]] if name in PAID else episodes
        metrics = []
        for step in range(3):
            metrics.append(learn(learner, played, step)[1])
            learner.policies.publish()
            if os.environ.get("RANK", "0") == "0":
                weights = models["policy"].model.state_dict_hf()
                copies = {key: each.clone() for key, each in weights.items()}
                save_file(copies, out / f"{name}-{step}.safetensors")
                (out / f"{name}.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    main()
