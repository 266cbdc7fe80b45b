"""The requests of the page: a name and parameters in, plain JSON values out. Server and exports share it.

/api/episode?run=…&id=7 ──► answer(sources, "episode", Query) ──► episode_page ──► {…}
"""

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

from rllm.errors import ConfigError, choices_of
from rllm.view.comparison_page import comparison_page
from rllm.view.episode_page import episode_page, prompt_page
from rllm.view.evaluation_page import answer_page, elsewhere_page, evaluation_page
from rllm.view.group_pages import attempts_page, episodes_page, groups_page
from rllm.view.library_pages import (
    dataset_page,
    datasets_page,
    models_page,
    session_page,
    sessions_page,
    worker_run_page,
    workers_page,
)
from rllm.view.query import Query
from rllm.view.run_pages import distribution_page, run_page, runs_page
from rllm.view.sources import Sources

Page = Callable[[Sources, Query], dict[str, Any]]

PAGES: dict[str, Page] = {
    "runs": runs_page,
    "run": run_page,
    "compare": comparison_page,
    "distribution": distribution_page,
    "episodes": episodes_page,
    "groups": groups_page,
    "attempts": attempts_page,
    "episode": episode_page,
    "prompt": prompt_page,
    "evaluation": evaluation_page,
    "answer": answer_page,
    "elsewhere": elsewhere_page,
    "datasets": datasets_page,
    "dataset": dataset_page,
    "models": models_page,
    "workers": workers_page,
    "worker_run": worker_run_page,
    "sessions": sessions_page,
    "session": session_page,
}


def answer(sources: Sources, request: str) -> dict[str, Any]:
    """`request` is what stands behind /api/: a name, and parameters as in an address."""
    name, _, parameters = request.partition("?")
    page = PAGES.get(name)
    if page is None:
        raise ConfigError(f"There is no page {name[:80]!r}; {choices_of(name[:80], PAGES)}.")
    return page(sources, Query(parse_qs(parameters, keep_blank_values=True, max_num_fields=100)))
