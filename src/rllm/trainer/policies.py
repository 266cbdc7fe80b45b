"""The models of a run: what each is made from, what updates it, what samples from it, where it is kept.

    [policies] ──► initial model ──► LoadedModel ──┬──► LocalClient: samples the roles that it plays
                                                   └──► TorchBackend: its own optimizer and version
                                                        (a frozen policy has none, so nothing can update it)

A run with one policy keeps it in `initial_model/` and `model/`, a run with several in `initial_models/NAME/`
and `models/NAME/`. Adapters to one initial model share it: the first of their policies has it, and what each
made is in `models/NAME/` as well, merged, and in `adapter/` or `adapters/NAME/` by itself.
"""

import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rllm.config.optimizer import OptimizerConfig
from rllm.config.schema import FROZEN, TrainConfig
from rllm.distributed import ALONE, RankGroup
from rllm.errors import ConfigError
from rllm.inference.local.client import LocalClient
from rllm.models.builtin import PRESETS, builtin_preset, create_model
from rllm.models.devices import dtype_named, require_device, require_number_type, use_threads
from rllm.models.directory import (
    LoadedModel,
    load_model,
    parameters_sha256,
    reads_images,
    require_servers_read_images,
    save_model,
    write_index,
    write_part,
)
from rllm.models.lora import sampler_twins, save_adapter, twin_of, with_adapter, with_base_in_4_bits
from rllm.rendering.chat import ChatRenderer
from rllm.trainer.backends.base import TrainingBackend, refuse_unsupported
from rllm.trainer.backends.named import backend_kind, service_kind
from rllm.trainer.backends.packed import PackedUpdates
from rllm.trainer.backends.torch import SUPPORTS, TorchBackend
from rllm.trainer.backends.torch_distilling import DistillingBackend
from rllm.trainer.backends.torch_optimizer import LEAST_IN_8_BITS
from rllm.trainer.memory_plan import initial_config, shape_of
from rllm.types.draws import draw_seed
from rllm.types.sample import TrainingSample

log = logging.getLogger(__name__)

Publish = Callable[..., None]
"""Tells a sampler that its weights are now those of a policy version; where they are not the trainer's own,
with a function that writes them, which runs while nothing is sampled."""


@dataclass(kw_only=True, slots=True)
class PolicyModel:
    """One model of the run."""

    name: str
    loaded_model: LoadedModel
    renderer: ChatRenderer
    end_token_id: int
    """The id that ends a demonstrated answer: the token that the model has to sample there."""
    backend: TrainingBackend | None
    """None for a frozen policy."""
    learning_rate: float
    """Peak of its reinforcement learning."""

    def parameters_sha256(self) -> str:
        return parameters_sha256(self.loaded_model.model.state_dict_hf())


class Policies(dict[str, PolicyModel]):
    """All of them by name, and which role is played by which."""

    def __init__(self, config: TrainConfig, policies: Mapping[str, PolicyModel]) -> None:
        super().__init__(policies)
        self._config = config

    def trainable(self) -> Iterator[tuple[str, TrainingBackend]]:
        """(name, backend) of each policy that learns."""
        for name, policy in self.items():
            if policy.backend is not None:
                yield name, policy.backend

    def backends(self) -> dict[str, TrainingBackend]:
        """The learners that a checkpoint holds, by their place in it: the only policy of a run lies at the
        top."""
        return {name if len(self) > 1 else "": backend for name, backend in self.trainable()}

    def name_of(self, role: str) -> str:
        """The policy that plays `role`."""
        return self._config.policy_of(role)

    def is_trained(self, role: str) -> bool:
        """Whether anything is learned from what `role` says."""
        policy = self[self._config.policy_of(role)]
        return policy.backend is not None and self._config.role(role).reward_weight > 0.0

    def vocabulary_of(self, role: str) -> int:
        """Tokens that the role's model knows."""
        return self[self._config.policy_of(role)].loaded_model.vocab_size

    def reads_images(self, role: str) -> bool:
        """Whether rows of the role's model may show images."""
        return self[self._config.policy_of(role)].loaded_model.tokenizer.images is not None

    def samples_of(self, name: str, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Those that the policy's roles said."""
        return [each for each in samples if self._config.policy_of(each.group_key[1]) == name]

    def label_metrics(self, name: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Metrics of one policy under names of their own, where there are several."""
        if len(self) == 1:
            return dict(metrics)
        return {f"policy.{name}.{metric}": value for metric, value in metrics.items()}

    def voice_of(self, role: str) -> tuple[ChatRenderer, int]:
        """The renderer of the role's conversations, and the token that ends its answers."""
        policy = self[self._config.policy_of(role)]
        return policy.renderer, policy.end_token_id

    def publish(self) -> None:
        """All samplers serve the weights as they are."""
        for _, backend in self.trainable():
            backend.publish_weights()

    def begin_phase(self) -> None:
        """Forget the optimizers' moments: the next phase optimises another objective."""
        for _, backend in self.trainable():
            backend.reset_optimizer()

    def save_models(self, run: Path, ranks: RankGroup = ALONE) -> None:
        """Every model with its adapter merged into it, and the adapter beside; all of `ranks` have to be
        here."""
        models, adapters = saved_model_paths(run, list(self)), saved_adapter_paths(run, list(self))
        if (service := service_kind(self._config.backend)) is not None:
            for name, policy in self.items():
                service.save(policy.loaded_model, models[name], adapters[name])
            return
        for name, path in models.items():
            save_model_by(ranks, self[name].loaded_model, path)
        for name, path in adapters.items():
            if self[name].loaded_model.base is not None and ranks.is_writer:
                save_adapter(self[name].loaded_model, path)

    def facts(self) -> dict[str, dict[str, Any]]:
        """The facts about each policy for a summary."""
        return {
            name: {
                "trainable": policy.backend is not None,
                "policy_version": policy.backend.policy_version if policy.backend is not None else 0,
                "parameters_sha256": policy.parameters_sha256(),
            }
            for name, policy in self.items()
        }


def require_8_bits(optimizer: OptimizerConfig, learners: Iterable[object]) -> None:
    """Raises ConfigError where `adamw8bit` is asked for and all of these learners would keep 32 bits."""
    torch_learners = [each for each in learners if isinstance(each, PackedUpdates)]
    if (
        optimizer.name == "adamw8bit"
        and torch_learners
        and not any(each.has_8_bits for each in torch_learners)
    ):
        raise ConfigError(
            "`optimizer.name` is 'adamw8bit', which does nothing here: of the layers' matrices that are "
            f"trained none has {LEAST_IN_8_BITS:,} entries or more. Set it to adamw, or `lora.rank` higher."
        )


def make_policies(
    config: TrainConfig,
    models: Mapping[str, LoadedModel],
    publish: Mapping[str, Publish] | None = None,
    teacher: LoadedModel | None = None,
    ranks: RankGroup = ALONE,
    samplers: Mapping[str, LoadedModel] = MappingProxyType({}),
) -> Policies:
    """The policies that learn on `models`.

    `publish`: what a policy's sampler is told after an update, by policy; without it nobody samples.
    `samplers`: the copies that are sampled from, by policy, where there are some; see `sampler_models`.
    `teacher`: for a `distill.divergence` over the whole vocabulary. Raises ConfigError for a key that the
    backend would ignore.
    """
    kind = backend_kind(config.backend)
    if kind is None:
        refuse_unsupported("model", config.model, SUPPORTS, "torch")
        refuse_unsupported("optimizer", config.optimizer, SUPPORTS, "torch")
    else:
        kind.require(config)
    optimizer, policies = config.optimizer, dict[str, PolicyModel]()
    for name, policy in config.named_policies.items():
        model, renderer = models[name], ChatRenderer(models[name].tokenizer)
        backend: TrainingBackend | None = None
        tell = _nobody_samples if publish is None else publish[name]
        if policy.trainable and kind is not None:
            backend = kind.policy(config, model, tell)
        elif policy.trainable:
            options: dict[str, Any] = {
                "publish": tell,
                "config": optimizer,
                "ranks": ranks,
                "sampled_model": samplers[name].model if name in samplers else None,
                "value_head": config.critic.trunk == "shared" and config.needs_critic(name),
            }
            if config.distill.is_over_vocabulary and teacher is not None:
                backend = DistillingBackend(model.model, teacher=teacher.model, **options)
            else:
                backend = TorchBackend(model.model, **options)
        policies[name] = PolicyModel(
            name=name,
            loaded_model=model,
            renderer=renderer,
            end_token_id=answer_end(renderer, model.end_token_ids),
            backend=backend,
            learning_rate=policy.learning_rate or optimizer.learning_rate,
        )
    return Policies(config, policies)


def answer_end(renderer: ChatRenderer, end_token_ids: Sequence[int]) -> int:
    """The token that ends a demonstrated answer.

    A model may have several end tokens; the one its chat template writes behind an answer is to be learned.
    """
    after_answer = renderer.continuation([], [{"role": "user", "content": "x"}])
    return after_answer[0] if after_answer[:1] and after_answer[0] in end_token_ids else end_token_ids[0]


def save_model_by(ranks: RankGroup, model: LoadedModel, path: Path) -> None:
    """Write a model of which each of `ranks` has the whole: each writes a file of it."""

    def write(target: Path, weights: dict[str, Any]) -> None:
        directory = ranks.gather(target)[0]
        write_part(directory, weights, ranks.rank, ranks.size)
        ranks.wait()
        if ranks.is_writer:
            write_index(directory, weights, ranks.size)

    if ranks.size == 1:
        save_model(model, path)
    elif ranks.is_writer:
        save_model(model, path, write)
    else:
        write(path, model.model.state_dict_hf())


def _nobody_samples(policy_version: int, write: Callable[[], None] | None = None) -> None:
    if write is not None:
        write()


def make_client(config: TrainConfig, model: LoadedModel) -> LocalClient:
    """The client that samples from a policy."""
    if (service := service_kind(config.backend)) is not None:
        return service.client(config, model)
    inference = config.inference
    return LocalClient(
        model,
        num_slots=inference.slots,
        max_context=inference.max_context,
        max_prefill_tokens=inference.max_prefill_tokens,
        cache_tokens=inference.cache_tokens,
        lockstep=inference.lockstep,
    )


def require_models(config: TrainConfig) -> None:
    """Raises ConfigError or ModelDirectoryError for a policy whose initial model is nowhere, before any is
    made or loaded, and for a device that the machine does not have."""
    if service_kind(config.backend) is not None:
        return
    for name, policy in config.named_policies.items():
        preset = builtin_preset(policy.path)
        is_nowhere = ":" in policy.path and not Path(policy.path).exists()
        if is_nowhere and preset not in PRESETS:
            key = f"policies.{name}.path" if config.policies and config.policies[name].path else "model.path"
            presets = ", ".join(f"builtin:{each}" for each in PRESETS)
            raise ConfigError(f"`{key}` is {policy.path!r}; write one of {presets}, or a directory.")
        model_config = initial_config(policy.path)
        has_vision = reads_images(model_config)
        if config.inference.engine == "vllm":
            require_servers_read_images(policy.path, model_config)
        if has_vision and config.inference.engine == "vllm" and (rank := config.adapter_of(name).rank):
            raise ConfigError(
                f"{policy.path} reads images, and an adapter of rank {rank} is trained, which nobody has "
                "tried on servers (`inference.engine` is 'vllm'). Set `lora.rank` to 0, or that to local."
            )
        _require_vision(policy.path, has_vision, config.model.vision, config.adapter_of(name).rank)
        _require_context(policy.path, config.inference.max_context)
    require_device(config.model.device)
    for name in {config.model.number_type, config.sampler_type}:
        require_number_type(config.model.device, name)


def _require_context(path: str, max_context: int) -> None:
    """Raises ConfigError for conversations longer than the built-in decoder has positions; of other models it
    shows once they are loaded."""
    shape = shape_of(path)
    if shape is not None and max_context > shape.max_positions:
        raise ConfigError(
            f"`inference.max_context` is {max_context} but the model has {shape.max_positions} positions "
            f"({path}); set it to {shape.max_positions} or less."
        )


def create_initial_models(config: TrainConfig, run: Path) -> None:
    """Built-in models are made inside the run, so that the run is all that is needed to repeat it."""
    if service_kind(config.backend) is not None:
        return
    for name, policy in config.named_policies.items():
        preset = builtin_preset(policy.path)
        if preset is None or _home(config, name) != name:
            continue
        path = _initial_path(config, name, run)
        shutil.rmtree(path, ignore_errors=True)  # of a start that was refused, perhaps with another seed
        alone = len(config.named_policies) == 1
        create_model(path, preset, config.seed if alone else draw_seed(config.seed, "model", name))
        if config.adapter_of(name).rank:
            log.warning(
                "%s has random weights, and an adapter leaves them as they are: expect less than from "
                "training them (`lora.rank` 0), or give the directory of a model that can do something.",
                policy.path,
            )


def load_initial_models(config: TrainConfig, run: Path, ranks: RankGroup = ALONE) -> dict[str, LoadedModel]:
    """The models that the run starts from, on this rank's device and as many threads as the run works with:
    the ranks of a machine share its cores.

    Weights that nobody changes are in memory once, whichever policies they are of.
    """
    use_threads(config.threads, ranks.num_local)
    if (service := service_kind(config.backend)) is not None:
        return {name: service.load(config) for name in config.named_policies}
    dtype = dtype_named(config.model.number_type)
    constant: dict[tuple[Path, str], LoadedModel] = {}
    models: dict[str, LoadedModel] = {}
    for name, policy in config.named_policies.items():
        path, adapter = _initial_path(config, name, run), config.adapter_of(name)
        changes = policy.trainable and not adapter.rank
        base = path, adapter.base_dtype
        model = None if changes else constant.get(base)
        if model is None:
            model = load_model(
                path,
                device=ranks.device_of(config.model.device),
                dtype=dtype,
                trust_remote_code=config.model.trust_remote_code,
                form=config.model.form,
            )
            if adapter.base_dtype == "nf4":
                with_base_in_4_bits(model, vision=config.model.vision == "lora")
        if not changes:
            constant[base] = model
        elif config.model.vision == "train":
            model.model.train_vision()
        if adapter.rank:
            seed = draw_seed(config.seed, "adapter", name)
            model = with_adapter(model, adapter, seed, vision=config.model.vision == "lora")
        models[name] = model
    return models


def sampler_models(config: TrainConfig, models: Mapping[str, LoadedModel]) -> dict[str, LoadedModel]:
    """Copies of `models` to sample from: in the sampler's data type where that is another one, and in the
    same where it continues during an update. None where it samples from the trainer's own weights."""
    if service_kind(config.backend) is not None:
        return {}
    if config.sampler_differs:
        return sampler_twins(models, dtype_named(config.sampler_type))
    if config.schedule.steps_ahead:
        return {name: replace(model, model=twin_of(model.model)) for name, model in models.items()}
    return {}


def _require_vision(path: str, has_vision: bool, vision: str, rank: int) -> None:
    """Raises ConfigError where `model.vision` asks for what this model or its adapter cannot do."""
    if vision == FROZEN:
        return
    if not has_vision:
        raise ConfigError(
            f"`model.vision` is {vision!r}, but {path} reads text alone; leave it at {FROZEN}, or "
            "train a model that reads images."
        )
    if vision == "train" and rank:
        raise ConfigError(
            f"`model.vision` is 'train' and `lora.rank` {rank}, which leaves all weights as they are; set "
            "`model.vision` to lora, or `lora.rank` to 0."
        )
    if vision == "lora" and not rank:
        raise ConfigError("`model.vision` is 'lora', but `lora.rank` is 0; set it to the adapter's rank.")


def load_saved_models(config: TrainConfig, run: Path) -> dict[str, LoadedModel]:
    """The models that a finished run has made, frozen ones included."""
    paths = saved_model_paths(run, list(config.named_policies))
    dtype = dtype_named(config.model.number_type)
    trusts = config.model.trust_remote_code
    return {name: load_model(path, dtype=dtype, trust_remote_code=trusts) for name, path in paths.items()}


def saved_model_paths(run: Path, names: Sequence[str]) -> dict[str, Path]:
    """Where the models of a finished run are."""
    return {name: run / "model" if len(names) == 1 else run / "models" / name for name in names}


def saved_adapter_paths(run: Path, names: Sequence[str]) -> dict[str, Path]:
    """Where the adapters of a finished run are, of the policies that train one."""
    return {name: run / "adapter" if len(names) == 1 else run / "adapters" / name for name in names}


def combined_sha256(models: Mapping[str, LoadedModel]) -> str:
    """One hash for all parameters of a run; of a run with one policy the one of its model."""
    alone = len(models) == 1
    return parameters_sha256(
        {
            parameter if alone else f"{name}/{parameter}": tensor
            for name, model in models.items()
            for parameter, tensor in model.model.state_dict_hf().items()
        }
    )


def _initial_path(config: TrainConfig, name: str, run: Path) -> Path:
    by_name = config.named_policies
    if builtin_preset(by_name[name].path) is None:
        return Path(by_name[name].path)
    return run / "initial_model" if len(by_name) == 1 else run / "initial_models" / _home(config, name)


def _home(config: TrainConfig, name: str) -> str:
    """Whose initial model the policy has: its own, or, of adapters to one built-in model, the first one's."""
    by_name = config.named_policies
    if not config.adapter_of(name).rank:
        return name
    return next(
        other
        for other, policy in by_name.items()
        if policy.path == by_name[name].path and config.adapter_of(other).rank
    )
