"""Updates on recorded episodes, the same on one process and on several.

    python recorded.py MODEL_DIRECTORY OUT STEPS [DISTRIBUTED [KINDS [RUN]]]

As one rank; rank 0 writes OUT. DISTRIBUTED is that section of a configuration, as JSON; KINDS are a few of
all, with commas between. Then a whole run of the letter game, where RUN is given. Everything recorded is in
float64, so that what is left between two numbers of ranks is the order in which they add up; IN_FLOAT32 is
beside it.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from rllm.algorithms.task_sampler import TaskSampler
from rllm.config.distributed import DistributedConfig
from rllm.config.loader import load_config
from rllm.config.schema import TrainConfig
from rllm.distributed import RankGroup, open_ranks
from rllm.models.directory import load_model
from rllm.models.lora import with_adapter
from rllm.trainer.critic import make_critics
from rllm.trainer.learning import Learner, learn
from rllm.trainer.policies import make_policies
from rllm.trainer.row_scores import make_references
from rllm.types.episode import Episode, Outcome, Step, Trajectory

ROLES = ("solver", "judge")
KINDS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "sequence": {"algorithm": {"loss": "gspo", "aggregation": "sequence_mean"}},
    "one group": {"rollout": {"tasks_per_step": 1}, "algorithm": {"updates_per_step": 1}},
    "kl in loss": {"algorithm": {"kl_coef": 0.1, "old_logprobs": "trainer"}},
    "entropy": {"algorithm": {"entropy_coef": 0.02}},
    "critic": {"algorithm": {"estimator": "gae"}, "critic": {"trunk": "separate"}},
    "shared trunk": {"algorithm": {"estimator": "gae"}, "critic": {"trunk": "shared"}},
    "lora": {"lora": {"rank": 4, "alpha": 8.0}},
    "recomputed in chunks": {"optimizer": {"gradient_checkpointing": True, "logits_mb": 0.05}},
    "muon": {"optimizer": {"name": "muon", "muon_dtype": "float32"}},
    "two policies": {
        "policies": {"solver": {"path": "builtin:tiny"}, "judge": {"path": "builtin:tiny"}},
        "roles": {"solver": {"policy": "solver"}, "judge": {"policy": "judge"}},
    },
}
"""One of each kind of loss, and of what is updated."""
SOME_ADAPTERS = "lora of some layers by muon"
MORE_KINDS: dict[str, dict[str, Any]] = {
    SOME_ADAPTERS: {
        "lora": {"rank": 2, "alpha": 8.0, "targets": ["v_proj", "o_proj", "down_proj"]},
        "optimizer": {"name": "muon", "muon_dtype": "float32"},
    }
}
"""By name alone."""
IN_FLOAT32, IN_BFLOAT16 = "ppo in float32", "ppo in bfloat16"
OTHER_DTYPES = {IN_FLOAT32: torch.float32, IN_BFLOAT16: torch.bfloat16}


def episodes(step: int, num_tasks: int) -> list[Episode]:
    """Four attempts at each task, of several lengths, each with two roles that read the task's prompt."""
    found: list[Episode] = []
    for task in range(num_tasks):
        rng = np.random.default_rng((step, task))
        prompt = rng.integers(7, 300, 3 + 9 * task).tolist()
        for attempt in range(4):
            trails = [_trajectory(role, prompt, rng) for role in ROLES]
            found.append(
                Episode(
                    task_id=f"t{task}",
                    rollout_idx=attempt,
                    trajectories=trails,
                    outcome=Outcome.SCORED,
                )
            )
    return found


def _trajectory(role: str, prompt: list[int], rng: np.random.Generator) -> Trajectory:
    ids = rng.integers(7, 300, int(rng.integers(1, 12))).tolist()
    step = Step(
        prompt_ids=list(prompt),
        response_ids=ids,
        logprobs=rng.normal(-6.4, 0.1, len(ids)).tolist(),
        policy_versions=[0] * len(ids),
        reward=float(rng.integers(3)) / 2.0,
    )
    return Trajectory(uid=str(rng.integers(1 << 62)), name=role, steps=[step], reward=step.reward)


def learner_of(kind: str, directory: Path, ranks: RankGroup) -> Learner:
    """What a run of that kind updates."""
    base = {
        "steps": 40,
        "threads": 1,
        "rollout": {"tasks_per_step": 3, "group_size": 4},
        "warm_start": {"steps": 0},
        "algorithm": {"updates_per_step": 2},
        "optimizer": {"learning_rate": 1e-3, "micro_batch_tokens": 64},
    }
    config = load_config(merged(base, (KINDS | MORE_KINDS).get(kind, {})))
    dtype = OTHER_DTYPES.get(kind, torch.float64)
    loaded = {name: load_model(directory, dtype=dtype) for name in config.named_policies}
    if config.lora.rank:
        loaded = {name: with_adapter(each, config.lora, 7) for name, each in loaded.items()}
        for each in loaded.values():
            each.model.double()
    policies = make_policies(config, loaded, ranks=ranks)
    return Learner(
        config=config,
        policies=policies,
        tasks=TaskSampler([{}], seed=0, purpose="tasks"),
        demonstrations=None,
        references=make_references(config, policies, ranks),
        critics=make_critics(config, policies, ranks),
    )


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for key, value in changes.items():
        both[key] = merged(both.get(key, {}), value) if isinstance(value, dict) else value
    return both


def trained(
    kind: str, directory: Path, ranks: RankGroup, steps: int
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Parameters after so many steps, and the metrics of each."""
    learner = learner_of(kind, directory, ranks)
    config: TrainConfig = learner.config
    metrics: list[dict[str, float]] = []
    for step in range(steps):
        _, found = learn(learner, episodes(step, config.rollout.tasks_per_step), step)
        metrics.append(found)
    return dict(parameters_of(learner)), metrics


def parameters_of(learner: Learner) -> Iterable[tuple[str, torch.Tensor]]:
    for place, each in learner.backends().items():
        backend: Any = each
        for name, weight in backend.whole_weights().items():
            yield f"{place}/{name}", weight.full_tensor() if isinstance(weight, DTensor) else weight


def main(
    directory: str, out: str, steps: str, distributed: str = "{}", kinds: str = "", run: str = ""
) -> None:
    torch.set_num_threads(1)
    with open_ranks(DistributedConfig(**json.loads(distributed))) as ranks:
        chosen = kinds.split(",") if kinds else (*KINDS, IN_FLOAT32)
        found = {kind: trained(kind, Path(directory), ranks, int(steps)) for kind in chosen}
        if ranks.is_writer:
            torch.save(found, out)
    if run:
        import letters

        letters.play(Path(run), {})


if __name__ == "__main__":
    main(*sys.argv[1:])
