"""Sites that are tables of records, such as the forum, the issue tracker and the calendar: tables
in, pages out.

    Table, Table, … + seed ──► draw_books ──► Books
    GET  /, /TABLE, /TABLE/N, /TABLE/new    a list, a record with its form, a form for a new one
    POST /TABLE/N, /TABLE/N/delete, /TABLE/new, /TABLE/N/add, /TABLE/N/remove/M
         ──► a change of the books ──► 303 to the page that shows it, or the page with what is wrong

Books are plain text by table, number and field, so that two states are equal when all their records are.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from rllm.environments.web.network import SiteRequest, SiteResponse
from rllm.environments.web.sites.pages import (
    FormError,
    choice,
    form,
    form_values,
    link,
    page,
    redirect,
    table,
    whole_number,
)
from rllm.environments.web.sites.pages import field as text_field

Record = dict[str, str]
Books = dict[str, dict[int, Record]]
"""Table -> number -> field -> value."""
PARENT = "Of"
"""Field of a part: the number of the record that it belongs to."""
MAX_TEXT = 500


@dataclass(kw_only=True, slots=True, frozen=True)
class Table:
    """The records of one kind. The first field names a record; no two of a table have the same name."""

    name: str
    """The name of the page that lists them, such as Topics."""
    one: str
    """One of them, such as topic."""
    fields: Mapping[str, Sequence[str]]
    """Field -> the values that are drawn for it."""
    num_records: int = 12
    columns: Sequence[str] = ()
    """Fields beside the name that the list shows."""
    choices: Sequence[str] = ()
    """Fields that have one of their values and no other text."""
    editable: Sequence[str] = ()
    """Fields that the form of a record changes."""
    new: Sequence[str] = ()
    """Fields that the form of a new record asks for; empty where none are made."""
    defaults: Mapping[str, str] = field(default_factory=dict[str, str])
    """The other fields of a new record."""
    is_deletable: bool = False
    owner: tuple[str, str] = ("", "")
    """(field, user): only records with this user are changed."""
    shut: tuple[str, str] = ("", "")
    """(field, value): a record with this value takes no more parts."""
    parts: "Table | None" = None
    """Records that belong to one of these, such as the replies to a topic."""

    @property
    def key(self) -> str:
        return next(iter(self.fields))

    def title(self, record: Record) -> str:
        return record[self.key]


def draw_books(tables: Sequence[Table], rng: random.Random) -> Books:
    """Records of all tables, each with two parts on average."""
    books: Books = {}
    for each in tables:
        names = rng.sample(list(each.fields[each.key]), each.num_records)
        books[each.name] = {number: _draw(each, rng, name) for number, name in enumerate(names, start=1)}
        if each.parts is not None:
            owners = [str(rng.randint(1, each.num_records)) for _ in range(2 * each.num_records)]
            books[each.parts.name] = {
                number: {PARENT: owner, **_draw(each.parts, rng)}
                for number, owner in enumerate(owners, start=1)
            }
    return books


def _draw(kind: Table, rng: random.Random, name: str = "") -> Record:
    record = {each: rng.choice(list(values)) for each, values in kind.fields.items()}
    return {**record, kind.key: name} if name else record


def parts_of(books: Books, kind: Table, number: int) -> dict[int, Record]:
    """The parts of a record, by number."""
    assert kind.parts is not None
    return {n: each for n, each in books[kind.parts.name].items() if each[PARENT] == str(number)}


def next_number(records: Mapping[int, Record]) -> int:
    return max(records, default=0) + 1


class RecordSite:
    """Answers requests to one state of the books."""

    def __init__(self, tables: Sequence[Table], books: Books) -> None:
        self.tables = {each.name: each for each in tables}
        self.books = books

    def __call__(self, request: SiteRequest) -> SiteResponse:
        name, *rest = request.path.strip("/").split("/")
        kind = self.tables.get(name) if name else next(iter(self.tables.values()))
        if kind is None:
            return _NOT_FOUND
        values = form_values(request)
        try:
            if request.method != "POST":
                return self._show(kind, rest, values)
            try:
                return redirect(self._change(kind, rest, values))
            except FormError as error:
                return self._show(kind, rest[:1], values, str(error))
        except (FormError, KeyError):
            return _NOT_FOUND

    # ---- pages -------------------------------------------------------------------------------------------

    def _show(
        self, kind: Table, rest: Sequence[str], values: Mapping[str, str], error: str = ""
    ) -> SiteResponse:
        match rest:
            case []:
                title, body = kind.name, self._list(kind)
            case ["new"] if kind.new:
                inner = [_input(kind, each, values.get(each, "")) for each in kind.new]
                title = f"New {kind.one}"
                body = form(f"/{kind.name}/new", f"Create {kind.one}", *inner)
            case [item]:
                record = self._record(kind, item)
                title, body = kind.title(record), self._page(kind, int(item), record)
            case _:
                raise FormError("There is no such page.")
        links = {each: f"/{each}" for each in self.tables}
        return page(title, body, links=links, error=error)

    def _list(self, kind: Table) -> str:
        rows = [
            (
                link(kind.title(record), f"/{kind.name}/{number}"),
                *(escape(record[each]) for each in kind.columns),
            )
            for number, record in self.books[kind.name].items()
        ]
        new = f"<p>{link(f'New {kind.one}', f'/{kind.name}/new')}</p>" if kind.new else ""
        return new + table((kind.key, *kind.columns), rows)

    def _page(self, kind: Table, number: int, record: Record) -> str:
        facts = [f"<p>{escape(each)}: {escape(value)}</p>" for each, value in record.items()]
        if kind.editable:
            inner = [_input(kind, each, record[each]) for each in kind.editable]
            facts.append(form(f"/{kind.name}/{number}", "Save", *inner))
        if kind.is_deletable:
            facts.append(form(f"/{kind.name}/{number}/delete", f"Delete {kind.one}"))
        if (parts := kind.parts) is not None:
            rows = [
                (
                    *(escape(part[each]) for each in parts.fields),
                    form(f"/{kind.name}/{number}/remove/{place}", f"Delete {parts.one} {place}"),
                )
                for place, part in parts_of(self.books, kind, number).items()
            ]
            inner = [_input(parts, each, "") for each in parts.new]
            facts += [f"<h2>{escape(parts.name)}</h2>", table((*parts.fields, "Delete"), rows)]
            facts.append(form(f"/{kind.name}/{number}/add", f"Add {parts.one}", *inner))
        return "".join(facts)

    # ---- forms -------------------------------------------------------------------------------------------

    def _record(self, kind: Table, item: str) -> Record:
        return self.books[kind.name][whole_number(item, "The number", most=10**6)]

    def _change(self, kind: Table, rest: Sequence[str], values: Mapping[str, str]) -> str:
        """Do what a form asks for; the address of the page to show then."""
        records = self.books[kind.name]
        if list(rest) == ["new"] and kind.new:
            records[next_number(records)] = self._new(kind, values)
            return f"/{kind.name}"
        item, *rest = rest or [""]
        record = self._record(kind, item)
        place = f"/{kind.name}/{item}"
        parts = kind.parts
        match rest:
            case ["add"] if parts is not None:
                if record.get(kind.shut[0]) == kind.shut[1]:
                    raise FormError(f"This {kind.one} is {kind.shut[0].lower()}: nothing can be added.")
                children = self.books[parts.name]
                children[next_number(children)] = {PARENT: item, **self._new(parts, values)}
                return place
            case ["remove", part] if part.isdigit() and int(part) in parts_of(self.books, kind, int(item)):
                assert parts is not None
                del self.books[parts.name][int(part)]
                return place
            case ["delete"] if kind.is_deletable:
                self._require_owner(kind, record)
                if parts is not None:
                    for part in parts_of(self.books, kind, int(item)):
                        del self.books[parts.name][part]
                del records[int(item)]
                return f"/{kind.name}"
            case [] if kind.editable:
                self._require_owner(kind, record)
                record |= {
                    each: self._value(kind, each, values.get(each, ""), record[kind.key])
                    for each in kind.editable
                }
                return place
            case _:
                raise FormError("There is no such form.")

    def _new(self, kind: Table, values: Mapping[str, str]) -> Record:
        own = {each: self._value(kind, each, values.get(each, "")) for each in kind.new}
        return {each: own.get(each, kind.defaults.get(each, "")) for each in kind.fields}

    def _value(self, kind: Table, name: str, text: str, title: str = "") -> str:
        """A value as it is written to the books. Raises FormError."""
        text = " ".join(text.split())[:MAX_TEXT]
        if not text:
            raise FormError(f"{name} is empty.")
        if name in kind.choices and text not in kind.fields[name]:
            raise FormError(f"{name} cannot be {text}.")
        is_name = kind.name in self.tables and name == kind.key and text != title
        if is_name and text in map(kind.title, self.books[kind.name].values()):
            raise FormError(f"There is a {kind.one} of this name.")
        return text

    def _require_owner(self, kind: Table, record: Record) -> None:
        name, user = kind.owner
        if name and record[name] != user:
            raise FormError(f"Only {record[name]} can change this {kind.one}.")


def _input(kind: Table, name: str, value: str) -> str:
    return (
        choice(name, name, kind.fields[name], value)
        if name in kind.choices
        else text_field(name, name, value)
    )


_NOT_FOUND = SiteResponse(status=404, body=b"<title>Not found</title>There is no such page.")
