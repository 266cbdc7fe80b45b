"""The code of a sandbox's inside as one text, so that no file of this machine has to be seen there.

inside/*.py ──► memfd ──► python3 -c LOADER ──► modules of the same names ──► warden.main

An interpreter that reads this process's bytecode gets the modules compiled: to compile them takes longer
than to start it.
"""

import json
import marshal
import os
from functools import cache
from importlib import resources
from importlib.util import MAGIC_NUMBER
from typing import Any

PACKAGE = "rllm.sandbox.inside"
SHARED = "rllm.errors.machine"
"""A module of the ground floor that runs inside as well."""
MODULES = (
    "kernel",
    "seccomp",
    "cellmates",
    "folders",
    "files",
    "jobs",
    "root",
    "layers",
    "stack",
    "guard",
    "cell",
    "warden",
)
"""In the order in which they import each other."""

_PORTABLE = 4
"""Version of marshal in which every Python from 3.9 reads texts."""

# The empty entry that `-c` puts on `sys.path` is the working
# directory; cells change to one that programs write to.
LOADER = (
    "import json,marshal,os,sys,types\n"
    "sys.path[:] = [p for p in sys.path if p]\n"
    "with os.fdopen(int(sys.argv[1]), 'rb') as bundle:\n"
    "    arguments, modules = json.loads(bundle.readline()), marshal.load(bundle)\n"
    "for name, code in modules:\n"
    "    module = sys.modules[name] = types.ModuleType(name)\n"
    "    module.__path__ = []\n"
    "    parent, _, child = name.rpartition('.')\n"
    "    if parent: setattr(sys.modules[parent], child, module)\n"
    "    if isinstance(code, str): code = compile(code, name, 'exec', dont_inherit=True)\n"
    "    exec(code, module.__dict__)\n"
    "del bundle, modules, code\n"
    "module.main(arguments)\n"
)
"""The code on the interpreter's command line: it reads everything else from a descriptor."""


def bundle(arguments: dict[str, Any], *, bytecode: bytes) -> int:
    """A descriptor, at its beginning, that LOADER starts a warden from. The caller closes it.

    `bytecode` is the magic number of the interpreter that will read it.
    """
    modules = _modules(is_compiled=bytecode == MAGIC_NUMBER)
    return memory_file(json.dumps(arguments).encode() + b"\n" + modules, name="warden")


@cache
def _modules(*, is_compiled: bool) -> bytes:
    """(name, code or source) of each module, marshalled."""
    folder = resources.files(PACKAGE)
    sources = [(".".join(PACKAGE.split(".")[:depth]), "") for depth in range(1, 4)]
    package, _, module = SHARED.rpartition(".")
    sources += [(package, ""), (SHARED, (resources.files(package) / f"{module}.py").read_text("utf-8"))]
    sources += [
        (f"{PACKAGE}.{name}", (folder / f"{name}.py").read_text(encoding="utf-8")) for name in MODULES
    ]
    if not is_compiled:
        return marshal.dumps(sources, _PORTABLE)
    codes = [(name, compile(text, name, "exec", dont_inherit=True, optimize=0)) for name, text in sources]
    return marshal.dumps(codes)


def memory_file(data: bytes, *, name: str) -> int:
    """An anonymous file that holds `data` and can never change. The caller closes it."""
    import fcntl

    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
