"""An image in the form of published ones: this machine's git and Python, and a repository."""

import http.client
import io
import socket
import subprocess
import sysconfig
import tarfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from rllm.sandbox.docker_api import VERSION, engine

PROGRAMS = (
    *("sh", "bash", "env", "cat", "ls", "mkdir", "rm", "mv", "cp", "chmod", "chown", "id", "find", "xargs"),
    *("sed", "grep", "tar", "wc", "dirname", "sleep", "git", "patch", "sort", "head", "tail", "python3"),
)
PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py.py")
TOPS = ("bin", "sbin", "lib", "lib64")


def make_image(name: str, files: Mapping[str, Path], links: Mapping[str, str]) -> None:
    """Give an image to the engine: `files` are path inside -> file or directory, `links` path -> target."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for top in TOPS:
            _link(tar, top, f"usr/{top}")
        for folder in ("tmp", "proc", "sys", "dev", "root", "etc"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(entry)
        for path in sorted(_system_files()):
            tar.add(path, path.lstrip("/"))
        tar.add("/usr/share/git-core", "usr/share/git-core")
        library = f"usr/lib/{Path('/usr/bin/python3').resolve().name}"
        tar.add(f"/{library}", library, filter=_without_caches)
        site = Path(sysconfig.get_path("purelib"))
        for each in (found for name in PACKAGES for found in (*site.glob(name), *site.glob(f"{name}-*"))):
            tar.add(each, f"usr/lib/python3/dist-packages/{each.name}", filter=_without_caches)
        for path, source in files.items():
            tar.add(source, path.lstrip("/"))
        for path, target in links.items():
            _link(tar, path.lstrip("/"), target)
    connection = http.client.HTTPConnection("docker")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sock.connect(engine().path)
    connection.request("POST", f"/{VERSION}/images/create?fromSrc=-&repo={quote(name)}", packed.getvalue())
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    answer.read()
    connection.close()


def _link(tar: tarfile.TarFile, path: str, target: str) -> None:
    entry = tarfile.TarInfo(path)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)


def _system_files() -> set[str]:
    """The programs and the libraries that they load, under their own names and those of links to them."""
    found: set[str] = set()
    modules = Path(sysconfig.get_path("stdlib", vars={"base": "/usr"})) / "lib-dynload"
    for program in (*(f"/usr/bin/{name}" for name in PROGRAMS), *map(str, modules.glob("*.so"))):
        if not Path(program).exists():
            continue
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
        found |= {program, str(Path(program).resolve())}
        libraries = [word for word in listed.split() if word.startswith("/")]
        for each in libraries:
            real = Path(each).resolve()
            found |= {str(real), str(real.parent / Path(each).name)}
    loader = Path("/lib64/ld-linux-x86-64.so.2")
    if loader.exists():
        found |= {"/usr/lib64/ld-linux-x86-64.so.2", str(loader.resolve())}
    return found


def _without_caches(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in entry.name or "/test/" in entry.name else entry
