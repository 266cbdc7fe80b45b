"""The options of `rllm eval`, declared once ──► a request for an evaluation."""

from dataclasses import dataclass
from pathlib import Path

import click

from rllm.build.asked import MODEL_TIMEOUT_S, Asked, task_places
from rllm.build.configs import ProgramNames, is_program
from rllm.build.judges import judge_place
from rllm.build.providers import ModelPlace, resolve_model
from rllm.build.sampling import assignments_of
from rllm.cli.command import (
    WordChoice,
    argument,
    chat_form,
    chat_template_option,
    json_option,
    max_thinking_tokens_option,
    option,
    shared,
    thinking_option,
    tool_form_option,
    trust_option,
)
from rllm.config.schema import DTYPES
from rllm.eval.catalogue import benchmark_named
from rllm.eval.likelihood import READINGS
from rllm.eval.report import Prices, require_ks
from rllm.worker.step_host import open_workers


@dataclass(kw_only=True, slots=True, frozen=True)
class EvalOptions:
    """The options as the user typed them."""

    benchmark: str = argument(metavar="BENCHMARK|PROGRAM", required=False, default="")
    others: tuple[str, ...] = argument(nargs=-1, metavar="")
    model: str = option(
        "--model",
        default="",
        metavar="DIR|NAME",
        help="A run, for its trained model, a model directory in Hugging Face format, builtin:tiny, a name "
        "of `rllm model list` or `rllm model pull`, PROVIDER:MODEL, or ORG/NAME of the hub, fetched once and "
        "kept. With --base-url, the name that the server knows it by.",
    )
    base_url: str = option(
        "--base-url",
        default="",
        metavar="URL",
        help="An OpenAI-compatible server; its key is read from OPENAI_API_KEY.",
    )
    agent: str = option(
        "--agent",
        default="",
        metavar="NAME",
        help="Who acts: a built-in agent, or file.py:Class or :function.",
    )
    evaluator: str = option(
        "--evaluator", default="", metavar="NAME", help="What judges: a built-in grader, or my_flow.py:score."
    )
    judge_model: str = option(
        "--judge-model",
        default="",
        metavar="NAME",
        help="The model that an LLM judge asks, or that chooses for --select model, as for --model.",
    )
    judge_base_url: str = option(
        "--judge-base-url", default="", metavar="URL", help="The server of --judge-model."
    )
    dataset: str = option(
        "--dataset",
        default="",
        metavar="FILE|NAME",
        help="A program's tasks: a file, or a registered data set.",
    )
    as_trained: bool | None = option(
        "--as-trained/--with-rules",
        default=None,
        help="Show the tasks of a world as `rllm train` does, without their rules, or with them.  [default: "
        "as trained for runs of it and built-in models that are here, else with rules]",
    )
    split: str = option("--split", default="", help="Which tasks of a benchmark.  [default: its test split]")
    num_tasks: int | None = option(
        "--max-examples",
        "--num-tasks",
        type=click.IntRange(min=1),
        help="At most so many tasks.  [default: all; 256 of a world that makes its own]",
    )
    indices: str = option(
        "--task-indices",
        default="",
        metavar="N,N-N",
        help="Only these of the tasks, by their places: 0, 3,7,12 or 0-9.",
    )
    expression: str = option(
        "--filter",
        default="",
        metavar="EXPR",
        help="Only tasks of whose fields this holds, so many of them at most: comparisons with and, "
        "or, not, in.",
    )
    few_shot: int = option(
        "--few-shot",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="Worked examples before each question, drawn by the seed from the training split, else the "
        "validation split; never from the one that is measured.",
    )
    likelihood: str = option(
        "--likelihood",
        type=WordChoice(("", *READINGS)),
        default="",
        metavar="|".join(READINGS),
        help="Ask nothing: compare the choices of each question by their log-probability, as a sum, per "
        "token or per character. All three are reported; the named one counts.",
    )
    attempts: int = option(
        "--attempts", type=click.IntRange(min=1), default=1, show_default=True, help="Tries at each task."
    )
    select: str = option(
        "--select",
        default="",
        metavar="tests|majority|model",
        help="Hand in one of the attempts at a software-engineering task, chosen without the hidden tests: "
        "by tests that its author could see, by equal patches, or by the model (or --judge-model).",
    )
    ks: tuple[int, ...] = option(
        "--k", type=click.IntRange(min=1), multiple=True, help="Tell pass@k, majority@k and best-of-k."
    )
    sampling: tuple[str, ...] = option(
        "--sampling",
        multiple=True,
        metavar="K=V",
        help="Such as temperature=0.6, top_p=0.95, max_tokens=2048.",
    )
    concurrency: int | None = option(
        "--concurrency", type=click.IntRange(min=1), default=None, help="Episodes at the same time."
    )
    episode_timeout_s: float | None = option(
        "--episode-timeout",
        type=click.FloatRange(min=0.0, min_open=True),
        default=None,
        metavar="SECONDS",
        help="Longest time of an episode without its model calls.  [default: what the benchmark says]",
    )
    model_timeout_s: float = option(
        "--model-timeout",
        type=click.FloatRange(min=0.0, min_open=True),
        default=MODEL_TIMEOUT_S,
        show_default=True,
        metavar="SECONDS",
        help="A server that answers no call for so long has failed.",
    )
    seed: int = option(
        "--seed",
        type=click.IntRange(0, 2**63 - 1),
        default=0,
        show_default=True,
        help="Seed of the sampling.",
    )
    threads: int = option(
        "--threads", type=click.IntRange(min=0), default=0, help="Threads of torch; 0 takes one per core."
    )
    dtype: str = option(
        "--dtype",
        type=WordChoice(DTYPES),
        default="auto",
        help="Data type of a model that is here: float32, or bfloat16, which is faster on processors with "
        "instructions for it and changes some answers.  [default: float32]",
    )
    tool_form: str = shared(tool_form_option)
    chat_template: str = shared(chat_template_option)
    thinking: str = shared(thinking_option)
    max_thinking_tokens: int = shared(max_thinking_tokens_option)
    trust_remote_code: bool = shared(trust_option)
    prompt_price: float = option(
        "--prompt-price", type=float, default=0.0, help="Of a million prompt tokens, to tell the cost."
    )
    completion_price: float = option(
        "--completion-price", type=float, default=0.0, help="Of a million sampled tokens."
    )
    output: Path | None = option(
        "--output", type=click.Path(path_type=Path), help="Where it is kept.  [default: in evals/]"
    )
    resume: bool = option("--resume", is_flag=True, help="Go on with --output, and refuse to begin anew.")
    fresh: bool = option("--fresh", is_flag=True, help="Begin anew beside an evaluation that is there.")
    comparing: bool = option("--compare", is_flag=True, help="Compare two stored evaluations.")
    rescoring: bool = option("--rescore", is_flag=True, help="Judge a stored evaluation again.")
    way: str = option(
        "--way", default="", help="Which part to compare, such as greedy.  [default: the first in both]"
    )
    as_json: bool = shared(json_option)

    @property
    def prices(self) -> Prices:
        return Prices(prompt=self.prompt_price, completion=self.completion_price)

    @property
    def judge(self) -> ModelPlace | None:
        return judge_place(self.judge_model, self.judge_base_url)

    def request(self) -> Asked:
        """The request for what BENCHMARK|PROGRAM names. Raises ConfigError for a name that leads nowhere."""
        program = None
        if is_program(self.benchmark, self.dataset):
            program = ProgramNames(program=self.benchmark, evaluator=self.evaluator, dataset=self.dataset)
        else:
            benchmark_named(self.benchmark)  # a misspelt name is told before anything is said of the model
        return Asked(
            open_workers=open_workers,
            benchmark="" if program else self.benchmark,
            program=program,
            place=resolve_model(self.model, base_url=self.base_url),
            agent=self.agent,
            as_trained=self.as_trained,
            evaluator=self.evaluator,
            split=self.split,
            num_tasks=self.num_tasks,
            indices=task_places(self.indices),
            expression=self.expression,
            few_shot=self.few_shot,
            likelihood=self.likelihood,
            attempts=self.attempts,
            sampling=assignments_of(self.sampling),
            seed=self.seed,
            concurrency=self.concurrency or 0,
            episode_timeout_s=self.episode_timeout_s or 0.0,
            model_timeout_s=self.model_timeout_s,
            threads=self.threads,
            dtype=self.dtype,
            form=chat_form(self),
            trust_remote_code=self.trust_remote_code,
            judge=self.judge,
            select=self.select,
        )

    def sizes(self, attempts: int) -> tuple[int, ...]:
        """Which k are told: those that were asked for, else one and all where there are several attempts."""
        ks = self.ks or (tuple(sorted({1, attempts})) if attempts > 1 else ())
        require_ks(ks, attempts)
        return ks
