"""A benchmark or program and a model in, an evaluation ready to run out.

Asked ──prepare──► plan (all that a score depends on), tasks ──► open_engine ──► Evaluation.run_ways

Whatever cannot be honoured is refused while preparing: nothing is sampled, loaded or written yet.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rllm.build.actors import Actor, actor_named, program_named
from rllm.build.asked import Asked
from rllm.build.configs import MAX_EVAL_TOKENS
from rllm.build.evaluation_engines import (
    agent_engine,
    likelihood_engine,
    program_engine,
    workflow_engine,
)
from rllm.build.judges import ChosenJudge, judge_named, judge_of_benchmark
from rllm.build.models import model_directory
from rllm.build.presentation import presentation_of
from rllm.build.rows import for_programs, rows_of
from rllm.build.sampling import sampling_of
from rllm.build.selection import require_selectable, select
from rllm.build.sources import source_hash, version
from rllm.config.schema import TrainConfig
from rllm.engine.event_loop import run
from rllm.environments.world import World
from rllm.errors import ConfigError
from rllm.eval.catalogue import Benchmark, benchmark_named
from rllm.eval.evaluation import Evaluation
from rllm.eval.few_shot import example_questions, with_examples
from rllm.eval.judging import require_gradable, row_by_row, task_evaluator
from rllm.eval.likelihood import PROMPT, WAY, likelihood_task
from rllm.eval.plan import EvaluationPlan, hash_of, model_hash
from rllm.eval.report import NO_PRICES, Prices, require_ks
from rllm.eval.results import Result
from rllm.eval.task_facts import task_facts
from rllm.eval.tasks import (
    NUM_TASKS,
    benchmark_tasks,
    benchmark_world,
    question_of_row,
    source_facts,
)
from rllm.integrations.task_program import PAYS_ITSELF, TEST
from rllm.integrations.task_programs import task_program
from rllm.models.named_templates import NAMES, chat_template_named
from rllm.rewards.evaluator import Evaluator, as_evaluator
from rllm.types.chat_forms import AUTO, ChatForm
from rllm.types.messages import SamplingParams
from rllm.types.task import tasks_of

MOST_ATTEMPTS = 1_000_000


@dataclass(kw_only=True, slots=True, frozen=True)
class Prepared:
    """An evaluation that nothing speaks against."""

    plan: EvaluationPlan
    tasks: list[Any]
    open_engine: "Callable[[], Any]"
    """An async context manager that gives the EpisodeEngine."""
    world: World | None = None
    """The world of the tasks; None for a program's own."""
    request: Asked
    """The request."""
    world_pays: bool = False
    """Whether nobody else judges, so that what simple policies are paid there can be compared."""

    @property
    def num_attempts(self) -> int:
        """That there will be, all ways together."""
        return len(self.tasks) * self.plan.attempts * len(self.plan.ways)

    async def run(
        self,
        directory: Path,
        *,
        ks: Sequence[int] = (),
        prices: Prices = NO_PRICES,
        on_begin: Callable[[int], None] = lambda num_done: None,
        on_result: Callable[[str, Result], None] = lambda way, result: None,
        on_report: Callable[[dict[str, Any]], object] = lambda report: None,
    ) -> dict[str, Any]:
        """Make what is missing in `directory`, and give the report. `on_begin` hears how many attempts are
        there already, `on_report` the report while the directory is still held."""
        require_ks(ks, self.plan.attempts)
        with Evaluation(directory, self.plan) as evaluation:
            on_begin(evaluation.num_done)
            if evaluation.num_done < self.num_attempts:
                async with self.open_engine() as engine:
                    await evaluation.run_ways(engine, self.tasks, on_result)
            facts = await asyncio.to_thread(
                task_facts, self.tasks, self.world, with_baselines=self.world_pays
            )
            report = evaluation.report(ks=ks, prices=prices, facts=facts)
            if self.request.select:
                (way,) = self.plan.ways  # several attempts are made in one way
                report["reports"][way]["selection"] = await select(self.request, evaluation, way)
            evaluation.finish(report)
            on_report(report)
        return report

    def run_to_end(self, directory: Path, **options: Any) -> dict[str, Any]:
        """`run` for callers without an event loop; SIGTERM ends it as Ctrl-C does."""
        return run(self.run(directory, **options))


def prepare(request: Asked) -> Prepared:
    """Look everything up. Raises ConfigError for the first thing that cannot be honoured."""
    if not 1 <= request.attempts <= MOST_ATTEMPTS:
        raise ConfigError(
            f"The number of attempts is {request.attempts}; it must be from 1 to {MOST_ATTEMPTS:,}."
        )
    if request.concurrency < 0:
        raise ConfigError(
            f"The concurrency is {request.concurrency}; it must be at least 1, or 0 for the default."
        )
    if request.place.is_server and not request.place.name:
        raise ConfigError(f"Say with --model by which name {request.place.base_url} knows the model.")
    if request.place.is_server:
        flags = {"dtype": request.dtype, **request.form.changes()}
        for flag, value in flags.items():
            if value not in ("", AUTO):
                raise ConfigError(
                    f"--{flag} is {value}, and {request.place.title} answers as its server was started; "
                    "leave it out."
                )
    return _prepare_program(request) if request.program else _prepare_benchmark(request)


async def evaluated(
    request: Asked, directory: Path | None = None, *, ks: Sequence[int] = (), prices: Prices = NO_PRICES
) -> dict[str, Any]:
    """Evaluate, and keep every episode and the report in `directory`; in none, where it is None."""
    ready = prepare(request)
    if directory is not None:
        return await ready.run(directory, ks=ks, prices=prices)
    with TemporaryDirectory(prefix="rllm-eval-") as scratch:
        return await ready.run(Path(scratch) / "eval", ks=ks, prices=prices)


def _prepare_benchmark(request: Asked) -> Prepared:
    spec = benchmark_named(request.benchmark)
    _require_questions(request, spec)
    if request.likelihood:
        return _prepare_likelihood(request, spec)
    _require_agent_of_software(request, spec)
    require_selectable(request, spec)
    presentation = presentation_of(request, spec)
    config, agent_args = presentation.config, presentation.agent_args
    actor = actor_named(request.agent or spec.agent)
    judge = judge_of_benchmark(spec, request.evaluator, None if request.select else request.judge)
    asks_questions = spec.asks_questions
    split = request.split or spec.eval_split
    if not asks_questions:
        _require_judge_of_world(spec, judge, actor)
    tasks = request.chosen(_benchmark_tasks(request, spec, split, config))
    plan = EvaluationPlan(
        name=spec.name,
        agent=request.agent or spec.agent,
        ways=_ways(request, MAX_EVAL_TOKENS if asks_questions else config.rollout.max_tokens_per_turn),
        split=split,
        agent_hash=source_hash(actor.source, {**agent_args, **actor.settings}),
        max_turns=config.rollout.max_turns if actor.agent is not None else 0,
        settings={} if asks_questions else presentation.record(),
        source=source_facts(spec, split) if asks_questions else {},
        skipped={} if asks_questions else _skips(spec, split, config),
        **_common(request, judge, tasks),
    )
    if actor.agent is None:
        evaluator = judge.evaluator or _evaluator_of_world(spec) or task_evaluator()
        require_gradable(evaluator, tasks, spec.name)
        return Prepared(
            plan=plan,
            request=request,
            tasks=for_programs(tasks),
            open_engine=partial(_program_or_workflow, request, actor, evaluator),
            world=benchmark_world(spec),
        )
    if judge.evaluator is not None:
        require_gradable(judge.evaluator, tasks, spec.name)
    elif tasks:  # a grader that is not there, or not installed, is not found out task by task
        benchmark_world(spec).env_class.from_dict(dict(tasks[0])).close()
    return Prepared(
        plan=plan,
        request=request,
        tasks=tasks,
        open_engine=partial(agent_engine, request, spec, config, actor.agent, agent_args, judge.evaluator),
        world=benchmark_world(spec),
        world_pays=judge.evaluator is None,
    )


def _require_questions(request: Asked, spec: Benchmark) -> None:
    """Raises ConfigError where worked examples or likelihoods are for questions alone."""
    for flag, value in (("--few-shot", request.few_shot), ("--likelihood", request.likelihood)):
        if value and not spec.asks_questions:
            raise ConfigError(
                f"{flag} is for questions from rows, and `{spec.name}` is a world; leave it out."
            )


def _prepare_likelihood(request: Asked, spec: Benchmark) -> Prepared:
    """An evaluation that compares the choices of questions by their likelihood."""
    _refuse_beside_likelihood(request)
    split = request.split or spec.eval_split
    examples = example_questions(spec, split, request.few_shot, request.seed) if request.few_shot else []

    def as_task(benchmark: Benchmark, split: str, place: int, row: Any) -> dict[str, Any]:
        return likelihood_task(
            question_of_row(benchmark, split, place, row),
            task_id=f"{benchmark.name}-{split}-{place}",
            prompt=benchmark.likelihood_prompt or PROMPT,
            answer=benchmark.likelihood_answer,
            examples=examples,
        )

    tasks = request.chosen(benchmark_tasks(spec, split, request.num_read, as_task=as_task))
    plan = EvaluationPlan(
        name=spec.name,
        agent=WAY,
        ways={WAY: None},
        split=split,
        likelihood=request.likelihood,
        source=source_facts(spec, split),
        **_common(request, ChosenJudge(name="choice", evaluator=None, hash=""), tasks),
    )
    return Prepared(
        plan=plan,
        request=request,
        tasks=tasks,
        open_engine=partial(likelihood_engine, request),
        world=benchmark_world(spec),
    )


def _refuse_beside_likelihood(request: Asked) -> None:
    """Raises ConfigError for what has no meaning where nothing is asked."""
    if request.place.is_server:
        raise ConfigError(
            f"--likelihood reads the log-probabilities of a model that is here, and {request.place.title} is "
            "a server; give its directory with --model."
        )
    values = {
        "--agent": request.agent,
        "--evaluator": request.evaluator,
        "--judge-model": request.judge,
        "--sampling": request.sampling,
        "--select": request.select,
        "--attempts": request.attempts > 1,
        **{f"--{flag}": value for flag, value in request.form.changes().items()},
    }
    for flag, value in values.items():
        if value:
            raise ConfigError(
                f"{flag} would do nothing beside --likelihood, which asks nothing; leave it out."
            )


def _require_agent_of_software(request: Asked, spec: Benchmark) -> None:
    """Raises ConfigError where software tasks would be asked for in one answer, and nobody chose that."""
    if spec.evaluator == "swebench" and not request.agent:
        raise ConfigError(
            f"`{spec.name}` is worked on in its repositories: measure an agent on its rows, `rllm eval "
            "rows.jsonl --agent swe` (docs/swe.md). `--agent conversation` asks for a patch in one answer, "
            "without a look at the repository."
        )


def _prepare_program(request: Asked) -> Prepared:
    assert request.program is not None, "a program is evaluated"
    for flag, value in (("--few-shot", request.few_shot), ("--likelihood", request.likelihood)):
        if value:
            raise ConfigError(
                f"{flag} is for benchmarks of questions; `{request.program.program}` says itself what its "
                "model is shown. Leave it out."
            )
    require_selectable(request, None)
    if request.agent:
        raise ConfigError(f"`{request.program.program}` is what acts; leave --agent {request.agent} out.")
    if request.as_trained is not None:
        raise ConfigError(
            f"`{request.program.program}` says itself what its model is shown; leave --as-trained and "
            "--with-rules out."
        )
    request.program.require_all()
    actor = program_named(request.program.program)
    if request.program.brings_tasks:
        if request.judge is not None:
            raise ConfigError(f"`{request.program.program}` judges by itself; leave --judge-model out.")
        judge = ChosenJudge(name=PAYS_ITSELF.name, evaluator=PAYS_ITSELF, hash=hash_of(actor.settings))
        split = request.split or TEST
        program_tasks = task_program(request.program.program).tasks(split, request.num_read)
        rows, all_tasks = [task.to_row() for task in program_tasks], program_tasks
    else:
        split = request.split
        judge = judge_named(request.program.evaluator, request.judge)
        rows = rows_of(request.program.dataset, request.split)[: request.num_read]
        all_tasks = tasks_of(rows, dataset=request.program.dataset)
    assert judge.evaluator is not None, "it was asked for by name"
    places = request.places(all_tasks)
    tasks = [all_tasks[place] for place in places]
    require_gradable(judge.evaluator, [task.to_row() for task in tasks], request.program.dataset)
    says_itself = request.place.is_server and not request.sampling and actor.flow is not None
    plan = EvaluationPlan(
        name=request.program.label,
        agent=request.program.program,
        ways={"as asked": None} if says_itself else _ways(request, SamplingParams().max_tokens),
        split=split,
        agent_hash=source_hash(actor.source, actor.settings),
        **_common(request, judge, [rows[place] for place in places]),
    )
    return Prepared(
        plan=plan,
        request=request,
        tasks=tasks,
        open_engine=partial(_program_or_workflow, request, actor, judge.evaluator),
    )


def _program_or_workflow(request: Asked, actor: Actor, evaluator: Evaluator) -> Any:
    """Its engine, not yet open."""
    if actor.workflow is not None:
        return workflow_engine(request, actor.workflow, evaluator)
    assert actor.flow is not None, "it is no agent of an environment"
    return program_engine(request, actor.flow, row_by_row(evaluator))


def _common(request: Asked, judge: ChosenJudge, rows: Sequence[Any]) -> dict[str, Any]:
    """The part that every plan says in the same way."""
    model, weights_hash = _model_facts(request)
    return {
        "model": model,
        "model_hash": weights_hash,
        "base_url": request.place.base_url,
        "evaluator": judge.name,
        "evaluator_hash": judge.hash,
        "judge_model": request.judge.title if request.judge else "",
        "num_tasks": len(rows),
        "dataset_hash": hash_of(rows),
        "attempts": request.attempts,
        "seed": request.seed,
        "dtype": "" if request.dtype in ("auto", "float32") else request.dtype,
        "form": _form_facts(request.form),
        "few_shot": request.few_shot,
        "rllm": version(),
    }


# ---- what is asked, looked up ------------------------------------------------------------------------


def _require_judge_of_world(spec: Benchmark, judge: ChosenJudge, actor: Actor) -> None:
    """A world pays whoever plays it, and nobody else."""
    if judge.evaluator is not None and actor.agent is not None:
        raise ConfigError(
            f"`{spec.name}` pays for what is done in its world, so --evaluator {judge.name} would be "
            "ignored; leave it out."
        )
    if judge.evaluator is None and actor.agent is None and _evaluator_of_world(spec) is None:
        raise ConfigError(
            f"`{spec.name}` pays for what is done in its world, but {actor.name} does not play it: "
            "say who judges its episodes with --evaluator."
        )


def _evaluator_of_world(spec: Benchmark) -> Evaluator | None:
    """The evaluator of programs that work on the tasks of a world; None where the world pays its players
    alone."""
    judge = benchmark_world(spec).evaluator
    return None if judge is None else as_evaluator(judge)


def _benchmark_tasks(
    request: Asked, spec: Benchmark, split: str, config: TrainConfig
) -> list[dict[str, Any]]:
    if spec.asks_questions:
        tasks = benchmark_tasks(spec, split, request.num_read)
        few_shot = request.few_shot
        return with_examples(tasks, spec, split, few_shot, request.seed) if few_shot else tasks
    if split not in spec.splits:
        raise ConfigError(f"`{spec.name}` has no split `{split}`; it has {', '.join(spec.splits)}.")
    count = NUM_TASKS if request.num_tasks is None else request.num_tasks
    if request.expression:
        count = max(count, NUM_TASKS)
    return benchmark_world(spec).tasks(split, count, **config.task.environment_args)


def _skips(spec: Benchmark, split: str, config: TrainConfig) -> dict[str, str]:
    world = benchmark_world(spec)
    return {} if world.skipped is None else world.skipped(split, **config.task.environment_args)


def _ways(request: Asked, max_tokens: int) -> dict[str, SamplingParams | None]:
    if request.sampling or request.attempts > 1 or request.place.is_server:
        return {"sampled": sampling_of(request.sampling, SamplingParams(max_tokens=max_tokens))}
    return {
        "sampled": SamplingParams(temperature=1.0, max_tokens=max_tokens),
        "greedy": SamplingParams(temperature=0.0, max_tokens=max_tokens),
    }


def _form_facts(form: ChatForm) -> dict[str, str]:
    """The form of conversations as far as it was chosen, with the hash of a template that is a file."""
    facts = form.changes()
    if form.chat_template and form.chat_template not in NAMES:
        text = chat_template_named(form.chat_template, begins_texts=False)
        facts["chat-template"] = f"{form.chat_template} ({hash_of(text)})"
    return facts


def _model_facts(request: Asked) -> tuple[str, str]:
    """The model, and the hash of its weights where they are here."""
    if request.place.is_server:
        return request.place.name, ""
    directory = model_directory(Path(request.place.path))
    return str(directory), model_hash(directory)
