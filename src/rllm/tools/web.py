"""Searching the web and reading its pages through services that do it: Tavily, Serper, Firecrawl.

    web_search(query) ──► TavilySearch | SerperSearch       ──► [1] title, address, excerpt …
    web_fetch(url)    ──► TavilyExtract | Firecrawl         ──► the page as text, a part at a time

Keys come from the environment: TAVILY_API_KEY, SERPER_API_KEY, FIRECRAWL_API_KEY. `base_url` may be any
server that speaks the same form.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rllm.errors import ConfigError
from rllm.tools.addresses import require_public
from rllm.tools.base import Tool, ToolError, ToolOutput
from rllm.tools.web_service import WebPatience, WebService, WebServiceError, key_from

MAX_QUERY_CHARS = 400
MAX_URL_CHARS = 2000
MAX_RESULTS = 20
_PATIENCE = WebPatience()
_PATIENCE_OF_A_BROWSER = WebPatience(timeout_s=60.0)


@dataclass(kw_only=True, slots=True, frozen=True)
class WebHit:
    """One result of a search."""

    title: str
    url: str
    text: str


class _WebTool(Tool):
    """The common part of the clients."""

    service: ClassVar[str]
    key_variable: ClassVar[str]
    key_header: ClassVar[str] = "Authorization"

    def __init__(self, base_url: str, patience: WebPatience) -> None:
        key = key_from(self.key_variable, self.service)
        secret = f"Bearer {key}" if self.key_header == "Authorization" else key
        self._web = WebService(self.service, base_url, {self.key_header: secret}, patience)
        # Longer than all attempts with the longest waits between them: the service is the one to give up.
        super().__init__(timeout_s=patience.attempts * (patience.timeout_s + 30.0))

    def _wrong_shape(self, answer: Mapping[str, Any]) -> WebServiceError:
        return WebServiceError(
            f"{self.service} answers in another form than its own: keys {sorted(answer)[:8]}."
        )


class _Search(_WebTool):
    """Results of a search as text."""

    name = "web_search"

    def __init__(self, base_url: str, patience: WebPatience, num_results: int, max_result_chars: int) -> None:
        if not 1 <= num_results <= MAX_RESULTS:
            raise ConfigError(f"`num_results` is {num_results}; it must be from 1 to {MAX_RESULTS}.")
        self._num_results = num_results
        self._max_result_chars = max_result_chars
        super().__init__(base_url, patience)

    def forward(self, query: str) -> ToolOutput:
        """Search the web.

        Args:
            query: What to search for, in a few words.
        """
        if not query.strip() or len(query) > MAX_QUERY_CHARS:
            raise ToolError(f"The query has {len(query)} characters; write 1 to {MAX_QUERY_CHARS}.")
        answer, hits = self._answer_and_hits(query)
        texts = [f"Answer: {answer}"] if answer else []
        texts += [self._hit_text(number, hit) for number, hit in enumerate(hits[: self._num_results], 1)]
        metadata = {"urls": [hit.url for hit in hits]}
        return ToolOutput(
            name=self.name, output="\n\n".join(texts) or "Nothing was found.", metadata=metadata
        )

    def _answer_and_hits(self, query: str) -> tuple[str, list[WebHit]]:
        """A direct answer if there is one, and the results."""
        raise NotImplementedError

    def _hit_text(self, number: int, hit: WebHit) -> str:
        left = len(hit.text) - self._max_result_chars
        mark = f" [… {left:,} characters left out …]" if left > 0 else ""
        return f"[{number}] {hit.title}\n{hit.url}\n{hit.text[: self._max_result_chars]}{mark}"

    def _hits(self, results: Any, answer: Mapping[str, Any], keys: tuple[str, str, str]) -> list[WebHit]:
        if not isinstance(results, list):
            raise self._wrong_shape(answer)
        title, url, text = keys
        return [
            WebHit(title=_text(each.get(title)), url=_text(each.get(url)), text=_text(each.get(text)))
            for each in results
            if isinstance(each, Mapping)
        ]


class TavilySearch(_Search):
    """Tavily's `POST /search`."""

    service = "Tavily"
    key_variable = "TAVILY_API_KEY"

    def __init__(
        self,
        *,
        num_results: int = 5,
        depth: Literal["basic", "advanced"] = "basic",
        max_result_chars: int = 1000,
        base_url: str = "https://api.tavily.com",
        patience: WebPatience = _PATIENCE,
    ) -> None:
        self._depth = depth
        super().__init__(base_url, patience, num_results, max_result_chars)

    def _answer_and_hits(self, query: str) -> tuple[str, list[WebHit]]:
        request = {"query": query, "max_results": self._num_results, "search_depth": self._depth}
        answer = self._web.ask("/search", request)
        return _text(answer.get("answer")), self._hits(
            answer.get("results"), answer, ("title", "url", "content")
        )


class SerperSearch(_Search):
    """Serper's `POST /search`: Google's results."""

    service = "Serper"
    key_variable = "SERPER_API_KEY"
    key_header = "X-API-KEY"

    def __init__(
        self,
        *,
        num_results: int = 5,
        max_result_chars: int = 1000,
        base_url: str = "https://google.serper.dev",
        patience: WebPatience = _PATIENCE,
    ) -> None:
        super().__init__(base_url, patience, num_results, max_result_chars)

    def _answer_and_hits(self, query: str) -> tuple[str, list[WebHit]]:
        answer = self._web.ask("/search", {"q": query, "num": self._num_results})
        box = answer.get("answerBox")
        summary = _first(box, ("answer", "snippet")) if isinstance(box, Mapping) else ""
        return summary, self._hits(answer.get("organic", []), answer, ("title", "link", "snippet"))


class _Fetch(_WebTool):
    """A page as text, a part at a time."""

    name = "web_fetch"

    def __init__(self, base_url: str, patience: WebPatience, max_page_chars: int) -> None:
        if max_page_chars < 100:
            raise ConfigError(f"`max_page_chars` is {max_page_chars}; it must be at least 100.")
        self._max_page_chars = max_page_chars
        super().__init__(base_url, patience)

    def forward(self, url: str, first_char: int = 0) -> ToolOutput:
        """Read a web page as text.

        Args:
            url: The address of the page; it begins with http:// or https://.
            first_char: Where to begin, to read on in a long page.
        """
        is_address = url.startswith(("http://", "https://")) and not set(url) & set(" \t\r\n\0")
        if not is_address or len(url) > MAX_URL_CHARS:
            raise ToolError(f"`url` is {url[:80]!r}; give an address that begins with http:// or https://.")
        require_public(url)
        page = self._page(url)
        if not 0 <= first_char <= len(page):
            raise ToolError(f"`first_char` is {first_char}; the page has {len(page)} characters.")
        end = first_char + self._max_page_chars
        text = page[first_char:end]
        if end < len(page):
            text += f"\n[… {len(page) - end:,} characters left out; read on with first_char={end} …]"
        return ToolOutput(
            name=self.name, output=text or "The page is empty.", metadata={"num_page_chars": len(page)}
        )

    def _page(self, url: str) -> str:
        raise NotImplementedError


class TavilyExtract(_Fetch):
    """Tavily's `POST /extract`."""

    service = "Tavily"
    key_variable = "TAVILY_API_KEY"

    def __init__(
        self,
        *,
        max_page_chars: int = 6000,
        base_url: str = "https://api.tavily.com",
        patience: WebPatience = _PATIENCE,
    ) -> None:
        super().__init__(base_url, patience, max_page_chars)

    def _page(self, url: str) -> str:
        answer = self._web.ask("/extract", {"urls": [url], "format": "markdown"})
        results, failures = answer.get("results"), answer.get("failed_results")
        for each in _objects(results):
            if isinstance(each.get("raw_content"), str):
                return each["raw_content"]
        for each in _objects(failures):
            raise ToolError(f"{url} cannot be read: {_text(each.get('error')) or 'no reason is given'}.")
        raise self._wrong_shape(answer)


class Firecrawl(_Fetch):
    """Firecrawl's `POST /v2/scrape`."""

    service = "Firecrawl"
    key_variable = "FIRECRAWL_API_KEY"

    def __init__(
        self,
        *,
        max_page_chars: int = 6000,
        base_url: str = "https://api.firecrawl.dev",
        patience: WebPatience = _PATIENCE_OF_A_BROWSER,
    ) -> None:
        super().__init__(base_url, patience, max_page_chars)

    def _page(self, url: str) -> str:
        answer = self._web.ask("/v2/scrape", {"url": url, "formats": ["markdown"], "onlyMainContent": True})
        if answer.get("success") is False:
            raise ToolError(f"{url} cannot be read: {_text(answer.get('error')) or 'no reason is given'}.")
        data = answer.get("data")
        if not isinstance(data, Mapping) or not isinstance(data.get("markdown"), str):
            raise self._wrong_shape(answer)
        metadata = data.get("metadata")
        status = metadata.get("statusCode") if isinstance(metadata, Mapping) else None
        if isinstance(status, int) and status >= 400:
            raise ToolError(f"{url} answers with HTTP {status}.", status=status)
        return data["markdown"]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _first(of: Mapping[str, Any], keys: Iterable[str]) -> str:
    return next((_text(of[key]) for key in keys if _text(of.get(key))), "")


def _objects(values: Any) -> list[Mapping[str, Any]]:
    return [each for each in values if isinstance(each, Mapping)] if isinstance(values, list) else []
