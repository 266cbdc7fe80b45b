"""Pages of our own sites: plain HTML without scripts, every name on a page once.

    SiteRequest ──► form_values ──► the site's rules ──► page(…) or redirect(…) ──► SiteResponse

Nothing is kept in the browser (no cookies, no storage, no cache), so that a context may serve the next
episode.
"""

from collections.abc import Mapping, Sequence
from html import escape
from urllib.parse import parse_qsl

from rllm.environments.web.network import SiteRequest, SiteResponse

_NO_STORE = (("Cache-Control", "no-store"),)
_STYLE = "body{font:16px sans-serif;margin:1em}td,th{padding:4px 12px;text-align:left}form{margin:6px 0}"


class FormError(ValueError):
    """Raised for values of a form that are refused; the text is shown on the page."""


def page(title: str, body: str, *, links: Mapping[str, str], error: str = "") -> SiteResponse:
    """A whole page. `links`: name -> address, shown at its top. `body` is HTML, with its texts escaped."""
    navigation = " ".join(link(name, address) for name, address in links.items())
    alert = f'<p role="alert">{escape(error)}</p>' if error else ""
    html = (
        f'<!doctype html><html lang="en"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<nav>{navigation}</nav><h1>{escape(title)}</h1>{alert}{body}</html>"
    )
    return SiteResponse(status=400 if error else 200, headers=_NO_STORE, body=html.encode())


def redirect(address: str) -> SiteResponse:
    """To a page that shows what a form has changed."""
    return SiteResponse(status=303, headers=(("Location", address), *_NO_STORE))


def link(name: str, address: str) -> str:
    return f'<a href="{escape(address)}">{escape(name)}</a>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """`rows` are HTML."""
    columns = "".join(f"<th>{escape(each)}</th>" for each in head)
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{columns}</tr>{lines}</table>"


def form(address: str, button: str, *fields: str) -> str:
    inner = f"{' '.join(fields)} <button>{escape(button)}</button>"
    return f'<form method="post" action="{escape(address)}">{inner}</form>'


def field(label: str, name: str, value: str = "") -> str:
    """A line of text to fill in."""
    box = f'<input name="{escape(name)}" value="{escape(value)}" autocomplete="off">'
    return f"<label>{escape(label)} {box}</label>"


def choice(label: str, name: str, options: Sequence[str], selection: str = "") -> str:
    """A list of which one is chosen."""
    items = "".join(
        f"<option{' selected' if each == selection else ''}>{escape(each)}</option>" for each in options
    )
    return f'<label>{escape(label)} <select name="{escape(name)}">{items}</select></label>'


def form_values(request: SiteRequest) -> dict[str, str]:
    """The values of a form; of each name the first."""
    text = request.body.decode("utf-8", "replace") if request.method == "POST" else request.query
    values: dict[str, str] = {}
    for name, value in parse_qsl(text, keep_blank_values=True, max_num_fields=50):
        values.setdefault(name, value)
    return values


def whole_number(text: str, name: str, *, most: int) -> int:
    """Raises FormError for anything but a number from 0 to `most`."""
    if not (text.strip().isascii() and text.strip().isdigit() and len(text.strip()) < 10):
        raise FormError(f"{name} must be a whole number.")
    if (number := int(text)) > most:
        raise FormError(f"{name} can be at most {most}.")
    return number


def cents_of(text: str) -> int:
    """`12.50` as 1250. Raises FormError."""
    whole, point, part = text.strip().partition(".")
    if not (whole.isascii() and whole.isdigit() and len(whole) < 6) or (
        point and not (len(part) == 2 and part.isascii() and part.isdigit())
    ):
        raise FormError("The price must be a number such as 12.50.")
    return int(whole) * 100 + int(part or 0)


def price(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02d}"
