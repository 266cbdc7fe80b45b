"""Which Chromium is driven, and with what flags.

RLLM_CHROMIUM ──► else Playwright's own builds ──► else programs on PATH ──► Chromium(path, kind)

Headless shells come first among equals: they take less than half of the memory.
"""

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rllm.errors import ConfigError, MissingExtraError

PATH_VARIABLE = "RLLM_CHROMIUM"
SANDBOX_VARIABLE = "RLLM_CHROMIUM_SANDBOX"
PROGRAMS = (
    *("chromium-headless-shell", "chrome-headless-shell", "headless_shell"),
    *("chromium", "chromium-browser", "google-chrome-stable", "google-chrome"),
)
"""On PATH, in the order in which they are taken."""
HOW_TO_GET = (
    "install one: `apt-get install chromium-headless-shell` on Debian, or `playwright install "
    f"--with-deps --only-shell chromium`; {PATH_VARIABLE} names one that is elsewhere"
)
_BUILDS = ("chromium_headless_shell-*/*/*headless*shell*", "chromium-*/*/chrome", "chromium-*/*/Chromium")
"""Below the folder of Playwright's own builds."""

_DISABLED_FEATURES = (
    # Playwright's own list, which a second one of ours replaces; a test compares them.
    *("AvoidUnnecessaryBeforeUnloadCheckSync", "DestroyProfileOnBrowserClose", "HttpsUpgrades"),
    *("HttpsFirstBalancedModeAutoEnable", "LensOverlay", "MediaRouter", "PaintHolding"),
    *("ThirdPartyStoragePartitioning", "AvoidCorsURLLoaderRestartOnRedirect", "TcpPortRandomizationWin"),
    *("OptimizationHints", "NetworkTimeServiceQuerying", "AimEnabled", "PreconnectToSearch"),
    *("msForceBrowserSignIn", "msEdgeUpdateLaunchServicesPreferredVersion"),
    # A frame with a compositor of its own for each page of a site: a quarter of the processor time of a click
    # on a link, for crashes and races that a tab of one episode does not have.
    "RenderDocument",
)

FLAGS = (
    # Nothing resolves or connects but through the proxy of a context.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--proxy-server=127.0.0.1:9",
    "--proxy-bypass-list=<-loopback>",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--disable-quic",
    "--dns-prefetch-disable",
    # One session sees all frames of a page.
    "--disable-site-isolation-trials",
    "--disable-gpu",
    f"--disable-features={','.join(_DISABLED_FEATURES)}",
    "--js-flags=--max-old-space-size=512",
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Chromium:
    """A program that can be driven."""

    path: str
    origin: str
    """Where it was found, for people."""

    @property
    def is_shell(self) -> bool:
        """Whether it is the headless shell, which cannot show windows and takes less memory."""
        return "shell" in Path(self.path).name


def find_chromium() -> Chromium:
    """The Chromium of this machine. Raises ConfigError, with how to get one, where there is none."""
    override = os.environ.get(PATH_VARIABLE)
    if override:
        if not os.access(override, os.X_OK) or Path(override).is_dir():
            raise ConfigError(f"{PATH_VARIABLE} is {override!r}, which is no program that can be run.")
        return Chromium(path=override, origin=PATH_VARIABLE)
    for pattern in _BUILDS:
        for path in sorted(_builds_folder().glob(pattern), reverse=True):
            if os.access(path, os.X_OK) and path.is_file():
                return Chromium(path=str(path), origin="Playwright's own build")
    for program in PROGRAMS:
        path = shutil.which(program)
        if path is not None:
            return Chromium(path=path, origin="a program on PATH")
    raise ConfigError(f"There is no Chromium on this machine; {HOW_TO_GET}.")


def require_browser() -> None:
    """Raises ConfigError, with the mend, where no page can be played."""
    if importlib.util.find_spec("playwright") is None:
        raise MissingExtraError("playwright", "web")
    find_chromium()


def uses_sandbox() -> bool:
    """Whether Chromium isolates its own processes: always, but for root, for whom it cannot, and where
    RLLM_CHROMIUM_SANDBOX=0 does without."""
    return os.geteuid() != 0 and os.environ.get(SANDBOX_VARIABLE) != "0"


def _builds_folder() -> Path:
    override = os.environ.get("PLAYWRIGHT_BROWSERS_PATH")
    if override and override != "0":
        return Path(override)
    caches = {"darwin": Path.home() / "Library/Caches", "linux": Path.home() / ".cache"}
    return caches.get(sys.platform, Path.home() / ".cache") / "ms-playwright"
