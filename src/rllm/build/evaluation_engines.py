"""The engines of an evaluation: an agent in a world or a program behind a gateway, with a model here or on a
server."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rllm.agents.base import BaseAgent
from rllm.agents.flow import AgentFlow
from rllm.agents.named import agent_named
from rllm.build.asked import Asked
from rllm.build.configs import MAX_EVAL_CONTEXT
from rllm.build.connection_check import try_model
from rllm.build.gateways import upstream_policy
from rllm.build.models import local_client, model_directory, resolve_form
from rllm.build.program_player import PROGRAM_DEFAULTS, gateway_before, local_policy
from rllm.build.providers import ModelPlace
from rllm.config.loader import load_config
from rllm.config.schema import TrainConfig
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.engine.agent_workflow import AgentWorkflowEngine
from rllm.engine.attempts import EpisodeEngine
from rllm.engine.traced import TracedEngine
from rllm.engine.workflow_attempt import EPISODE_TIMEOUT_S
from rllm.errors import ConfigError, InferenceError, MissingExtraError
from rllm.eval.catalogue import SINGLE_TURN, Benchmark
from rllm.eval.judging import JudgedEngine, as_reward_fn
from rllm.eval.likelihood import LikelihoodEngine
from rllm.eval.tasks import benchmark_world
from rllm.inference.client import ModelClient
from rllm.rewards.evaluator import Evaluator
from rllm.store.run_directory import RunDirectory, is_run
from rllm.types.chat_forms import OWN_FORM, ChatForm
from rllm.workflows.workers import opened_workers, worker_contracts
from rllm.workflows.workflow import Workflow

if TYPE_CHECKING:
    from rllm.types.wire import Policy

_SERVER_PARALLEL = 64
"""Episodes at the same time, unless somebody says."""
_GRADING_S = 600.0
"""The time for one answer: graders have limits of their own, and a judge is asked again where its verdict
makes no sense."""


@asynccontextmanager
async def agent_engine(
    request: Asked,
    spec: Benchmark,
    config: TrainConfig,
    agent_class: type[BaseAgent],
    agent_args: Mapping[str, Any],
    judge: Evaluator | None,
) -> AsyncIterator[EpisodeEngine]:
    """`judge` pays for answers to questions instead of the tasks' own graders."""
    rollout, asks_questions = config.rollout, spec.asks_questions
    parallel = _SERVER_PARALLEL if request.place.is_server else rollout.num_parallel
    await _require_judge_answers(request)
    asks_once = spec.environment == SINGLE_TURN and agent_class is agent_named("conversation")
    if request.place.is_server:
        client = (await answering(request.place)).client(
            timeout_s=request.call_timeout_s, connect_timeout_s=10.0
        )
    else:
        client = _local(request, config, asks_questions)
    try:
        yield AgentExecutionEngine(
            agent_class,
            benchmark_world(spec).env_class,
            agent_args,
            {} if judge is None else {"reward_fn": as_reward_fn(judge)},
            rollout_engine=client,
            n_parallel_agents=request.concurrency or parallel,
            max_steps=1 if asks_once else rollout.max_turns,
            episode_timeout_s=request.episode_timeout_s or rollout.episode_timeout_s,
            trajectory_timeout=rollout.wall_timeout_s or None,
            model_timeout_s=request.model_timeout_s,
            call_timeout_s=request.call_timeout_s,
            step_timeout_s=_GRADING_S if asks_questions else rollout.step_timeout_s,
            # A grader that failed would fail again, and the model would be asked again for nothing.
            retry_limit=1 if asks_questions else rollout.retry_limit,
            # Graders may wait for a model or a sandbox: as many at a time as there are answers.
            max_workers=request.concurrency or parallel if asks_questions else rollout.env_workers,
            max_prompt_length=0,  # the context is the limit
            max_response_length=0,
            stored=True,
            seed=request.seed,
        )
    finally:
        await client.close()


@asynccontextmanager
async def program_engine(
    request: Asked, flow: AgentFlow, evaluator: Evaluator
) -> AsyncIterator[EpisodeEngine]:
    if "stop" in request.sampling:
        raise ConfigError(
            f"`stop` cannot be set from outside of a program; let {flow.name} ask with it, and leave "
            "--sampling stop out."
        )
    await _require_judge_answers(request)
    async with AsyncExitStack() as open_until_done:
        if request.place.is_server:
            policy: Policy = upstream_policy(await answering(request.place), timeout_s=request.call_timeout_s)
            model_name = request.place.name
        else:
            client = _client_here(request)
            open_until_done.push_async_callback(client.close)
            model_name = Path(request.place.path).resolve().name
            policy = local_policy(client, model_name)
        ledger = open_until_done.enter_context(TemporaryDirectory(prefix="rllm-eval-"))
        gateway = await open_until_done.enter_async_context(gateway_before(policy, Path(ledger) / "gateway"))
        engine = await open_until_done.enter_async_context(
            TracedEngine(
                flow,
                evaluator,
                gateway,
                model=model_name,
                seed=request.seed,
                sets_max_tokens=bool(request.sampling.get("max_tokens")),
                n_parallel_tasks=request.concurrency or _SERVER_PARALLEL,
                episode_timeout_s=request.episode_timeout_s or flow.timeout_s,
                model_timeout_s=request.model_timeout_s if request.place.is_server else None,
                evaluator_timeout_s=_GRADING_S,
                stored=True,
            )
        )
        yield JudgedEngine(engine, None)


@asynccontextmanager
async def workflow_engine(
    request: Asked, workflow: type[Workflow], evaluator: Evaluator
) -> AsyncIterator[EpisodeEngine]:
    """Whatever the workflow pays itself, `evaluator` judges what its episode ends with. Every role asks the
    one model."""
    await _require_judge_answers(request)
    if request.place.is_server:
        client = (await answering(request.place)).client(
            timeout_s=request.call_timeout_s, connect_timeout_s=10.0
        )
    else:
        client = _client_here(request)
    contracts = worker_contracts(workflow)
    try:
        with TemporaryDirectory(prefix="rllm-eval-") as directory:
            async with opened_workers(request.open_workers, contracts, Path(directory)) as workers:
                engine = AgentWorkflowEngine(
                    workflow,
                    rollout_engine=client,
                    n_parallel_tasks=request.concurrency or _SERVER_PARALLEL,
                    raise_on_error=False,
                    stored=True,
                    seed=request.seed,
                    episode_timeout_s=request.episode_timeout_s or EPISODE_TIMEOUT_S,
                    model_timeout_s=request.model_timeout_s,
                    call_timeout_s=request.call_timeout_s,
                    workers=workers,
                )
                yield JudgedEngine(engine, evaluator)
    finally:
        await client.close()


@asynccontextmanager
async def likelihood_engine(request: Asked) -> AsyncIterator[EpisodeEngine]:
    """The engine that compares choices by their likelihood."""
    client = _client_here(request)
    try:
        yield LikelihoodEngine(
            client.score,
            encode=client.renderer.completion_ids,
            max_context=client.max_context,
            reading=request.likelihood,
        )
    finally:
        await client.close()


async def answering(place: ModelPlace) -> ModelPlace:
    """The place, once it has given one answer: a dead server, a wrong key or name end the evaluation here."""
    try:
        await try_model(place)
    except MissingExtraError:
        raise
    except (InferenceError, ConfigError) as error:
        kind = ConfigError if isinstance(error, ConfigError) else InferenceError
        raise kind(f"Nothing was evaluated: a first question to {place.title} failed: {error}") from error
    return place


async def _require_judge_answers(request: Asked) -> None:
    """The same of the model that a judge asks: it is not found out ten thousand answers later."""
    if request.judge is not None:
        await answering(request.judge)


def _local(request: Asked, config: TrainConfig, asks_questions: bool) -> ModelClient:
    try:
        from rllm.models.devices import dtype_named, use_threads
        from rllm.models.directory import load_model
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "train") from error
    use_threads(request.threads)
    model = load_model(
        model_directory(Path(request.place.path)),
        device=config.model.device,
        dtype=dtype_named(request.dtype),
        form=resolve_form(Path(request.place.path), request.form),
        trust_remote_code=request.trust_remote_code,
    )
    model.tokenizer.require_chat_template()
    room = (0 if asks_questions else config.inference.max_context) or MAX_EVAL_CONTEXT
    return local_client(model, config.inference, max_context=min(model.max_positions, room))


def _client_here(request: Asked) -> Any:
    """The engine of a request, for a model that is here."""
    return program_client(
        request.place,
        threads=request.threads,
        dtype=request.dtype,
        form=request.form,
        trust_remote_code=request.trust_remote_code,
    )


def program_client(
    place: ModelPlace,
    *,
    threads: int = 0,
    dtype: str = "auto",
    form: ChatForm = OWN_FORM,
    trust_remote_code: bool = False,
) -> Any:
    """The built-in engine for a program: of a run as it was trained, otherwise as programs are by default."""
    try:
        from rllm.models.devices import dtype_named, use_threads
        from rllm.models.directory import load_model
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "train") from error
    path = Path(place.path)
    run_config = RunDirectory.read(path).config() if is_run(path) else {}
    learned_from_rows = "kind" in run_config  # whose settings are those of another kind of run
    config = load_config(None if learned_from_rows else run_config, base=PROGRAM_DEFAULTS)
    use_threads(threads)
    model = load_model(
        model_directory(path),
        device=config.model.device,
        dtype=dtype_named(dtype),
        form=resolve_form(path, form),
        trust_remote_code=trust_remote_code,
    )
    inference = replace(config.inference, lockstep=False)
    # A run settles its context for its model; nothing else has.
    room = inference.max_context or MAX_EVAL_CONTEXT
    return local_client(model, inference, max_context=min(room, model.max_positions))
