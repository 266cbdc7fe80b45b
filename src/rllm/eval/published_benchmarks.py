"""Published names of benchmarks that are not here, and what takes their place."""

from rllm.data.published_names import name_key

_PICTURES = (
    "its rows and the grader of its answers are not in the catalogue; of benchmarks with pictures mmmu, "
    "mmmu-pro, mathvista, mathvision, geo3k, ai2d and countbenchqa are, and ten that are drawn here "
    "(docs/vision.md)"
)
_SOFTWARE = (
    "its tasks are container images of their own; write the rows of those that you have as a file, and name "
    "that: `rllm eval rows.jsonl` (docs/swe.md)"
)
_OWN_TASKS = "a directory of tasks is named by its path (docs/eval.md)"
_HARNESS = f"it is graded by a harness of its own; {_OWN_TASKS}"
_SEARCH = "it needs a search service; `browsecomp` asks the like over a corpus of its own (docs/search.md)"
_SITES = {
    "webarena": "seven sites as container images (WA_SHOPPING, WA_REDDIT, WA_GITLAB, WA_MAP, …)",
    "visualwebarena": "five sites as container images (VWA_CLASSIFIEDS, VWA_SHOPPING, VWA_REDDIT, …)",
    "workarena": "an instance of ServiceNow (SNOW_INSTANCE_URL)",
    "assistantbench": "the open web",
}
"""Benchmark -> the servers that its tasks are played on, which nothing here starts."""

ABSENT = {
    **dict.fromkeys(
        (
            *("dynamath", "zerobench", "zerobench_sub", "vlmsareblind", "babyvision", "ocrbench"),
            *("charxiv", "cc_ocr", "erqa", "omnidocbench", "docvqa", "refcoco", "refspatial"),
            *("lingoqa", "sunrgbd"),
        ),
        _PICTURES,
    ),
    **dict.fromkeys(("rllm_swesmith", "swesmith", "r2egym", "r2egym_lite", "deepswe"), _SOFTWARE),
    **dict.fromkeys(("skillsbench", "skillsbench_no_skills", "claw_eval", "migrationbench"), _HARNESS),
    **dict.fromkeys(("hle_search", "widesearch"), _SEARCH),
    **{
        name: f"it is played on {servers}; where they are, an installed BrowserGym plays "
        f"`browsergym/{name}.TASK` (docs/web.md)"
        for name, servers in _SITES.items()
    },
    **dict.fromkeys(
        ("webvoyager", "online_mind2web"),
        "its rows are not fetched; get them from their publisher and name the file: `rllm eval ROWS.jsonl "
        "--agent web` (docs/web.md)",
    ),
    "gdpval": "its answers are office documents, which a judge of its own opens; " + _OWN_TASKS,
}
"""Published name -> what takes its place."""


def successor(name: str) -> str | None:
    """The successor of a published benchmark that is not here; None for any other name."""
    return ABSENT.get(name_key(name))
