"""The memory that a run will need, from its configuration alone.

    TrainConfig ──► sizes of each model ──► weights, gradients, optimizer, cache ──┐
               └──► the fullest pass of an update ──► activations ─────────────────┴──► the most at one time

Formulas are in `rllm.trainer.memory`. Every row is taken to be as long as `inference.max_context` allows: a
run whose conversations are shorter needs less. Python and its libraries come on top.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllm.config.lora import LoraConfig
from rllm.config.schema import LOCAL, TrainConfig
from rllm.errors import ConfigError, ModelDirectoryError
from rllm.models.bitsandbytes import MOMENTS_BLOCK, nf4_bytes
from rllm.models.builtin import PRESETS, tiny_config
from rllm.models.decoder import DecoderShape
from rllm.models.devices import accelerator_bytes
from rllm.models.foreign import read_config
from rllm.models.packing import LEAST_SHARED
from rllm.trainer.backends.logprobs import COPIES
from rllm.trainer.backends.torch_optimizer import LEAST_IN_8_BITS
from rllm.trainer.memory import (
    FLOAT,
    LORA_INPUTS,
    MicroBatch,
    Pass,
    PassMemory,
    cache_bytes,
    fullest,
    layer_matrices,
    layer_parameters,
    lora_matrices,
    lora_parameters,
    matrix_parameters,
    num_parameters,
    readable,
    vocabulary_parameters,
)

if TYPE_CHECKING:
    from rllm.config.optimizer import OptimizerConfig

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where a container sees what the kernel holds it to: cgroup version 2, then 1."""
LIBRARIES = 12_000_000
"""The memory of an update beyond what torch hands out; measured with benchmarks/memory.py."""
MUON_COPIES = 5
"""The number of copies of the largest matrix: the direction, its normed copy, the next one, and two products
with itself."""
BUCKET_BYTES = 4 << 22
"""The size of gradients that ranks add up in one message."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Parts:
    """Bytes of one model that learns, or of all models of a process together."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    reference: int = 0
    critic: int = 0
    """Weights, gradients and optimizer of a critic with a trunk of its own."""
    cache: int = 0
    """The sampler's keys and values, once a conversation is as long as they may be."""
    checkpoint: int = 0
    """The copy that `checkpoint.background` writes from."""
    libraries: int = 0
    """The memory that torch takes for itself with its first work; see LIBRARIES."""

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
    """The memory of the fullest pass of an update, with its logits, at most."""
    moments: Mapping[str, int]
    """The most at one time, by what the run does then."""
    batch: MicroBatch
    """The fullest pass of an update."""
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
    limit: int = field(default_factory=lambda: machine_bytes("cpu"))
    """The memory of the machine, or of the accelerator."""

    @property
    def peak(self) -> int:
        return max(self.moments.values())

    def facts(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            **self.parts.as_dict(),
            "activations": self.activations,
            "peak": self.peak,
            "moments": dict(self.moments),
            "pass_tokens": self.batch.num_tokens,
            "pass_trained_tokens": self.batch.num_trained,
            "ranks": self.num_ranks,
            "sampler": self.sampler,
            "on_cpu": self.on_cpu,
            "machine": self.limit,
            "warning": self.warning() or None,
        }

    def warning(self) -> str:
        """A sentence where the run may not fit; empty where it does."""
        if self.on_cpu > (memory := machine_bytes("cpu")):
            return (
                f"What `distributed.offload` keeps on the CPU may need {readable(self.on_cpu)}, and the "
                f"machine has {readable(memory)}; start the run on more machines, or train an adapter "
                "(`lora.rank`)."
            )
        num_bytes = self.peak * self.num_local_ranks
        if num_bytes <= self.limit:
            return ""
        moment = max(self.moments, key=lambda each: self.moments[each])
        return (
            f"At its {moment} the run may need {readable(num_bytes)}{self._each()}, and {self._place()} has "
            f"{readable(self.limit)}; {self._mend()}."
        )

    def require_fits(self) -> None:
        """Raises ConfigError where not even what every update needs at the same time fits: weights, gradients
        and the optimizer's state."""
        parts = self.parts
        certain = (parts.weights + parts.gradients + parts.optimizer) * self.num_local_ranks
        # With swap a run is slow and not impossible: `warning` leaves it out, and only a refusal counts it.
        limit = self.limit + (_swap_bytes() if self.device == "cpu" else 0)
        if certain > limit:
            sizes = (readable(each) for each in (parts.weights, parts.gradients, parts.optimizer))
            raise ConfigError(
                f"Weights, gradients and optimizer of `model.path` ({' + '.join(sizes)}) take "
                f"{readable(certain)}{self._each()}, and {self._place()} has {readable(limit)}: train an "
                'adapter (`lora.rank`), a smaller model, with `optimizer.name = "adafactor"`, or in fewer '
                "processes on each machine."
            )

    def _each(self) -> str:
        return f" for {self.num_local_ranks} processes" if self.num_local_ranks > 1 else ""

    def _place(self) -> str:
        return "the machine" if self.device == "cpu" else f"`model.device` {self.device}"

    def _mend(self) -> str:
        return (
            "lower `optimizer.micro_batch_tokens`, `inference.num_slots` or `inference.max_context`, set "
            "`inference.cache_tokens` or `optimizer.gradient_checkpointing`, or train an adapter "
            "(`lora.rank`)"
        )


def memory_plan(config: TrainConfig, *, num_ranks: int, num_local_ranks: int) -> MemoryPlan | None:
    """Plan of one process of the run; None where a service trains, or for a model that the built-in decoder
    does not compute: nothing is known of what that keeps.
    """
    if config.backend != LOCAL:
        return None
    by_name = config.named_policies
    shapes = {name: shape_of(policy.path) for name, policy in by_name.items()}
    if None in shapes.values():
        return None
    element = 2 if config.model.number_type == "bfloat16" else FLOAT
    shards = config.distributed.ranks_of_a_copy(num_ranks) if num_ranks > 1 else 1
    tensor = config.distributed.ranks_of_a_layer(num_ranks) if num_ranks > 1 else 1
    rows = _rows(config, num_ranks // tensor)
    parts, moments, batches = Parts(), dict[str, int](), list[tuple[int, MicroBatch]]()
    shared_bases, loads = set[tuple[str, str]](), list[int]()
    peaks: list[tuple[str, int]] = []
    for name, policy in by_name.items():
        shape = shapes[name]
        assert shape is not None, "what has no shape has no plan"
        adapter = config.adapter_of(name)
        changes = policy.trainable and not adapter.rank
        base = policy.path, adapter.base_dtype
        is_first = changes or base not in shared_bases
        if not changes:
            shared_bases.add(base)
        of_rank = shape.part(tensor)
        own = _parts(
            config,
            name,
            shape,
            adapter,
            element,
            of_rank=of_rank,
            is_trainable=policy.trainable,
            has_weights=is_first,
        )
        parts += own
        if not policy.trainable:
            continue
        for what, rows_of_what, group_size in rows:
            batch = fullest(rows_of_what, group_size, config.optimizer.micro_batch_tokens)
            passes = _passes(config, name, of_rank, adapter, element, batch)
            # `fullest` hands back what it was given where one pass holds all rows.
            is_only = batch is rows_of_what
            for each, gradients in passes:
                memory = each.training()
                batches.append((memory.most, batch))
                if shards > 1:
                    begins_without = is_only and not config.distributed.offload  # its gradients, on the GPU
                    peaks.append(
                        (what, _most_beyond_shards(memory, each, gradients, shards, is_only=begins_without))
                    )
                else:
                    # `parts` has all gradients already.
                    peaks.append((what, _update(memory, each, gradients, is_only=is_only) - gradients))
            if config.algorithm.kl_coef or config.critic.is_on:
                peaks.append(("scoring", passes[0][0].scoring()))
        gradient_sums = own.gradients if num_ranks // (shards * tensor) > 1 and shards == 1 else 0
        if tensor > 1 and adapter.rank:
            gradient_sums = max(gradient_sums, FLOAT * _on_all_ranks(shape, adapter))
        peaks.append(("optimizer step", _step(config.optimizer, shape, adapter, gradient_sums)))
        if adapter.base_dtype == "nf4" and config.model.device == "cpu":
            loads.append(num_parameters(shape) * element)
    if not batches:
        return None
    whole_weights, on_cpu = parts.weights, 0
    parts = parts if shards == 1 else _shard(parts, shards, element)
    if config.distributed.offload:
        parts, on_cpu = _offload(parts, own_weights=parts.weights - whole_weights)
    parts = replace(parts, libraries=LIBRARIES)
    sampling, sampler = _sampling(config, shapes, _sampler_element(config), parts), 0
    if config.cluster.is_used:
        sampler = _sampled_weights(config, shapes, element) + parts.cache + LIBRARIES
        sampler += max(beyond for _, beyond in sampling)
        parts, sampling = replace(parts, cache=0), []
    for what, beyond in [*peaks, *sampling]:
        moments[what] = max(moments.get(what, 0), parts.total + beyond)
    if loads:  # a base is whole before it is in 4 bits
        moments["start"] = max(loads)
    most, batch = max(batches, key=lambda each: each[0])
    return MemoryPlan(
        parts=parts,
        activations=most,
        moments=moments,
        batch=batch,
        num_ranks=num_ranks,
        # Each rank has a card of its own, and on the CPU they share one memory.
        num_local_ranks=num_local_ranks if config.model.device == "cpu" else 1,
        device=config.model.device,
        sampler=sampler,
        on_cpu=on_cpu * num_local_ranks,
        limit=machine_bytes(config.model.device),
    )


def shape_of(path: str) -> DecoderShape | None:
    """Shape of a policy's initial model; None where the built-in decoder does not compute it.

    Raises ModelDirectoryError for numbers in its config.json that no model has.
    """
    try:
        return DecoderShape.from_config(initial_config(path))
    except ModelDirectoryError as error:
        raise ModelDirectoryError(f"{Path(path) / 'config.json'} {error}") from error


def initial_config(path: str) -> dict[str, Any]:
    """config.json of a policy's initial model."""
    _, separator, preset = path.partition(":")
    return tiny_config(PRESETS[preset]) if separator else read_config(Path(path))


def machine_bytes(device: str) -> int:
    """Memory of a device; of the CPU the machine's, or what a container may use of it."""
    if device != "cpu":
        return accelerator_bytes(device)
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, CGROUP_LIMITS):
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits)


def _swap_bytes() -> int:
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("SwapTotal:"))


def _rows(config: TrainConfig, num_ranks: int) -> list[tuple[str, MicroBatch, int]]:
    """(moment, all rows of one update of one process, how many share a prompt), each as long as it may be.

    In a conversation of one turn all that is not sampled is the prompt. What longer ones begin with is not
    known before they are played: they are taken to share nothing.
    """
    rollout, length = config.rollout, config.inference.max_context - 1
    num_sampled = rollout.max_turns * rollout.max_tokens_per_turn or length
    num_trained = min(num_sampled, length)
    prompt = length + 1 - num_trained
    is_shared = rollout.max_turns == 1 < rollout.group_size and prompt < length <= prompt * LEAST_SHARED
    prefix = prompt if is_shared else 0
    groups = -(-rollout.tasks_per_step // (config.algorithm.updates_per_step * num_ranks))
    of_update = MicroBatch(
        num_prefixes=groups if prefix else 0,
        prefix=prefix,
        num_rows=groups * rollout.group_size,
        suffix=length - prefix,
        trained_tokens=num_trained,
    )
    moments = [("update", of_update, rollout.group_size)] if config.steps else []
    if config.warm_start.steps:
        demonstrations = -(-config.warm_start.episodes_per_step // num_ranks)
        moments.append(("warm start", MicroBatch.apart(demonstrations, length, num_trained), 1))
    return moments


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
    of_sampler = _sampler_element(config)
    cache = cache_bytes(shape, inference.num_slots, inference.max_context, of_sampler, inference.cache_tokens)
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
    elif config.schedule.steps_ahead:  # beside the sampler's, which goes on meanwhile
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


def _sampler_element(config: TrainConfig) -> int:
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


def _passes(
    config: TrainConfig,
    name: str,
    shape: DecoderShape,
    adapter: LoraConfig,
    element: int,
    batch: MicroBatch,
) -> list[tuple[Pass, int]]:
    """Passes of the policy, and of its critic where that has a trunk of its own, each with its gradients."""
    optimizer = config.optimizer
    policy: dict[str, Any] = {}
    gradients = FLOAT * num_parameters(shape)
    if adapter.rank:
        targets = _targets(adapter)
        gradients = FLOAT * lora_parameters(shape, adapter.rank, targets)
        policy = {
            "kept_inputs": frozenset(LORA_INPUTS[target] for target in targets),
            "lora_columns": adapter.rank * len(targets),
            "trains_vocabulary": False,
        }
    both: dict[str, Any] = {
        "shape": shape,
        "batch": batch,
        "element": element,
        "recomputes": optimizer.gradient_checkpointing,
        "upcasts_norms": element != FLOAT and config.model.device == "cpu",
    }
    tokens = max(1, int(optimizer.logits_mb * 1e6 / (COPIES * FLOAT * shape.vocab_size)))
    entropy = config.algorithm.entropy_coef != 0.0
    passes = [(Pass(**both, **policy, logit_tokens=tokens, with_entropy=entropy), gradients)]
    if config.critic.trunk == "separate" and config.needs_critic(name):
        passes.append((Pass(**both, logit_tokens=0), FLOAT * num_parameters(shape)))
    return passes


def _update(memory: PassMemory, of: Pass, gradients: int, *, is_only: bool) -> int:
    of_layer = gradients // of.shape.num_layers
    if of.trains_vocabulary:
        of_layer = FLOAT * layer_parameters(of.shape)
    of_vocabulary = FLOAT * of.shape.vocab_size * of.shape.hidden_size if of.trains_vocabulary else 0
    return memory.with_gradients(gradients, of_layer=of_layer, of_vocabulary=of_vocabulary, is_only=is_only)


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


def _most_beyond_shards(memory: PassMemory, of: Pass, gradients: int, shards: int, *, is_only: bool) -> int:
    """The most bytes of a pass beyond this rank's shards, gradients among them, which the only pass of an
    update begins without.

    Embeddings and output layer are whole all the time. Backward, a layer is whole, and the one below is
    gathered already (FSDP2); behind the last one, the gradients of the one above are on their way to other
    ranks as well, and what was gathered in one piece may not be free yet.
    """
    before = gradients // shards if is_only else 0
    if not of.trains_vocabulary:
        return memory.most + gradients - before  # an adapter is gathered at once
    layer, vocabulary = layer_parameters(of.shape), vocabulary_parameters(of.shape)
    at_last = (2 * of.element + FLOAT) * layer
    at_others = at_last + (of.element + FLOAT) * layer + FLOAT * layer // shards - memory.of_layer
    output = FLOAT * of.shape.vocab_size * of.shape.hidden_size
    return of.element * vocabulary + max(
        memory.at_loss + output * memory.in_chunks - before,
        memory.at_layer + output + max(at_last, at_others) - before,
        memory.at_embedding + 2 * FLOAT * vocabulary,
    )


def _step(optimizer: "OptimizerConfig", shape: DecoderShape, adapter: LoraConfig, gradient_sums: int) -> int:
    """Bytes that a step works with, beyond what stays. `gradient_sums`: of gradients that ranks add up."""
    queries = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    largest = shape.hidden_size * (adapter.rank or max(2 * shape.intermediate_size, queries))
    together = min(gradient_sums, max(BUCKET_BYTES, FLOAT * vocabulary_parameters(shape)))
    return max(together, MUON_COPIES * FLOAT * largest if optimizer.name == "muon" else 0)


def _sampled_weights(config: TrainConfig, shapes: Mapping[str, DecoderShape | None], element: int) -> int:
    """Bytes of what a process holds that only samples, of all policies."""
    num_bytes, shared_bases = 0, set[tuple[str, str]]()
    for name, policy in config.named_policies.items():
        shape, adapter = shapes[name], config.adapter_of(name)
        assert shape is not None, "what has no shape has no plan"
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


def _sampling(
    config: TrainConfig, shapes: Mapping[str, DecoderShape | None], element: int, parts: Parts
) -> list[tuple[str, int]]:
    """The memory of reading prompts, and of the cache while it grows: its keys are there twice."""
    inference, beyond = config.inference, list[tuple[str, int]]()
    tokens = min(inference.max_prefill_tokens, inference.num_slots * inference.max_context)
    for shape in shapes.values():
        assert shape is not None, "what has no shape has no plan"
        read = MicroBatch.apart(tokens, 1, 1)
        prompts = Pass(shape=shape, batch=read, element=element, logit_tokens=0).scoring()
        prompts += 4 * FLOAT * shape.vocab_size * min(inference.num_slots, config.rollout.num_parallel)
        growth = (
            cache_bytes(shape, inference.num_slots, inference.max_context, element, inference.cache_tokens)
            // 2
        )
        beyond.append(("rollout", max(prompts, growth)))
    return beyond
