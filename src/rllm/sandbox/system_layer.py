"""This machine's system as the lowest layer of images that are built here: what package managers need of it.

/usr itself is the machine's, under all layers. Copied are the packages that it has (/var/lib/dpkg) and of
/etc what
says how programs run; nothing of it that only root may read, and no key, account or setting of a service.
"""

import hashlib
import os
import shutil
import stat
from functools import cache
from pathlib import Path

from rllm.errors import ConfigError
from rllm.sandbox.launch import is_privileged

ETC = (
    *(
        "adduser.conf",
        "alternatives",
        "bash.bashrc",
        "ca-certificates",
        "ca-certificates.conf",
        "debconf.conf",
    ),
    *("debian_version", "default", "deluser.conf", "dpkg", "emacs", "fonts", "group", "host.conf", "init.d"),
    *("inputrc", "issue", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "libaudit.conf", "locale.alias"),
    *(
        "localtime",
        "login.defs",
        "logrotate.d",
        "lsb-release",
        "magic",
        "mime.types",
        "nsswitch.conf",
        "os-release",
    ),
    *(
        "pam.conf",
        "pam.d",
        "passwd",
        "perl",
        "profile",
        "profile.d",
        "protocols",
        "python3",
        "rpc",
        "security",
    ),
    *("services", "shells", "skel", "terminfo", "timezone", "ucf.conf", "xattr.conf"),
)
APT = (
    "apt.conf.d",
    "keyrings",
    "preferences.d",
    "sources.list",
    "sources.list.d",
    "trusted.gpg",
    "trusted.gpg.d",
)
"""The files of /etc/apt; not the names and passwords in auth.conf."""
SSL = ("certs", "openssl.cnf")
FOLDERS = (
    *(
        "home",
        "media",
        "mnt",
        "opt",
        "root",
        "run/lock",
        "srv",
        "usr",
        "var/cache/apt/archives/partial",
        "var/log",
    ),
    *("var/lib/apt/lists/partial", "var/mail", "var/spool", "proc", "sys", "dev"),
)


@cache
def machine_release() -> dict[str, str]:
    """The fields of /etc/os-release; none where there is no such file."""
    path = Path("/etc/os-release")
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    return {name: value.strip('"') for name, _, value in (line.partition("=") for line in lines) if name}


def system_key() -> str:
    """A hash of what the layer depends on."""
    status = Path("/var/lib/dpkg/status")
    digest = hashlib.sha256(repr(sorted(machine_release().items())).encode())
    digest.update(status.read_bytes() if status.is_file() else b"")
    digest.update(f"{ETC}{APT}{is_privileged()}".encode())
    return digest.hexdigest()[:32]


def make_system_layer(target: Path) -> None:
    """Fill an empty directory. Raises ConfigError on a system without dpkg."""
    if not Path("/var/lib/dpkg/status").is_file():
        raise ConfigError("RUN lines are run here over a Debian or Ubuntu system, and this machine is none.")
    for folder in FOLDERS:
        (target / folder).mkdir(parents=True, exist_ok=True)
    for folder in ("tmp", "var/tmp"):
        (target / folder).mkdir()
        (target / folder).chmod(0o1777)
    (target / "var" / "run").symlink_to("/run")
    for name in os.listdir("/"):
        if os.path.islink(f"/{name}"):
            (target / name).symlink_to(os.readlink(f"/{name}"))
    (target / "etc").mkdir()
    for name in ETC:
        _copy(Path("/etc") / name, target / "etc" / name)
    for folder, names in (("apt", APT), ("ssl", SSL)):
        (target / "etc" / folder).mkdir()
        for name in names:
            _copy(Path("/etc") / folder / name, target / "etc" / folder / name)
    _copy(Path("/var/lib/dpkg"), target / "var/lib/dpkg")
    # The machine's own shadow holds hashes of passwords. No password fits `*`.
    users = (target / "etc" / "passwd").read_text("utf-8").splitlines()
    (target / "etc" / "shadow").write_text(
        "".join(f"{each.split(':')[0]}:*:19000:0:99999:7:::\n" for each in users)
    )
    # Places for the files of the machine that a build binds over them (`layer_build`).
    for name in ("resolv.conf", "hosts"):
        (target / "etc" / name).touch()
    if not is_privileged():  # one user is all there is
        (target / "etc/apt/apt.conf.d/99one-user").write_text('APT::Sandbox::User "root";\n')


def _copy(source: Path, target: Path) -> None:
    """A file, link or tree of which others than root may read all; what they may not is left out."""
    if not os.path.lexists(source):
        return
    about = source.lstat()
    if stat.S_ISLNK(about.st_mode):
        target.symlink_to(os.readlink(source))
    elif stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_IROTH:
        target.mkdir()
        for each in sorted(source.iterdir()):
            _copy(each, target / each.name)
        shutil.copystat(source, target)
    elif stat.S_ISREG(about.st_mode) and about.st_mode & stat.S_IROTH:
        shutil.copy2(source, target)
