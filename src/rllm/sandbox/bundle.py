"""The code of a sandbox's inside as one text, so that no file of this machine has to be seen there.

inside/*.py ──► memfd ──► python3 -c LOADER ──► modules of the same names ──► warden.main
"""

import json
import os
from functools import cache
from importlib import resources
from typing import Any

PACKAGE = "rllm.sandbox.inside"
MODULES = ("kernel", "seccomp", "cellmates", "files", "jobs", "root", "layers", "stack", "cell", "warden")
"""In the order in which they import each other."""

LOADER = (
    "import json,os,sys,types\n"
    "sys.path[:] = [p for p in sys.path if p]\n"
    "bundle = json.load(os.fdopen(int(sys.argv[1])))\n"
    "for name, source in bundle['modules']:\n"
    "    module = sys.modules[name] = types.ModuleType(name)\n"
    "    module.__path__ = []\n"
    "    parent, _, child = name.rpartition('.')\n"
    "    if parent: setattr(sys.modules[parent], child, module)\n"
    "    exec(compile(source, name, 'exec', dont_inherit=True), module.__dict__)\n"
    "arguments = bundle['arguments']\n"
    "del bundle, source\n"
    "module.main(arguments)\n"
)
"""What the interpreter is given on its command line: it reads everything else from a descriptor."""


def bundle(arguments: dict[str, Any]) -> int:
    """A descriptor, at its beginning, that LOADER starts a warden from. The caller closes it."""
    return memory_file(json.dumps({"modules": _modules(), "arguments": arguments}).encode(), name="warden")


@cache
def _modules() -> list[tuple[str, str]]:
    folder = resources.files(PACKAGE)
    parents = [(".".join(PACKAGE.split(".")[:depth]), "") for depth in range(1, 4)]
    sources = [(f"{PACKAGE}.{name}", (folder / f"{name}.py").read_text(encoding="utf-8")) for name in MODULES]
    return parents + sources


def memory_file(data: bytes, *, name: str) -> int:
    """An anonymous file that holds `data` and can never change. The caller closes it."""
    import fcntl

    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor
