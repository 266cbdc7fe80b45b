"""A real Chromium for the tests of this folder; without one they skip, or fail under `make test-web`."""

import os
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec

import pytest

from rllm.environments.web import SiteRequest, SiteResponse, WebEnv, close_browser
from rllm.environments.web.chromium import find_chromium
from rllm.errors import ConfigError

MAKE_TEST_WEB = "RLLM_TEST_WEB"
"""Set by `make test-web`: what is missing is a failure then."""


@pytest.fixture(scope="session")
def chromium() -> Iterator[str]:
    """The path of a Chromium that can be driven here."""
    try:
        missing = next(
            (f"`{name}` is not installed" for name in ("playwright", "miniwob") if not find_spec(name)), ""
        )
        path = "" if missing else find_chromium().path
    except ConfigError as error:
        missing, path = str(error), ""
    if missing and not os.environ.get(MAKE_TEST_WEB):
        pytest.skip(f"{missing}; `make test-web` installs what these tests need")
    assert not missing, missing
    yield path
    close_browser()


Page = str | bytes | Callable[[SiteRequest], SiteResponse]


def pages(by_path: Mapping[str, Page]) -> Callable[[SiteRequest], SiteResponse]:
    """A site of pages by their path."""

    def serve(request: SiteRequest) -> SiteResponse:
        page = by_path.get(request.path)
        if page is None:
            return SiteResponse(status=404, body=b"No such page.")
        if isinstance(page, str | bytes):
            return SiteResponse(body=page.encode() if isinstance(page, str) else page)
        return page(request)

    return serve


@pytest.fixture
def play(chromium: str) -> Iterator[Callable[..., WebEnv]]:
    """Makes environments of pages: `play("<p>…")` or `play({"/": …, "/other": …}, goal=…)`."""
    made: list[WebEnv] = []

    def make(site: Page | Mapping[str, Page], **arguments: object) -> WebEnv:
        by_path = site if isinstance(site, Mapping) else {"/": site}
        env = WebEnv(
            arguments.pop("task", None),  # type: ignore[arg-type]
            start_url="http://site.test/",
            sites={"site.test": pages(by_path), **arguments.pop("sites", {})},  # type: ignore[dict-item]
            **arguments,  # type: ignore[arg-type]
        )
        made.append(env)
        return env

    yield make
    for each in made:
        each.close()
