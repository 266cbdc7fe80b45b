"""A page as one file that loads nothing: what is on screen, to keep or to send.

address of the page ──► requests ──► answers ──┐
static/*.js ──► one script, module by module ──┴──► FILE.html

The scripts are the page's own. In the file they find their answers beside them instead of asking a server,
and the file's own policy lets the browser run nothing but exactly these scripts.
"""

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Iterable
from functools import cache, partial
from html import escape
from urllib.parse import parse_qsl, urlencode

from rllm.errors import ConfigError, choices_of
from rllm.eval.plan import KIND
from rllm.store.browsing import VERDICTS
from rllm.view.pages import answer
from rllm.view.sources import Sources
from rllm.view.static_files import static_names

MAX_REQUESTS = 400
MAX_CHARS = 40_000_000
"""The length of all answers together."""
_IMPORT = re.compile(r'^import \{([^}]*)\} from "([^"]+)";$', re.MULTILINE)
_SHOWN = ("run", "phase", "step")
_PARAMETERS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "runs": ((), {}),
    "compare": (("run",), {}),
    "episodes": (
        (*_SHOWN, "task", "outcome", "correct", "q", "order", "descending", "offset"),
        {"limit": "100"},
    ),
    "step": ((*_SHOWN, "order"), {"phase": "train"}),
    "attempts": ((*_SHOWN, "task"), {"phase": "train"}),
    "datasets": ((), {}),
    "dataset": (("name", "split", "q", "offset"), {"limit": "50"}),
    "models": ((), {}),
    "workers": ((), {}),
    "worker_run": (("store", "id"), {}),
    "sessions": (("ledger", "after"), {}),
    "session": (("ledger", "id", "offset"), {}),
}
"""Page -> which parameters of its address it asks with, and what it asks for where they say nothing."""
_EXPORT = re.compile(r"^export (async function|function|const) (\w+)", re.MULTILINE)


def exported_page(sources: Sources, address: str, requests: Iterable[str]) -> str:
    """`address` is what stands behind # in the page's address; `requests` are what it asks for."""
    answers: dict[str, object] = {}
    num_chars = 0
    for request in dict.fromkeys(requests):
        answers[request] = value = answer(sources, request)
        num_chars += len(json.dumps(value, default=str))
        if len(answers) > MAX_REQUESTS or num_chars > MAX_CHARS:
            raise ConfigError(
                f"The page {address[:80]!r} needs more than {MAX_REQUESTS} answers or {MAX_CHARS:,} "
                "characters; save one that shows less."
            )
    style = "\n".join(static_names()[name].read_text() for name in ("vendor/uPlot.min.css", "style.css"))
    scripts = [static_names()["vendor/uPlot.iife.min.js"].read_text(), _one_script()]
    policy = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src {_hash(style)}; script-src {' '.join(map(_hash, scripts))}; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    data = json.dumps({"address": address, "answers": answers}, default=str, allow_nan=False)
    # Inside a script element, a `</script>` in any text would end it.
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    body = static_names()["index.html"].read_text().partition("<body>")[2].partition("</body>")[0]
    return "".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark"><title>rLLM</title>',
            f"<style>{style}</style></head><body>{body}",
            f'<script type="application/json" id="kept">{data}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        )
    )


def default_address(sources: Sources) -> str:
    """The page of the only run there is, else the table of runs."""
    runs = sources.runs()
    if len(runs) != 1:
        return "runs"
    key, run = next(iter(runs.items()))
    name = "evaluation" if run.config().get("kind") == KIND else "run"
    return f"{name}?{urlencode({'run': key})}"


def requests_of(sources: Sources, address: str) -> list[str]:
    """The requests of the page at `address` when it is opened, in the words of its script. Raises ConfigError
    where there is no such page."""
    name, _, query = address.removeprefix("#").removeprefix("/").partition("?")
    values = parse_qsl(query)
    if name == "run":
        page = answer(sources, f"run?{query}")
        names = [phase["name"] for phase in page["phases"]]
        phase = "train" if "train" in names else (names or [""])[-1]
        return [
            _request("run", values),
            *([_request("distribution", [*values, ("phase", phase)])] if phase else []),
        ]
    if name == "evaluation":
        return _evaluation_requests(sources, values)
    if name == "episode":
        turn = int(dict(values).get("turn") or 0) // 50 * 50
        own = [each for each in values if each[0] in ("run", "id")]
        return [_request(name, [*own, *([("from", str(turn))] if turn else [])])]
    if name not in _PARAMETERS:
        pages = sorted({*_PARAMETERS, "run", "evaluation", "episode"})
        raise ConfigError(f"There is no page {name[:80]!r}; {choices_of(name[:80], pages)}.")
    names, defaults = _PARAMETERS[name]
    own = [(key, value) for key, value in values if key in names and value]
    own += [(key, value) for key, value in defaults.items() if key not in dict(own)]
    requests = [_request("groups" if name == "step" else name, own)]
    if name == "attempts":
        requests.append(_request("elsewhere", [each for each in own if each[0] in ("run", "task")]))
    return requests


def _evaluation_requests(sources: Sources, values: list[tuple[str, str]]) -> list[str]:
    """Every way of it: its tasks, and its attempts by verdict with what was asked and answered."""
    run = dict(values).get("run", "")
    shown = _request("evaluation", [*values, ("limit", "50")])
    requests = [shown]
    for phase in answer(sources, shown).get("phases", ()):
        own = [("run", run), ("phase", phase), ("limit", "50")]
        requests.append(_request("evaluation", own))
        for verdict in ("", *VERDICTS):
            request = _request("evaluation", [*own, ("by", "attempt"), ("verdict", verdict)])
            requests.append(request)
            rows = answer(sources, request)["rows"] if verdict else ()
            requests += [_request("answer", [("run", run), ("id", str(row["id"]))]) for row in rows]
    return requests


def _request(name: str, values: list[tuple[str, str]]) -> str:
    """As static/api.js writes it: by the names of the parameters, without empty ones."""
    query = urlencode(sorted(((key, value) for key, value in values if value), key=lambda each: each[0]))
    return f"{name}?{query}" if query else name


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _one_script() -> str:
    """All modules of the page as one script: each is a function that is called where it is first needed."""
    names = [name for name in static_names() if name.endswith(".js") and not name.startswith("vendor/")]
    parts = ['"use strict";', "const modules = {}, made = {};"]
    parts.append("const load = (name) => (made[name] ??= modules[name]());")
    for name in names:
        text = static_names()[name].read_text()
        exports = [match[1] for match in _EXPORT.findall(text)]
        text = _EXPORT.sub(r"\1 \2", text)
        text = _IMPORT.sub(partial(_loading, name), text)
        parts.append(
            f"modules[{json.dumps(name)}] = () => {{\n{text}\nreturn {{ {', '.join(exports)} }};\n}};"
        )
    parts.append('load("main.js");')
    script = "\n".join(parts)
    assert "</script" not in script, "it stands in a page"
    return f"(() => {{\n{script}\n}})();"


def _loading(importer: str, match: re.Match[str]) -> str:
    """`import { a } from "./b.js";` as a declaration."""
    parts = importer.split("/")[:-1]
    for part in match[2].split("/"):
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return f"const {{{match[1].replace(' as ', ': ')}}} = load({json.dumps('/'.join(parts))});"
