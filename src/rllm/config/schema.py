"""Every key that a training run knows, with its meaning, default and limit.

Sections are dataclasses; `validate` of each raises ConfigError before any work starts. There is no key that
some part of the program ignores: what a run cannot honour is refused here or by the backend that is asked to
run it.
"""

import math
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from rllm.config.algorithm import AlgorithmConfig
from rllm.config.cluster import ClusterConfig
from rllm.config.critic import CriticConfig
from rllm.config.curriculum import CurriculumConfig
from rllm.config.distill import PROMPTS, DistillConfig, validate_distillation
from rllm.config.distributed import HERE, DistributedConfig
from rllm.config.filters import FiltersConfig
from rllm.config.learning import (
    WITH_CRITIC,
    WITH_GAMMA,
    WITH_GREEDY,
    estimator_keys,
    validate_estimators,
    validate_first_attempts,
    validate_groups,
    validate_overlong,
)
from rllm.config.limits import at_least, finite, one_of, positive, seed_in_range, share, unused
from rllm.config.lora import LoraConfig
from rllm.config.optimizer import OptimizerConfig
from rllm.config.policies import (
    ONLY_POLICY,
    PolicyConfig,
    RoleConfig,
    TruncationConfig,
    adapter_of,
    policy_of_role,
    validate_adapters,
    validate_policies,
    validate_servers,
)
from rllm.config.schedule import ScheduleConfig, choose_correction, validate_schedule
from rllm.config.tracking import TrackingConfig
from rllm.errors import ConfigError
from rllm.types.call_budget import CallBudget, budget_problem
from rllm.types.chat_forms import THINKING, TOOL_FORMS, ChatForm

LOCAL = "local"
"""The backend that trains on torch, in the process of the sampler."""
FROZEN = "frozen"
"""The value of `model.vision` for a part that does not learn."""
DTYPES = ("auto", "float32", "bfloat16")
"""Data types that a model can compute in, and the word for the usual one."""


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    path: str = "builtin:tiny"
    """`builtin:tiny`, `builtin:deep`, `builtin:small`, `builtin:tiny-vl`, a directory in Hugging Face format,
    a finished run, a GGUF file, a name of `rllm model pull`, or one of the hub."""
    device: str = "cpu"
    """A torch device: `cpu`, `cuda`, `cuda:1`."""
    dtype: str = "auto"
    """The data type of weights, activations and the sampler's cache: `float32`, `bfloat16`, or `auto`, which
    is bfloat16 on CUDA and float32 on a CPU: CPUs without instructions for bfloat16 are ten times slower with
    it. The optimizer keeps float32 copies of bfloat16 weights."""
    trust_remote_code: bool = False
    """Run Python that the model's directory brings along, where transformers has none for the model. Read it
    first: it may do all that you may."""
    tool_form: str = "auto"
    """Form in which tools are offered: `native`, by the model's chat template; `text`, described in the
    system message, with calls read from what it writes; or `auto`, text where the template has no tools."""
    chat_template: str = ""
    """A chat template in place of the model's own, for base models, which have none: `plain`, `chatml`, or
    the path of a template. The trained model keeps it."""
    thinking: str = "auto"
    """Whether a model that can think first does: `on`, `off`, or `auto`, which leaves it to its template."""
    max_thinking_tokens: int = 0
    """Tokens after which the built-in engine closes a thought for the model, whose closing is not trained on;
    0 lets it go on to the limit of the answer."""
    vision: str = FROZEN
    """Whether the part of a vision-language model that turns images into vectors learns as well: `frozen`,
    `train`, or `lora`, an adapter on it too (`lora.rank` > 0). Image tokens are never trained on."""

    def validate(self) -> None:
        one_of("model.dtype", self.dtype, DTYPES)
        one_of("model.tool_form", self.tool_form, TOOL_FORMS)
        one_of("model.thinking", self.thinking, THINKING)
        at_least("model.max_thinking_tokens", self.max_thinking_tokens, 0)
        one_of("model.vision", self.vision, (FROZEN, "train", "lora"))

    @property
    def form(self) -> ChatForm:
        """The form of conversations."""
        return ChatForm(
            tool_form=self.tool_form,
            chat_template=self.chat_template,
            thinking=self.thinking,
            max_thinking_tokens=self.max_thinking_tokens,
        )

    @property
    def number_type(self) -> str:
        """The data type that `dtype` comes to."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if self.device.startswith("cuda") else "float32"


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    """Which tasks a run by name plays.

    Programs that bring their own classes and tasks to `AgentTrainer` need none of it.
    """

    environment: str = "frozenlake"
    environment_args: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arguments that the environment's tasks are made with, such as `size` of a lake. A task that sets one of
    them itself keeps its own value."""
    train_args: dict[str, Any] = field(default_factory=dict[str, Any])
    """The same for training tasks alone, on top of `environment_args`; a list is gone through in turn, task
    by task."""
    agent: str = "frozenlake"
    agent_args: dict[str, Any] = field(default_factory=dict[str, Any])
    program: str = ""
    """A program to train instead: `package.module:name`, `file.py:name`, or the name of an entry point."""
    evaluator: str = ""
    """The evaluator of the program, named in the same ways."""
    dataset: str = ""
    """The program's training tasks: a file of rows, a registered data set, `benchmark:NAME`, or several with
    their weights (`a.jsonl=3,b=1`)."""
    val_dataset: str = ""
    """The same for the tasks that are held out; the training tasks where empty."""
    num_train_tasks: int = 100_000
    """Number of training tasks; steps walk through them in order and begin again at the end."""

    def validate(self) -> None:
        at_least("task.num_train_tasks", self.num_train_tasks, 1)
        if self.program:
            return
        unused("task", self, "evaluator", "nobody is judged by it; set `task.program`")
        if self.environment != PROMPTS:
            for name in ("dataset", "val_dataset"):
                unused("task", self, name, "only programs and prompts come from files; set `task.program`")


DEFAULT_SLOTS = 256


@dataclass(kw_only=True, slots=True)
class InferenceConfig:
    num_slots: int = 0
    """Conversations that hold keys and values at the same time. 0 chooses it for the model; see `slots`."""
    max_context: int = 0
    """Maximum tokens of one conversation, prompt and answers together. 0 chooses it for the model."""
    max_prefill_tokens: int = 16_384
    """Prompt tokens read in one engine step; a longer prompt is read over several, beside others' answers."""
    cache_tokens: int = 0
    """Tokens whose keys and values the built-in engine keeps at the same time: who finds no room waits, or
    gives its place to an earlier one and is read anew later. 0 chooses it for the memory that is free, and at
    most as many as `num_slots` conversations of `max_context` have."""
    lockstep: bool = True
    """Step only when no rollout is busy elsewhere: bit-for-bit reproducible. Off: faster when environments
    are slow."""
    dtype: str = "auto"
    """The data type of the sampler's weights, activations and cache: `float32`, `bfloat16`, or `auto`, which
    is the trainer's (`model.dtype`). Another one has weights of its own, cast at each publish: bfloat16
    samples nearly twice as fast on CPUs with instructions for it, beside a trainer that stays in float32."""
    engine: str = "local"
    """Sampler of the run: `local`, the built-in engine, or `vllm`, servers that are given the weights after
    each update."""
    replicas: int = 0
    """Number of vLLM servers that the run starts for each policy on this machine, restarts and ends, each
    with `num_slots` requests at a time."""
    server_python: str = ""
    """The Python of an environment that has vLLM, for `replicas`."""
    servers: list[str] = field(default_factory=list[str])
    """Addresses of vLLM servers that run already, instead of `replicas`, such as `http://10.0.0.7:8000/v1`.
    They have to see the run's directory, where weights go by files, and to serve the model untied. Of a run
    with several policies each has its own, `policies.NAME.servers`."""
    server_seeds: bool = True
    """Send each request to vLLM with its seed. vLLM 0.32 on a CPU ends with the first seed that it gets: set
    this to false there, and draws are the servers' own."""
    weight_transfer: str = "files"
    """Way in which a vLLM server gets new weights: `files`, a directory in the run's that it reads; `nccl`,
    tensors from the trainer's GPU to those of the server, which has to be started for it. Adapters go by
    files."""
    model_timeout_s: float = 480.0
    """A server that has answered no call for so long while one is open has failed: the episodes that wait for
    it are failures of the infrastructure."""
    at_publish: str = "recompute"
    """Way in which answers under way at a vLLM server meet new weights. `recompute`: they go on by the new
    ones, which read their context anew, as the built-in engine does it. `keep`: they go on with the keys and
    values of the old ones, and so does whoever begins alike. `finish`: they end by the weights of their
    beginning, and the server waits for them."""

    @property
    def slots(self) -> int:
        """`num_slots`, and where that is open, as many as a model made here has."""
        return self.num_slots or DEFAULT_SLOTS

    def validate(self) -> None:
        at_least("inference.num_slots", self.num_slots, 0)
        if self.max_context:
            at_least("inference.max_context", self.max_context, 2)
        at_least("inference.max_prefill_tokens", self.max_prefill_tokens, 1)
        at_least("inference.cache_tokens", self.cache_tokens, 0)
        one_of("inference.dtype", self.dtype, DTYPES)
        if 0 < self.cache_tokens < self.max_context:
            raise ConfigError(
                f"`inference.cache_tokens` is {self.cache_tokens}, and one conversation may have "
                f"`inference.max_context` {self.max_context}; set it to as many or more, or to 0."
            )
        one_of("inference.engine", self.engine, ("local", "vllm"))
        at_least("inference.replicas", self.replicas, 0)
        if self.engine == "local":
            for name in (
                "replicas",
                "server_python",
                "servers",
                "server_seeds",
                "weight_transfer",
                "model_timeout_s",
                "at_publish",
            ):
                unused("inference", self, name, "the built-in engine samples; set `inference.engine` to vllm")
            return
        positive("inference.model_timeout_s", self.model_timeout_s)
        one_of("inference.at_publish", self.at_publish, ("recompute", "keep", "finish"))
        one_of("inference.weight_transfer", self.weight_transfer, ("files", "nccl"))
        unused("inference", self, "cache_tokens", "servers have their own; set `inference.engine` to local")
        if bool(self.replicas) != bool(self.server_python):
            raise ConfigError(
                f"`inference.replicas` is {self.replicas} and `inference.server_python` "
                f"{self.server_python!r}; servers that the run starts need both, others neither."
            )


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    tasks_per_step: int = 16
    group_size: int = 8
    """Attempts at each task."""
    max_turns: int = 8
    max_tokens_per_turn: int = -1
    """Maximum tokens per answer. 0 keeps the limit that the program sends (programs only). -1 chooses it for
    the model."""
    temperature: float = 1.0
    """Sampling temperature of the first step. The trainer divides by the same, so it stays on-policy."""
    final_temperature: float = 0.0
    """Reached linearly at the last step, so that a policy that has made up its mind still tries something
    else; 0 keeps `temperature`."""
    top_p: float = 1.0
    top_k: int = 0
    num_parallel: int = 256
    """Rollouts, or programs, that live at the same time."""
    env_workers: int = 4
    """Threads that environments run in."""
    step_timeout_s: float = 30.0
    """One environment reset or step; for programs, one judgement of the evaluator."""
    episode_timeout_s: float = 300.0
    """An episode's own time: that of its environment, agent or program. It stands still while a model call of
    the episode is open, queueing included."""
    wall_timeout_s: float = 0.0
    """All of an episode's time, model calls included; 0 is no limit."""
    retry_limit: int = 3
    """Tries of an episode that infrastructure failed; the policy's own failures are never tried again."""
    max_failed_fraction: float = 0.5
    """Share of a batch, and of the latest 64 attempts where that is more, that may fail through no fault of
    the policy (a reward of NaN, an environment that raises, a judge that is down) before the run ends. 0 is
    strict: the first failure ends it. 1 leaves it to the first 8 attempts, not all of which may break a
    contract."""
    stall_timeout_s: float = 0.0
    """A run in which no rollout and no step of the built-in engine moves for so long saves a checkpoint and
    ends; 0 takes twice `episode_timeout_s`, and 600 at least."""
    truncation: TruncationConfig = field(default_factory=TruncationConfig)
    budget: CallBudget = field(default_factory=CallBudget)
    """The budget of each episode of a program for its model calls."""

    def validate(self) -> None:
        self.truncation.validate()
        if (problem := budget_problem(self.budget))[0]:
            raise ConfigError(f"`rollout.budget.{problem[0]}` {problem[1]}.")
        for name in (
            "tasks_per_step",
            "group_size",
            "max_turns",
            "num_parallel",
            "env_workers",
            "retry_limit",
        ):
            at_least(f"rollout.{name}", getattr(self, name), 1)
        at_least("rollout.max_tokens_per_turn", self.max_tokens_per_turn, -1)
        positive("rollout.step_timeout_s", self.step_timeout_s)
        positive("rollout.episode_timeout_s", self.episode_timeout_s)
        finite("rollout.wall_timeout_s", self.wall_timeout_s)
        finite("rollout.stall_timeout_s", self.stall_timeout_s)
        share("rollout.max_failed_fraction", self.max_failed_fraction)
        positive("rollout.temperature", self.temperature)
        if self.final_temperature != 0.0:
            positive("rollout.final_temperature", self.final_temperature)
        if self.top_p != 1.0 or self.top_k != 0:
            raise ConfigError(
                f"`rollout.top_p` is {self.top_p} and `rollout.top_k` is {self.top_k}; log-probabilities of "
                "truncated sampling cannot be compared with the trained policy's, so training needs "
                "top_p = 1 and top_k = 0."
            )


@dataclass(kw_only=True, slots=True)
class WarmStartConfig:
    """Supervised imitation of a noisy expert, so that reinforcement learning has something to improve."""

    steps: int = -1
    """0 begins reinforcement learning with the model as it is. -1 takes 100 for a model that rLLM made from
    random weights, where there is an expert to imitate, and else 0."""
    episodes_per_step: int = 64
    learning_rate: float = 0.0
    """Peak of the learning rate of the imitation. 0 chooses it for the model."""
    noise: float = 0.3
    """Share of the expert's moves that are replaced by random ones."""
    expert_args: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of a world's expert, such as how far it sees on a lake."""

    def validate(self) -> None:
        at_least("warm_start.steps", self.steps, -1)
        at_least("warm_start.episodes_per_step", self.episodes_per_step, 1)
        finite("warm_start.learning_rate", self.learning_rate)
        share("warm_start.noise", self.noise)


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    num_tasks: int = 256
    """Tasks of the reports before and after."""
    at_start: bool = True
    """Measure the model before it is reinforced. Without, the run cannot say what was gained."""
    split: str = "test"
    """`test`, or `validation` for choosing hyperparameters."""
    every_steps: int = -1
    """Evaluate on validation tasks every so many steps. -1 takes a tenth of the steps, or more, so that no
    more episodes are evaluated than trained on; 0 does not evaluate."""
    every_num_tasks: int = 64
    """Tasks of those evaluations between."""
    patience: int = 0
    """Evaluations between that may show no gain one after the other before the run ends early; 0 goes on to
    the last step. A gain is one that the 95 % interval of the pairs with the last gain keeps above 0."""

    def validate(self) -> None:
        at_least("evaluation.num_tasks", self.num_tasks, 1)
        one_of("evaluation.split", self.split, ("test", "validation"))
        at_least("evaluation.every_steps", self.every_steps, -1)
        at_least("evaluation.every_num_tasks", self.every_num_tasks, 1)
        at_least("evaluation.patience", self.patience, 0)
        if self.patience and self.every_steps == 0:
            raise ConfigError(
                f"`evaluation.patience` is {self.patience}, but `evaluation.every_steps` is 0, so nothing "
                "says whether there is a gain; set that above 0, or leave it out."
            )


DEFAULT_PERIOD = 5


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    every_steps: int = 0
    """Steps from one checkpoint to the next. 0 chooses it for the size of a checkpoint; see `period`."""
    keep: int = 2
    """Newest checkpoints that stay, beside the one that did best on the validation split."""
    background: bool = False
    """Copy what a checkpoint holds and let a thread write it while the run goes on. The copy takes as much
    memory as the checkpoint does on disk."""

    @property
    def period(self) -> int:
        """`every_steps`, and where that is open, the number for small checkpoints."""
        return self.every_steps or DEFAULT_PERIOD

    def validate(self) -> None:
        at_least("checkpoint.every_steps", self.every_steps, 0)
        at_least("checkpoint.keep", self.keep, 1)


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """A whole run."""

    seed: int = 0
    """Seed of every random draw of the run: weights of a built-in model, task order, sampling,
    environments."""
    steps: int = 100
    """Reinforcement-learning steps: one batch of rollouts each."""
    threads: int = 0
    """Threads of torch; 0 takes one per core that the process may use. The last bits of a run depend on
    it."""
    stop_on_alarm: bool = False
    """Save and end the run, with exit code 1, when a critical alarm is raised: a step that moves the policy
    too far, success that is lost, a step in which all episodes fail, an entropy near 0, or answers that are
    mostly cut at their token limit."""
    backend: str = LOCAL
    """The backend that computes updates: `local` (torch, in the process of the sampler), `verl` (its FSDP2
    worker, see docs/verl.md), `tinker` (a service that samples as well, see docs/tinker.md), or
    `package.module:NAME` of your own."""
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    filters: FiltersConfig = field(default_factory=FiltersConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    policies: dict[str, PolicyConfig] = field(default_factory=dict[str, PolicyConfig])
    """The models of a run that has several, by name."""
    roles: dict[str, RoleConfig] = field(default_factory=dict[str, RoleConfig])
    """The settings of a workflow's roles, by the name of their trajectories."""

    def settle(self) -> None:
        """Replace what one key leaves to others by what it comes to."""
        choose_correction(self.schedule, self.algorithm, sampler_differs=self.sampler_differs)

    def validate(self) -> None:
        """Raises ConfigError for the first value, or combination of values, that cannot be honoured."""
        seed_in_range("seed", self.seed)
        at_least("steps", self.steps, 0)
        at_least("threads", self.threads, 0)
        for section in fields(self):
            value = getattr(self, section.name)
            if is_dataclass(value) and hasattr(value, "validate"):
                value.validate()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        if self.checkpoint.background and self.backend != LOCAL:
            raise ConfigError(
                f"`checkpoint.background` is true, and `backend` is {self.backend!r}, whose weights are not "
                f"this process's to copy; set `backend` to {LOCAL}, or leave the key out."
            )
        validate_policies(self.policies, self.roles)
        validate_adapters(self.policies, self.lora)
        rollout = self.rollout
        validate_estimators(self.algorithm, self.critic, self.roles)
        if self.steps > 0:
            validate_groups(
                self.algorithm,
                self.filters,
                self.roles,
                group_size=rollout.group_size,
                tasks_per_step=rollout.tasks_per_step,
            )
            validate_first_attempts(
                self.algorithm,
                self.filters,
                self.roles,
                group_size=rollout.group_size,
                steps_ahead=self.schedule.steps_ahead,
            )
        validate_distillation(
            self.distill,
            self.algorithm,
            self.estimators(),
            warm_start=(self.warm_start.steps, self.warm_start.noise, self.warm_start.expert_args),
            temperatures=self._training_temperatures(),
        )
        self._validate_servers()
        self._validate_sampler()
        self._validate_placement()
        validate_schedule(
            self.schedule,
            self.algorithm,
            self.estimators(),
            lockstep=self.inference.lockstep,
            elsewhere="" if self.backend == LOCAL else f"`backend` is {self.backend!r}",
        )
        validate_overlong(self.filters, self.roles, max_tokens_per_turn=rollout.max_tokens_per_turn)
        if 0 < self.steps <= self.critic.warmup_steps:
            raise ConfigError(
                f"`critic.warmup_steps` is {self.critic.warmup_steps} and `steps` is {self.steps}, so the "
                "policy would never learn; set it below."
            )

    @property
    def named_policies(self) -> dict[str, PolicyConfig]:
        """Every policy of the run with its path, the one of a run that names none included."""
        by_name = self.policies or {ONLY_POLICY: PolicyConfig()}
        return {
            name: replace(policy, path=policy.path or self.model.path) for name, policy in by_name.items()
        }

    def adapter_of(self, policy: str) -> LoraConfig:
        """The adapter that is trained instead of the policy's weights; of rank 0 where none is."""
        return adapter_of(self.named_policies[policy], self.lora)

    def servers_of(self, policy: str) -> tuple[str, list[str]]:
        """The key that names the policy's servers, and their addresses; none of those that the run starts."""
        if self.inference.replicas:
            return "inference.replicas", []
        if own := self.named_policies[policy].servers:
            return f"policies.{policy}.servers", own
        return "inference.servers", self.inference.servers

    def policy_of(self, role: str) -> str:
        """Name of the policy that plays `role`. Raises ConfigError where several could."""
        return policy_of_role(role, self.policies, self.roles)

    def estimator_of(self, role: str) -> str:
        """Name of the role's advantage estimator."""
        return self.role(role).estimator or self.algorithm.estimator

    def estimators(self) -> set[str]:
        """Names of all estimators that the run may use."""
        return set(estimator_keys(self.algorithm, self.roles).values())

    def _training_temperatures(self) -> set[float]:
        """All that may be sampled at in training."""
        rollout, roles = self.rollout, self.roles.values()
        return {
            rollout.temperature,
            rollout.final_temperature or rollout.temperature,
            *(role.temperature for role in roles if role.temperature),
        }

    def _validate_placement(self) -> None:
        """Raises ConfigError for processes that are placed nowhere, or that do not say what they need."""
        where = f"`distributed.placement` is {self.distributed.placement!r}"
        if self.distributed.placement == HERE:
            return
        if not self.cluster.is_used:
            raise ConfigError(
                f"{where}, and there is no cluster to place processes on: set `cluster.kind` to ray, or "
                "leave the key out."
            )
        if not self.threads:
            raise ConfigError(
                f"{where}, and `threads` is 0, which shares a machine among its processes: set it to the "
                "cores that each of them asks for."
            )

    def _validate_servers(self) -> None:
        """Raises ConfigError for what runs whose sampler is a server cannot do."""
        if self.inference.engine == "local":
            for name, policy in self.policies.items():
                why = "the built-in engine samples; set `inference.engine` to vllm"
                unused(f"policies.{name}", policy, "servers", why)
            return
        if self.model.max_thinking_tokens:
            raise ConfigError(
                f"`model.max_thinking_tokens` is {self.model.max_thinking_tokens}, and servers sample "
                f"(`inference.engine` is {self.inference.engine!r}), which close no thought; set it to 0."
            )
        validate_servers(self.named_policies, self.inference.servers, self.inference.replicas)
        where = f"`inference.engine` is {self.inference.engine!r}"
        if self.inference.lockstep:
            raise ConfigError(
                f"{where}, and `inference.lockstep` is true; set it to false: servers step alone."
            )
        if elsewhere := self._elsewhere():
            raise ConfigError(
                f"{where}, and {elsewhere}, which has samplers of its own; leave one of them out."
            )
        if not self.schedule.steps_ahead:
            why = "no answer is under way when the weights change; set `schedule.kind` to async"
            unused("inference", self.inference, "at_publish", why)
        with_adapter = [name for name in self.named_policies if self.adapter_of(name).rank]
        if self.inference.weight_transfer == "nccl":
            self._validate_nccl(with_adapter)
        if self.inference.at_publish == "keep" and with_adapter:
            raise ConfigError(
                '`inference.at_publish` is "keep", and an adapter is trained: servers keep what each adapter '
                'has read apart, so the next one reads everything anew. Set it to "recompute" or "finish".'
            )

    @property
    def evaluation_period(self) -> int:
        """The number of steps from one evaluation between to the next; 0 if there are none."""
        if self.evaluation.every_steps >= 0:
            return self.evaluation.every_steps
        evaluated = 2 * self.evaluation.every_num_tasks  # sampled and greedy
        played = self.rollout.tasks_per_step * self.rollout.group_size
        return max(math.ceil(self.steps / 10), math.ceil(evaluated / played))

    @property
    def sampler_type(self) -> str:
        """The data type that the sampler computes in."""
        return self.model.number_type if self.inference.dtype == "auto" else self.inference.dtype

    @property
    def sampler_differs(self) -> bool:
        """Whether the sampler computes in another data type than the trainer."""
        return self.sampler_type != self.model.number_type

    def _validate_sampler(self) -> None:
        """Raises ConfigError for a sampler whose weights cannot have a data type of their own."""
        if not self.sampler_differs:
            return
        where = f"`inference.dtype` is {self.inference.dtype!r} and the trainer's {self.model.number_type!r}"
        if elsewhere := self._elsewhere():
            raise ConfigError(
                f"{where}, and {elsewhere}, which casts no weights so far; set `inference.dtype` to auto."
            )
        if self.inference.engine != LOCAL:
            raise ConfigError(
                f"{where}, and `inference.engine` is {self.inference.engine!r}, whose servers get weights "
                "as they are; set `inference.dtype` to auto, or sample with the built-in engine."
            )
        if any(self.adapter_of(name).base_dtype == "nf4" for name in self.named_policies):
            raise ConfigError(
                f'{where}, and `lora.base_dtype` is "nf4", which sampler and trainer share; set one of them '
                "to auto."
            )

    def _validate_nccl(self, with_adapter: list[str]) -> None:
        """Raises ConfigError for weights that NCCL cannot bring to servers."""
        where = '`inference.weight_transfer` is "nccl"'
        if not self.model.device.startswith("cuda"):
            raise ConfigError(
                f"{where}, and `model.device` is {self.model.device!r}: NCCL sends from a GPU. Set the "
                "latter to cuda, or the former to files."
            )
        if with_adapter:
            raise ConfigError(
                f"{where}, and the adapter of {', '.join(with_adapter)} is trained, which goes to servers by "
                "files in any case: leave the key out."
            )

    def _elsewhere(self) -> str:
        """Name the key that moves sampling or learning out of this process; empty where none does."""
        if self.backend != LOCAL:
            return f"`backend` is {self.backend!r}"
        return f"`cluster.kind` is {self.cluster.kind!r}" if self.cluster.is_used else ""

    def discounts(self) -> bool:
        """Whether an advantage depends on `algorithm.gamma`."""
        return self.algorithm.credit != "trajectory" or bool(self.estimators() & set(WITH_GAMMA))

    def needs_critic(self, policy: str) -> bool:
        """Whether a role of the policy asks a critic; a role that is not configured may be of any policy."""
        if self.algorithm.estimator in WITH_CRITIC:
            return True
        return any(
            role.estimator in WITH_CRITIC and self.policy_of(name) == policy
            for name, role in self.roles.items()
        )

    def role(self, name: str) -> RoleConfig:
        return self.roles.get(name, RoleConfig())

    def max_tokens_of(self, role: str) -> int:
        """Tokens that an answer of this role may have."""
        return self.role(role).max_tokens or self.rollout.max_tokens_per_turn

    def derived(self) -> dict[str, int]:
        """Quantities that follow from the keys; `--dry-run` prints them."""
        rollout, filters, updates = self.rollout, self.filters, self.algorithm.updates_per_step
        episodes = rollout.tasks_per_step * rollout.group_size
        greedy = rollout.tasks_per_step if self.estimators() & set(WITH_GREEDY) else 0
        most = episodes * (filters.max_rounds if filters.dynamic else 1) + greedy
        first = filters.first_attempts
        per_lease = self.cluster.tasks_per_lease(rollout.group_size)
        cluster = {
            "rollout_workers": self.cluster.workers,
            "cores_of_workers": self.cluster.workers * self.cluster.cpus_per_worker,
            "tasks_per_lease": per_lease,
            "leases_per_step": math.ceil(rollout.tasks_per_step / per_lease),
        }
        cache_tokens = self.inference.slots * self.inference.max_context
        return {
            "cache_tokens": min(self.inference.cache_tokens or cache_tokens, cache_tokens),
            "groups_per_step": rollout.tasks_per_step,
            "episodes_per_step": episodes,
            "greedy_episodes_per_step": greedy,
            "most_episodes_per_step": most,
            **({"fewest_episodes_per_step": rollout.tasks_per_step * first} if first else {}),
            "episodes_in_total": episodes * self.steps,
            "most_episodes_in_total": most * self.steps,
            "optimizer_updates_per_step": updates,
            "optimizer_updates": self.warm_start.steps + self.steps * updates,
            "most_sampled_tokens_per_step": most * rollout.max_turns * rollout.max_tokens_per_turn,
            "evaluate_every_steps": self.evaluation_period,
            "demonstrations": self.warm_start.steps * self.warm_start.episodes_per_step,
            **(cluster if self.cluster.is_used else {}),
        }
