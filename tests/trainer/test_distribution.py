"""Keys that several processes honour, and keys that they refuse."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rllm.config.loader import load_config
from rllm.errors import ConfigError
from rllm.trainer import distribution
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.trainer.distribution import require_distributed

SHARD = "distributed.strategy=shard"
PAIR = "distributed.tensor_parallel=2"
VLLM = ("inference.engine=vllm", "inference.lockstep=false", "inference.servers=['http://x:1/v1']")
TAUGHT = ("distill.teacher=http://x", "algorithm.estimator=teacher", "warm_start.steps=0")
SEEING, STRANGE = "model.path=SEEING", "model.path=STRANGE"


@pytest.mark.parametrize(
    ("assignments", "key"),
    [
        ((), None),
        ((SHARD,), None),
        ((PAIR,), None),
        ((PAIR, "lora.rank=2"), None),
        (("lora.rank=2", "lora.base_dtype=nf4"), None),
        (("optimizer.name=adafactor",), None),
        ((PAIR, "optimizer.name=muon"), None),
        ((SHARD, "optimizer.name=muon"), None),
        (("model.device=cuda", SHARD, "distributed.offload=true"), None),
        ((SEEING, "model.vision=train"), None),
        ((SHARD, SEEING), None),
        (TAUGHT, r"distill\.teacher"),
        (("schedule.kind=async", "inference.lockstep=false"), r"schedule\.kind"),
        (VLLM, r"inference\.engine"),
        ((PAIR, "optimizer.name=adafactor"), r"optimizer\.name"),
        ((SHARD, "optimizer.name=adafactor"), r"optimizer\.name"),
        ((PAIR, "optimizer.name=adamw8bit"), r"optimizer\.name"),
        ((SHARD, "distributed.offload=true"), r"model\.device"),
        (("model.device=cuda", SHARD, "distributed.offload=true", "optimizer.name=muon"), r"optimizer\.name"),
        ((SHARD, SEEING, "model.vision=train"), r"model\.vision"),
        ((PAIR, "lora.rank=2", "lora.base_dtype=nf4"), r"lora\.base_dtype"),
        ((PAIR, SEEING), "reads images"),
        ((PAIR, STRANGE, "lora.rank=2"), "adapter"),
        ((PAIR, STRANGE), "no plan"),
        (("distributed.tensor_parallel=3",), r"distributed\.tensor_parallel"),
        (("model.device=cuda:1",), r"model\.device"),
        (("backend=tinker",), "`backend`"),
        (("backend=verl",), r"distributed\.strategy"),
        (("backend=verl", SHARD), None),
        (("backend=verl", SHARD, "distributed.shard_size=2"), None),
        (("backend=verl", SHARD, "model.device=cuda"), r"model\.device"),
        (("backend=verl", PAIR), r"distributed\.tensor_parallel"),
    ],
    ids=str,
)
def test_two_processes_do_what_they_can_do_exactly_and_refuse_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assignments: tuple[str, ...], key: str | None
) -> None:
    monkeypatch.setattr(distribution, "num_cards", lambda: 2)
    for name, more in (("SEEING", {"vision_config": {}}), ("STRANGE", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "no-such", **more}))
    config = load_config([each.replace("model.path=", f"model.path={tmp_path}/") for each in assignments])
    with nullcontext() if key is None else pytest.raises(ConfigError, match=key):
        require_distributed(config, 2, is_program=False)


@pytest.mark.parametrize(("timeout_s", "is_refused"), [(330, True), (330.5, False)])
def test_a_program_may_be_silent_while_it_runs_and_while_it_is_judged(
    timeout_s: float, is_refused: bool
) -> None:
    times = ["rollout.episode_timeout_s=300", "rollout.step_timeout_s=30"]
    config = load_config([f"distributed.timeout_s={timeout_s}", *times])
    with pytest.raises(ConfigError, match=r"timeout_s") if is_refused else nullcontext():
        require_distributed(config, 2, is_program=True)
    require_distributed(config, 2, is_program=False)


def test_a_trainer_asks_what_its_ranks_cannot_do_and_whether_it_plays_a_program(letters: ModuleType) -> None:
    def program(task: Any, config: Any) -> None: ...

    slow = {"distributed": {"timeout_s": 300}, "rollout": {"episode_timeout_s": 290}}
    tasks = [{"id": "a", "instruction": "say a"}]
    of_program = AgentTrainer(slow, tasks, agent_flow=program, evaluator=lambda task, episode: 1.0)
    of_program.run.require_ranks_can(1)
    with pytest.raises(ConfigError, match=r"distributed\.timeout_s"):
        of_program.run.require_ranks_can(2)
    letters.make_trainer(Path("run"), slow).run.require_ranks_can(2)
