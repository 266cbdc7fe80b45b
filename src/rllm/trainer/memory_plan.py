"""The memory that a run will need, from its configuration alone.

    TrainConfig ──► sizes of each model ──► weights, gradients, optimizer, cache ──┐
               └──► the fullest pass of an update, measured ───────────────────────┴──► the most at one time

Numbers of parameters are counted in `rllm.trainer.memory`, passes are measured in
`rllm.trainer.backends.torch_memory`. Every row is taken to be as long as `inference.max_context` allows: a
run whose conversations are shorter needs less. Python and its libraries come on top.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rllm.config.lora import LoraConfig
from rllm.config.schema import LOCAL, TrainConfig
from rllm.errors import ConfigError, ModelDirectoryError
from rllm.models.bitsandbytes import MOMENTS_BLOCK, nf4_bytes
from rllm.models.builtin import PRESETS, builtin_preset, tiny_config
from rllm.models.decoder import DecoderShape
from rllm.models.foreign import read_config
from rllm.models.packing import ALL
from rllm.store.run_directory import RunDirectory, is_run
from rllm.trainer.backends.torch_memory import PassMemory, PassModel, pass_memory
from rllm.trainer.backends.torch_optimizer import LEAST_IN_8_BITS
from rllm.trainer.free_memory import free_bytes
from rllm.trainer.memory import (
    FLOAT,
    LORA_INPUTS,
    cache_bytes,
    layer_matrices,
    layer_parameters,
    lora_matrices,
    lora_parameters,
    matrix_parameters,
    num_parameters,
    readable,
    vocabulary_parameters,
)
from rllm.types.sample import NOT_SAMPLED, TrainingSample

if TYPE_CHECKING:
    from rllm.config.optimizer import OptimizerConfig

log = logging.getLogger(__name__)

PROCESS = 450_000_000
"""Bytes of Python, torch and all other libraries, and of the threads that episodes run in; measured."""
OF_GATEWAY, OF_ADAPTER = 130_000_000, 130_000_000
"""Bytes that come to it for programs behind the gateway, and for an adapter and its library; measured."""
FRAGMENTS = 0.3
"""Share of the activations that stands between them, free and too small to be used; measured on CPUs."""
MUON_COPIES = 5
"""The number of copies of the largest matrix: the direction, its normed copy, the next one, and two products
with itself."""
SIMILAR = {"gemma3_text": 1.4}
"""Architectures that transformers computes and whose layers have the matrices of the built-in decoder -> the
multiple of its activations that a pass keeps; measured with Gemma 3 270M."""
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
)
"""Keys of config.json that the memory of a similar architecture follows from."""
NO_PASS = PassMemory(most=0, gradients=0, num_kept=0, tokens=0, trained_tokens=0, is_only=True)
BUCKET_BYTES = 4 << 22
"""The size of gradients that ranks add up in one message."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Parts:
    """Bytes of one model that learns, or of all models of a process together."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    reference: int = 0
    """Weights of models that only score: a reference, a teacher."""
    critic: int = 0
    """Weights, gradients and optimizer of a critic with a trunk of its own."""
    cache: int = 0
    """The sampler's keys and values, once a conversation is as long as they may be."""
    checkpoint: int = 0
    """The copy that `checkpoint.background` writes from."""
    process: int = 0
    """See PROCESS."""

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(**{name: value + getattr(other, name) for name, value in self.as_dict().items()})

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}

    @property
    def total(self) -> int:
        return sum(self.as_dict().values())


@dataclass(kw_only=True, slots=True, frozen=True)
class MemoryPlan:
    """Bytes of one process; of several each has as much, or of what is sharded its part."""

    parts: Parts
    activations: int
    """Bytes that the fullest pass of an update keeps for its backward pass."""
    moments: Mapping[str, int]
    """The most at one time, by what the run does then."""
    pass_tokens: int
    """Tokens of the fullest pass of an update."""
    pass_trained_tokens: int
    num_ranks: int = 1
    num_local_ranks: int = 1
    """The number of those that share the machine's memory, or the accelerator's."""
    device: str = "cpu"
    sampler: int = 0
    """The memory of each rollout worker of a cluster, or model server where it has some; 0 where the run
    samples itself."""
    on_cpu: int = 0
    """The memory of the CPU that all processes of a machine need for what `distributed.offload` keeps
    there."""
    free: int = field(default_factory=lambda: free_bytes("cpu"))
    """Bytes that this process, or all of the machine's, may have of its memory or the accelerator's."""

    @property
    def peak(self) -> int:
        return max(self.moments.values()) + self.fragments

    @property
    def fragments(self) -> int:
        """See FRAGMENTS."""
        return round(FRAGMENTS * self.activations) if self.device == "cpu" else 0

    def facts(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            **self.parts.as_dict(),
            "activations": self.activations,
            "fragments": self.fragments,
            "peak": self.peak,
            "moments": dict(self.moments),
            "pass_tokens": self.pass_tokens,
            "pass_trained_tokens": self.pass_trained_tokens,
            "ranks": self.num_ranks,
            "sampler": self.sampler,
            "on_cpu": self.on_cpu,
            "free": self.free,
            "problem": self.problem() or None,
        }

    def problem(self) -> str:
        """A sentence where the run does not fit; empty where it does."""
        if self.on_cpu > (free := free_bytes("cpu")):
            return (
                f"`distributed.offload` keeps {readable(self.on_cpu)} on the CPU, where {readable(free)} are "
                "free; start the run on more machines, or train an adapter (`lora.rank`)."
            )
        num_bytes = self.peak * self.num_local_ranks
        if num_bytes <= self.free:
            return ""
        moment = max(self.moments, key=lambda name: self.moments[name])
        return (
            f"At its {moment} the run needs {readable(num_bytes)}{self._each()}, and {self._place()} has "
            f"{readable(self.free)} free; {self._mend()}."
        )

    def require_fits(self, *, force: bool = False) -> None:
        """Raises ConfigError where the run needs more than is free; with `force` the log says so."""
        problem = self.problem()
        if problem and force:
            log.warning(problem)
        elif problem:
            raise ConfigError(f"{problem[:-1]}. --force starts it all the same.")

    def _each(self) -> str:
        return f" for {self.num_local_ranks} processes" if self.num_local_ranks > 1 else ""

    def _place(self) -> str:
        return "the machine" if self.device == "cpu" else f"`model.device` {self.device}"

    def _mend(self) -> str:
        return (
            "lower `optimizer.micro_batch_tokens`, `inference.num_slots` or `inference.max_context`, set "
            "`inference.cache_tokens`, `optimizer.gradient_checkpointing` or `optimizer.name` to adafactor, "
            "or train an adapter (`lora.rank`)"
        )


def memory_plan(
    config: TrainConfig,
    *,
    num_ranks: int,
    num_local_ranks: int,
    plays: bool = True,
    fixed_rows: "FixedRows | None" = None,
) -> MemoryPlan | None:
    """Plan of one process of the run; None where a service trains, or for a model that the built-in decoder
    does not compute: nothing is known of what that keeps.

    `plays`: whether it samples. `fixed_rows`: the rows of a run that does not; others are taken to be as long
    as they may be.
    """
    if config.backend != LOCAL:
        return None
    if (shapes := _shapes(config)) is None:
        return None
    learners = {name: shape for name, shape in shapes.items() if config.named_policies[name].trainable}
    if not learners:
        return None
    element = 2 if config.model.number_type == "bfloat16" else FLOAT
    shards = config.distributed.ranks_of_a_copy(num_ranks) if num_ranks > 1 else 1
    tensor = config.distributed.ranks_of_a_layer(num_ranks) if num_ranks > 1 else 1
    whole = _parts_of_all(config, shapes, element, tensor)
    parts, on_cpu = whole if shards == 1 else _shard(whole, shards, element), 0
    if config.distributed.offload:
        parts, on_cpu = _offload(parts, own_weights=parts.weights - whole.weights)
    parts = replace(parts, process=process_bytes(config))
    beyond, sampler = _sampling(config, shapes, sampler_element(config), parts), 0
    if fixed_rows is not None or not plays:
        parts, beyond = replace(parts, cache=0), []
    elif config.cluster.is_used:
        sampler = _sampled_weights(config, shapes, element) + parts.cache + PROCESS
        sampler += max(num_bytes for _, num_bytes in beyond)
        parts, beyond = replace(parts, cache=0), []
    for name, shape in learners.items():
        adapter = config.adapter_of(name)
        gradient_sums = whole.gradients if num_ranks // (shards * tensor) > 1 and shards == 1 else 0
        if tensor > 1 and adapter.rank:
            gradient_sums = max(gradient_sums, FLOAT * _on_all_ranks(shape, adapter))
        beyond.append(("optimizer step", _step(config.optimizer, shape, adapter, gradient_sums)))
        # Matrices that share memory are copied to be written, and with an adapter merged before.
        copies = (2 if adapter.rank else 1) if config.model.device == "cpu" else 0
        beyond.append(("end", copies * num_parameters(shape) * element))
    num_local = num_local_ranks if config.model.device == "cpu" else 1  # else each has a card of its own
    free, passes = free_bytes(config.model.device), list[PassMemory]()
    if parts.total * num_local <= free:  # else nothing more needs to be known
        moments = _longest(config, num_ranks // tensor)
        if fixed_rows is not None:
            moments = [("update", list(fixed_rows.rows))]
        for model in (
            each for name, shape in learners.items() for each in _passes(config, name, shape.part(tensor))
        ):
            for moment, rows_of_update in moments:
                model = replace(
                    model,
                    keeps_gradients=shards > 1,
                    whole_groups=fixed_rows is not None and fixed_rows.whole_groups,
                )
                memory = pass_memory(model, rows_of_update)
                passes.append(memory)
                num_bytes = memory.beyond_gradients  # `parts` has them already
                if shards > 1:
                    # Gradients of an update's only pass are not there when it begins.
                    begins_without = memory.is_only and not config.distributed.offload
                    before = memory.gradients // shards if begins_without else 0
                    num_bytes = _most_beyond_shards(memory, model, shards, before)
                beyond.append((moment, num_bytes))
    fullest = max(passes, key=lambda memory: memory.num_kept, default=NO_PASS)
    return MemoryPlan(
        parts=parts,
        activations=fullest.num_kept,
        moments=_moments(config, shapes, element, parts, beyond),
        pass_tokens=fullest.tokens,
        pass_trained_tokens=fullest.trained_tokens,
        num_ranks=num_ranks,
        num_local_ranks=num_local,
        device=config.model.device,
        sampler=sampler,
        on_cpu=on_cpu * num_local_ranks,
        free=free,
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class FixedRows:
    """The rows of the largest update of a run."""

    rows: Sequence[TrainingSample]
    whole_groups: bool
    """See `PassModel.whole_groups`."""


Shapes = Mapping[str, DecoderShape]
"""Sizes of the policies of a run, by name."""


def _moments(
    config: TrainConfig, shapes: Shapes, element: int, parts: Parts, beyond: Sequence[tuple[str, int]]
) -> dict[str, int]:
    """The most bytes at each moment, of those `beyond` the parts that stay."""
    moments: dict[str, int] = {}
    if config.model.device == "cpu":
        # The file stands beside the model until it is read; a base is whole before it is in 4 bits.
        of_models = [
            num_parameters(shape) * element * (2 if config.adapter_of(name).base_dtype == "nf4" else 1)
            for name, shape in shapes.items()
        ]
        moments["start"] = parts.process + parts.weights + max(of_models)
    for moment, num_bytes in beyond:
        moments[moment] = max(moments.get(moment, 0), parts.total + num_bytes)
    return moments


def _parts_of_all(config: TrainConfig, shapes: Shapes, element: int, tensor: int) -> Parts:
    """Parts of all policies; weights that several of them do not change are there once."""
    parts, shared_bases = Parts(), set[tuple[str, str]]()
    for name, policy in config.named_policies.items():
        adapter = config.adapter_of(name)
        changes, base = policy.trainable and not adapter.rank, (policy.path, adapter.base_dtype)
        parts += _parts(
            config,
            name,
            shapes[name],
            adapter,
            element,
            of_rank=shapes[name].part(tensor),
            is_trainable=policy.trainable,
            has_weights=changes or base not in shared_bases,
        )
        if not changes:
            shared_bases.add(base)
    return parts + Parts(reference=_teacher_bytes(config, element))


def _teacher_bytes(config: TrainConfig, element: int) -> int:
    """Weights of a teacher in this process; 0 where there is none, and for one of unknown sizes."""
    if not config.distill.teacher or config.distill.is_server:
        return 0
    path = Path(config.distill.teacher)
    path = RunDirectory.read(path).model_path if is_run(path) else path
    shape = plan_shape(str(path)) if (path / "config.json").is_file() else None
    return (
        0 if shape is None else element * (num_parameters(shape) + 2 * shape.max_positions * shape.head_dim)
    )


def shape_of(path: str) -> DecoderShape | None:
    """Shape of a policy's initial model; None where the built-in decoder does not compute it.

    Raises ModelDirectoryError for numbers in its config.json that no model has.
    """
    try:
        return DecoderShape.from_config(initial_config(path))
    except ModelDirectoryError as error:
        raise ModelDirectoryError(f"{Path(path) / 'config.json'} {error}") from error


def plan_shape(path: str) -> DecoderShape | None:
    """Return the sizes that the memory of a policy's initial model is planned by: its own, or of an
    architecture in SIMILAR those of the built-in decoder with the same matrices; None for any other.

    Raises ModelDirectoryError for numbers in its config.json that no model has.
    """
    if (shape := shape_of(path)) is not None or builtin_preset(path) is not None:
        return shape
    config = initial_config(path)
    if config.get("model_type") not in SIMILAR:
        return None
    sizes = {name: config[name] for name in SIZES if name in config}
    return DecoderShape.from_config({"tie_word_embeddings": True, **sizes, "model_type": "qwen3"})


def activation_factor(path: str) -> float:
    """Return the multiple of the built-in decoder's activations that a policy's initial model keeps."""
    if builtin_preset(path) is not None:
        return 1.0
    return SIMILAR.get(str(initial_config(path).get("model_type")), 1.0)


def initial_config(path: str) -> dict[str, Any]:
    """config.json of a policy's initial model."""
    preset = builtin_preset(path)
    return read_config(Path(path)) if preset is None else tiny_config(PRESETS[preset])


def _longest(config: TrainConfig, num_ranks: int) -> list[tuple[str, list[TrainingSample]]]:
    """(moment, rows of one update of one process), each as long as it may be.

    In a conversation of one turn all that is not sampled is the prompt. Of longer ones it is not known: those
    of programs are taken to have half of them as a prompt, others to share nothing. Of rows that fill several
    passes, so many are made as fill two.
    """
    rollout, length = config.rollout, config.inference.max_context
    num_trained = min(rollout.max_turns * rollout.max_tokens_per_turn or length, length - 1)
    enough = 2 * (config.optimizer.micro_batch_tokens or ALL) // num_trained + 2
    is_program, is_one_turn = bool(config.task.program), rollout.max_turns == 1
    moments: list[tuple[str, list[TrainingSample]]] = []
    if config.steps:
        groups = -(-rollout.tasks_per_step // (config.algorithm.updates_per_step * num_ranks))
        answer = min(num_trained, length // 2) if is_program else num_trained
        is_shared = is_program or is_one_turn
        rows = like_rows(min(groups, enough), rollout.group_size, length, answer, is_shared=is_shared)
        moments.append(("update", rows))
    if config.warm_start.steps:
        demonstrations = -(-config.warm_start.episodes_per_step // num_ranks)
        rows = like_rows(min(demonstrations, enough), 1, length, num_trained, is_shared=False)
        moments.append(("warm start", rows))
    return moments


def like_rows(
    num_groups: int, group_size: int, length: int, num_trained: int, *, is_shared: bool
) -> list[TrainingSample]:
    """Rows of `length` tokens, the last `num_trained` of them sampled; with `is_shared` the attempts of a
    group share the prompt."""
    sampled_T = np.arange(length) >= length - num_trained
    rows: list[TrainingSample] = []
    for group in range(num_groups):
        prompt_id = group * (group_size + 1)  # tokens of one id are the same in all rows that have it
        for attempt in range(group_size):
            ids_T = np.where(sampled_T | (not is_shared), prompt_id + 1 + attempt, prompt_id)
            rows.append(
                TrainingSample(
                    token_ids_T=ids_T,
                    policy_versions_T=np.where(sampled_T, 0, NOT_SAMPLED),
                    logprobs_T=np.zeros(length, np.float32),
                    advantages_T=np.ones(length, np.float32),
                    group_key=(f"t{group}", "agent"),
                    order_key=(f"t{group}", attempt, 0, 0),
                )
            )
    return rows


def process_bytes(config: TrainConfig) -> int:
    """Bytes of a process beside its models and what they compute with."""
    has_adapter = any(config.adapter_of(name).rank for name in config.named_policies)
    return PROCESS + OF_GATEWAY * bool(config.task.program) + OF_ADAPTER * has_adapter


def stored_parts(config: TrainConfig) -> Parts | None:
    """Parts of a run in one process that follow from its models, without the cache; None where the built-in
    decoder does not compute one of them."""
    shapes = _shapes(config)
    if shapes is None:
        return None
    element = 2 if config.model.number_type == "bfloat16" else FLOAT
    return replace(_parts_of_all(config, shapes, element, 1), cache=0, process=process_bytes(config))


def learned_models(config: TrainConfig) -> list[PassModel]:
    """The models that learn, critics among them, as their passes are measured."""
    return [
        model
        for name, shape in (_shapes(config) or {}).items()
        if config.named_policies[name].trainable
        for model in _passes(config, name, shape)
    ]


def _shapes(config: TrainConfig) -> "dict[str, DecoderShape] | None":
    shapes: dict[str, DecoderShape] = {}
    for name, policy in config.named_policies.items():
        if (shape := plan_shape(policy.path)) is None:
            return None
        shapes[name] = shape
    return shapes


def _parts(
    config: TrainConfig,
    name: str,
    shape: DecoderShape,
    adapter: LoraConfig,
    element: int,
    *,
    of_rank: DecoderShape,
    is_trainable: bool,
    has_weights: bool,
) -> Parts:
    """Memory of one policy, of whose layers a rank computes `of_rank`. AdamW keeps two float32 moments a
    parameter (Kingma and Ba 2014, arXiv:1412.6980), Muon one of a matrix; in bfloat16 a float32 copy comes to
    them (Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1).
    """
    whole = num_parameters(shape)
    rotation = 2 * element * shape.max_positions * shape.head_dim
    weights = (_base_bytes(shape, adapter, element) + rotation) * has_weights
    inference = config.inference
    of_sampler = sampler_element(config)
    cache = cache_bytes(shape, inference.slots, inference.max_context, of_sampler, inference.cache_tokens)
    if config.sampler_differs:
        weights += whole * of_sampler * has_weights
    if not is_trainable:
        return Parts(weights=weights, cache=cache)
    num_trained, of_trained = num_parameters(of_rank), element
    if of_rank != shape:  # beside the sampler's
        weights += shape.num_layers * matrix_parameters(of_rank) * element
    whole_adapter = 0
    if adapter.rank:
        targets = _targets(adapter)
        whole_adapter = lora_parameters(shape, adapter.rank, targets)
        num_trained, of_trained = lora_parameters(of_rank, adapter.rank, targets), FLOAT
        weights += whole_adapter * FLOAT
        if of_rank != shape:
            weights += (num_trained - _on_all_ranks(shape, adapter)) * FLOAT
    if config.sampler_differs:
        weights += whole_adapter * FLOAT
    elif config.schedule.steps_ahead:  # beside the sampler's, which continues meanwhile
        weights += num_trained * of_trained
    state = _optimizer_bytes(config.optimizer, of_rank, adapter, num_trained, of_trained)
    # Masters are the weights that a checkpoint has, so they are in it once.
    snapshot = num_trained * FLOAT + state - _masters(num_trained, of_trained)
    reference = 0
    if config.algorithm.kl_coef:
        reference_bytes = (
            whole_adapter * FLOAT * (config.warm_start.steps > 0)
        )  # without one, the model without its adapter
        reference = reference_bytes if adapter.rank else whole * element + rotation
    critic = 0
    if config.critic.trunk == "separate" and config.needs_critic(name):
        own = num_parameters(of_rank)
        of_critic = _optimizer_bytes(config.optimizer, of_rank, LoraConfig(), own, element)
        critic = own * (element + FLOAT) + rotation + of_critic
        snapshot += own * FLOAT + of_critic - _masters(own, element)
    return Parts(
        weights=weights,
        gradients=num_trained * FLOAT,
        optimizer=state,
        reference=reference,
        critic=critic,
        cache=cache,
        checkpoint=snapshot * config.checkpoint.background,
    )


def sampler_element(config: TrainConfig) -> int:
    """Bytes of a number in the sampler's weights and cache."""
    return 2 if config.sampler_type == "bfloat16" else FLOAT


def _base_bytes(shape: DecoderShape, adapter: LoraConfig, element: int) -> int:
    """The weights of a model, or those that its adapter stands beside."""
    if adapter.base_dtype != "nf4":
        return num_parameters(shape) * element
    others = num_parameters(shape) - shape.num_layers * matrix_parameters(shape)
    return others * element + shape.num_layers * sum(nf4_bytes(each) for each in layer_matrices(shape))


def _on_all_ranks(shape: DecoderShape, adapter: LoraConfig) -> int:
    """Parameters of an adapter that ranks of one layer do not split: of each target the factor that meets the
    states."""
    return adapter.rank * shape.num_layers * len(_targets(adapter)) * shape.hidden_size


def _masters(num_trained: int, element: int) -> int:
    """The bytes of the master copies of weights in 16 bits."""
    return FLOAT * num_trained if element != FLOAT else 0


def _optimizer_bytes(
    optimizer: "OptimizerConfig", shape: DecoderShape, adapter: LoraConfig, num_trained: int, element: int
) -> int:
    if optimizer.name == "adafactor":  # of each matrix a number a row and a column: nothing beside the rest
        return _masters(num_trained, element)
    if optimizer.name == "adamw8bit":
        matrices = (
            lora_matrices(shape, adapter.rank, _targets(adapter))
            if adapter.rank
            else layer_matrices(shape) * shape.num_layers
        )
        in_8_bits = [each for each in matrices if each >= LEAST_IN_8_BITS]
        scales = sum(-(-each // MOMENTS_BLOCK) for each in in_8_bits)
        in_32_bits = num_trained - sum(in_8_bits)
        return _masters(num_trained, element) + 2 * (sum(in_8_bits) + FLOAT * (scales + in_32_bits))
    with_muon = 0
    if optimizer.name == "muon":
        with_muon = num_trained if adapter.rank else shape.num_layers * matrix_parameters(shape)
    return _masters(num_trained, element) + FLOAT * (2 * num_trained - with_muon)


def _targets(adapter: LoraConfig) -> frozenset[str]:
    """Raises ConfigError for a layer that a decoder does not have."""
    if unknown := [name for name in adapter.targets if name not in LORA_INPUTS]:
        raise ConfigError(
            f"`lora.targets` has {unknown[0]!r}, but the layers of a decoder are "
            f"{', '.join(sorted(LORA_INPUTS))}; choose among them, or leave it out for all."
        )
    return frozenset(adapter.targets or LORA_INPUTS)


def _passes(config: TrainConfig, name: str, shape: DecoderShape) -> list[PassModel]:
    """Passes of the policy, and of its critic where that has a trunk of its own."""
    critic = PassModel(
        shape=shape,
        optimizer=config.optimizer,
        number_type=config.model.number_type,
        is_critic=True,
        activations=activation_factor(config.named_policies[name].path),
    )
    policy = replace(
        critic,
        lora=config.adapter_of(name),
        is_critic=False,
        with_entropy=config.algorithm.entropy_coef != 0.0,
    )
    _targets(policy.lora)
    has_critic = config.critic.trunk == "separate" and config.needs_critic(name)
    return [policy, critic] if has_critic else [policy]


def _shard(parts: Parts, shards: int, element: int) -> Parts:
    """Parts of a rank that has one of so many parts of what is trained (Rajbhandari et al. 2020, stage 3):
    the sampler's weights stay whole, and beside them stand shards, in 16 bits those of the float32 copies,
    which count as the optimizer's.
    """
    own = parts.gradients if element == FLOAT else 0
    return replace(
        parts,
        weights=parts.weights + own // shards,
        gradients=parts.gradients // shards,
        optimizer=parts.optimizer // shards,
        critic=parts.critic // shards,
        checkpoint=parts.checkpoint // shards,
    )


def _offload(parts: Parts, *, own_weights: int) -> tuple[Parts, int]:
    """Parts that stay on the GPU of a rank, and the bytes that it keeps on the CPU; `own_weights` are those
    of its shards among the weights."""
    on_gpu = replace(
        parts, weights=parts.weights - own_weights, gradients=0, optimizer=0, critic=0, checkpoint=0
    )
    return on_gpu, parts.total - on_gpu.total


def _most_beyond_shards(memory: PassMemory, of: PassModel, shards: int, before: int) -> int:
    """The most bytes of a pass beyond this rank's shards, gradients among them, `before` of which the only
    pass of an update begins without.

    Embeddings and output layer are whole all the time. Backward, a layer is whole, and the one below is
    gathered already (FSDP2); behind the last one, the gradients of the one above are on their way to other
    ranks as well, and what was gathered in one piece may not be free yet.
    """
    if of.lora.rank:
        return memory.most - before  # an adapter is gathered at once
    element, activations = 2 if of.number_type == "bfloat16" else FLOAT, memory.beyond_gradients
    layer, vocabulary = layer_parameters(of.shape), vocabulary_parameters(of.shape)
    at_last = (2 * element + FLOAT) * layer
    at_others = at_last + (element + FLOAT) * layer + FLOAT * layer // shards
    if not of.optimizer.gradient_checkpointing:  # else a layer keeps next to nothing
        at_others -= memory.num_kept // of.shape.num_layers
    output = FLOAT * of.shape.vocab_size * of.shape.hidden_size
    return element * vocabulary + max(
        activations + output + max(at_last, at_others) - before, 2 * FLOAT * vocabulary
    )


def _step(optimizer: "OptimizerConfig", shape: DecoderShape, adapter: LoraConfig, gradient_sums: int) -> int:
    """Bytes that a step works with, beyond what stays. `gradient_sums`: of gradients that ranks add up."""
    queries = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    largest = shape.hidden_size * (adapter.rank or max(2 * shape.intermediate_size, queries))
    together = min(gradient_sums, max(BUCKET_BYTES, FLOAT * vocabulary_parameters(shape)))
    return max(together, MUON_COPIES * FLOAT * largest if optimizer.name == "muon" else 0)


def _sampled_weights(config: TrainConfig, shapes: Shapes, element: int) -> int:
    """Bytes of what a process holds that only samples, of all policies."""
    num_bytes, shared_bases = 0, set[tuple[str, str]]()
    for name, policy in config.named_policies.items():
        shape, adapter = shapes[name], config.adapter_of(name)
        changes = policy.trainable and not adapter.rank
        base = policy.path, adapter.base_dtype
        if changes or base not in shared_bases:
            num_bytes += _base_bytes(shape, adapter, element)
            num_bytes += 2 * element * shape.max_positions * shape.head_dim
        if not changes:
            shared_bases.add(base)
        if adapter.rank:
            num_bytes += FLOAT * lora_parameters(shape, adapter.rank, _targets(adapter))
    return num_bytes


def _sampling(config: TrainConfig, shapes: Shapes, element: int, parts: Parts) -> list[tuple[str, int]]:
    """The memory of reading prompts, and of the cache while it grows: its keys are there twice."""
    inference, beyond = config.inference, list[tuple[str, int]]()
    tokens = min(inference.max_prefill_tokens, inference.slots * inference.max_context)
    for shape in shapes.values():
        prompts = element * tokens * _states_of_reading(shape)
        prompts += 4 * FLOAT * shape.vocab_size * min(inference.slots, config.rollout.num_parallel)
        growth = (
            cache_bytes(shape, inference.slots, inference.max_context, element, inference.cache_tokens) // 2
        )
        beyond.append(("rollout", max(prompts, growth)))
    return beyond


def _states_of_reading(shape: DecoderShape) -> int:
    """Numbers for each token of a prompt while one layer reads it."""
    queries, keys = shape.num_heads * shape.head_dim, 2 * shape.num_kv_heads * shape.head_dim
    return 5 * shape.hidden_size + 3 * queries + 3 * keys // 2 + 4 * shape.intermediate_size
