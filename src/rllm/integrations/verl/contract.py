"""The parts of verl that are used, and whether the installed one still has them.

verl changes names and arguments between minor versions, so they are compared before anything is built: what
does not fit is an error with the version at the start, not one in the middle of a run.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
from collections.abc import Iterator
from typing import Any

from rllm.errors import ConfigError, MissingExtraError

OLDEST, BEYOND = (0, 9, 1), (0, 10)
"""The first version that rLLM fits, and the first after it that it does not."""

WORKER: dict[str, tuple[str, ...]] = {
    "verl.workers.engine_workers:TrainingWorker": ("config",),
    "verl.workers.engine_workers:TrainingWorker.reset": (),
    "verl.workers.engine_workers:TrainingWorker.set_loss_fn": ("loss_fn",),
    "verl.workers.engine_workers:TrainingWorker.train_batch": ("data",),
    "verl.workers.engine_workers:TrainingWorker.infer_batch": ("data",),
    "verl.workers.engine_workers:TrainingWorker.save_checkpoint": ("local_path",),
    "verl.workers.engine_workers:TrainingWorker.load_checkpoint": ("local_path", "del_local_after_load"),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead": ("model_config", "engine_config"),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.get_per_tensor_param": (),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithValueHead._build_module": (),
    "verl.workers.engine.base:EngineRegistry.register": ("model_type", "backend", "device"),
    "verl.workers.config:HFModelConfig": ("path", "use_remove_padding", "override_config"),
    "verl.workers.config:FSDPEngineConfig": ("strategy", "max_token_len_per_gpu", "mixed_precision"),
    "verl.workers.config:FSDPOptimizerConfig": ("lr", "betas", "weight_decay", "clip_grad"),
    "verl.workers.config:TrainingWorkerConfig": ("model_type", "model_config", "engine_config"),
    "verl.trainer.config:CheckpointConfig": ("save_contents", "load_contents"),
    "verl.utils.tensordict_utils:assign_non_tensor": (),
    "verl.utils.tensordict_utils:get": ("key",),
    "verl.plugin.platform.platform_base:PlatformBase": (),
    "verl.plugin.platform.platform_manager:set_platform": ("platform",),
}
"""Name -> arguments that are given to it."""

AGENT_LOOP: dict[str, tuple[str, ...]] = {
    "verl.experimental.agent_loop.agent_loop:AgentLoopBase": (
        "trainer_config",
        "server_manager",
        "tokenizer",
    ),
    "verl.experimental.agent_loop.agent_loop:AgentLoopBase.run": ("sampling_params",),
    "verl.experimental.agent_loop.agent_loop:AgentLoopOutput": (
        *("prompt_ids", "response_ids", "response_mask"),
        *("response_logprobs", "reward_score", "num_turns", "metrics", "extra_fields"),
    ),
    "verl.experimental.agent_loop.agent_loop:register": ("agent_name",),
    "verl.workers.rollout.replica:TokenOutput": ("token_ids", "log_probs", "stop_reason"),
}


def require_installed() -> None:
    """Raise MissingExtraError, or ConfigError for another version; imports nothing of verl."""
    if importlib.util.find_spec("verl") is None:
        raise MissingExtraError("verl", "verl")
    version = importlib.metadata.version("verl")
    numbers = tuple(int(each) for each in re.findall(r"\d+", version)[:3])
    if not OLDEST <= numbers < BEYOND:
        raise ConfigError(
            f"verl {version} is installed; rLLM speaks to 0.9.1 and later 0.9: pip install 'rllm[verl]'."
        )


def require_contract(contract: dict[str, tuple[str, ...]]) -> None:
    """Raise ConfigError with the version and all that is missing or takes other arguments."""
    misfits = list(_misfits(contract))
    if misfits:
        version = importlib.metadata.version("verl")
        raise ConfigError(
            f"verl {version} does not fit rLLM: {'; '.join(misfits)}. Install verl 0.9.1: "
            "pip install 'rllm[verl]'."
        )


def _misfits(contract: dict[str, tuple[str, ...]]) -> Iterator[str]:
    for name, arguments in contract.items():
        place, _, path = name.partition(":")
        try:
            target: Any = importlib.import_module(place)
            for part in path.split("."):
                target = getattr(target, part)
        except (ImportError, AttributeError) as error:
            yield f"{path} is not there ({error})"
            continue
        parameters = _arguments_of(target)
        absent = [each for each in arguments if each not in parameters]
        if absent and "**" not in parameters:
            yield f"{path} takes no {', '.join(absent)}"


def _arguments_of(target: Any) -> set[str]:
    """Names of the arguments; `**` among them where it takes whatever it is given."""
    fields: Any = getattr(target, "model_fields", None)  # pydantic says less in its signature
    if fields is not None:
        return set(fields)
    parameters = inspect.signature(target).parameters.values()
    return {"**" if each.kind is each.VAR_KEYWORD else each.name for each in parameters}
