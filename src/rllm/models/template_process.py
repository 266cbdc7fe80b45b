"""The process that chat templates run in: a program by itself, started by `rllm.models.chat_template`.

    stdin   size (8 bytes), JSON {"template", "variables", "max_characters"}
    stdout  b"T" text, b"E" what was wrong with it, b"M" out of memory; each with its size (8 bytes) before it

A template that works for too long is ended by the kernel (SIGPROF), whatever it is doing. The environment is
the one of transformers' `apply_chat_template`, which takes a second to import.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_SIZE_BYTES = 8
_MAX_COMPLAINT = 2_000


class _Generation(Extension):
    """`{% generation %}`, which marks what the model says; here it only prints it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict(…)` of a template, without the type behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace(…)` of a template; names that Python keeps to itself are refused."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise TemplateError(f"a namespace takes no name that begins with an underscore, such as {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    """Not Jinja's own, which escapes what HTML would mind."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=16)
def compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_now, dict=_Dict(), namespace=_Namespace
    )
    return environment.from_string(template)


def rendered(template: str, variables: dict[str, Any], max_characters: int) -> str:
    text = compiled(template).render(variables)
    if len(text) > max_characters:
        raise TemplateError(f"it printed {len(text):,} characters, more than the {max_characters:,} allowed")
    return text


def _answer(request: bytes) -> tuple[bytes, bytes]:
    try:
        text = rendered(**json.loads(request))
        return b"T", text.encode("utf-8", "surrogatepass")
    except MemoryError:
        return b"M", b""
    except Exception as error:  # noqa: BLE001  (of a foreign program)
        complaint = str(error) or type(error).__name__
        return b"E", complaint[:_MAX_COMPLAINT].encode("utf-8", "backslashreplace")


def _serve(read: Callable[[int], bytes], out: BinaryIO, cpu_s: float) -> None:
    while len(size := read(_SIZE_BYTES)) == _SIZE_BYTES:
        request = read(int.from_bytes(size))
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        kind, answer = _answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        out.write(kind + len(answer).to_bytes(_SIZE_BYTES) + answer)
        out.flush()


def main(cpu_s: float, memory_bytes: int) -> None:
    # Whoever stops the program stops it for everyone in its group; this process ends with its stdin.
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _serve(sys.stdin.buffer.read, sys.stdout.buffer, cpu_s)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
