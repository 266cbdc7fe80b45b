"""Kinds of tasks on tables of records, from which the templates of a site are made, each in a line or two.

    edit(TOPICS, "Locked", 'Set "Locked" of the topic "{Title}" to {value}.', value="yes") ──► Draw
    Draw(books, generator) ──► SiteTask: goal, the books as they should be at the end, the plan of an expert

In a goal `{NAME}` is a field of the record that was drawn, `{value}` the new value, `{other}` another record.
Of the kinds that take `can_miss`, a quarter of the instances ask for a record that there is not, and of those
that take `can_refuse`, a quarter ask for what the site refuses.
"""

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rllm.environments.web.demonstrations import Step
from rllm.environments.web.sites.records import (
    PARENT,
    Books,
    Record,
    RecordSite,
    Table,
    draw_books,
    next_number,
    parts_of,
)
from rllm.environments.web.sites.site_env import DIFFICULTIES, SiteKind, SiteTask, SiteTemplate

Draw = Callable[[Books, random.Random], SiteTask]
INFEASIBLE_SHARE = 0.25
SAY_DONE: tuple[Step, ...] = (("say", "Done."),)
GIVE_UP: tuple[Step, ...] = (("give up", "It is not possible."),)


def record_kind(
    name: str,
    tables: Sequence[Table],
    *,
    easy: Mapping[str, Draw],
    medium: Mapping[str, Draw],
    hard: Mapping[str, Draw],
) -> SiteKind:
    """A site of tables, the first of which is its front page, with its templates by difficulty."""
    return SiteKind(
        name=name,
        host=f"{name.removeprefix('web-')}.test",
        draw_books=partial(draw_books, tables),
        serve=partial(RecordSite, tables),
        templates={
            each: SiteTemplate(name=each, difficulty=difficulty, draw=draw)
            for difficulty, draws in zip(DIFFICULTIES, (easy, medium, hard), strict=True)
            for each, draw in draws.items()
        },
    )


def visit(name: str) -> tuple[Step, ...]:
    return (("click", "link", name),)


def _open(kind: Table, record: Record) -> tuple[tuple[Step, ...], ...]:
    return visit(kind.name), visit(kind.title(record))


def _write(kind: Table, name: str, value: str) -> Step:
    return ("choose" if name in kind.choices else "fill", name, value)


def _save(kind: Table, **values: str) -> tuple[Step, ...]:
    return (*(_write(kind, *each) for each in values.items()), ("click", "button", "Save"))


def _other(values: Sequence[str], value: str, rng: random.Random) -> str:
    return rng.choice([each for each in values if each != value])


def _free_name(kind: Table, books: Books, rng: random.Random) -> str:
    names = set(map(kind.title, books[kind.name].values()))
    return rng.choice([each for each in kind.fields[kind.key] if each not in names])


def _missing(kind: Table, books: Books, rng: random.Random, goal: str, **values: str) -> SiteTask:
    """The task on a record that there is not."""
    some = rng.choice(list(books[kind.name].values()))
    text = goal.format(**{**some, kind.key: _free_name(kind, books, rng)}, **values)
    return SiteTask(goal=text, plan=(visit(kind.name), GIVE_UP), is_infeasible=True)


def _misses(can_miss: bool, rng: random.Random) -> bool:
    return can_miss and rng.random() < INFEASIBLE_SHARE


# ---- questions -----------------------------------------------------------------------------------------


def ask(kind: Table, name: str, goal: str, *, can_miss: bool = False) -> Draw:
    """The number in a field of one record."""

    def draw(books: Books, rng: random.Random) -> SiteTask:
        if _misses(can_miss, rng):
            return _missing(kind, books, rng, goal)
        record = rng.choice(list(books[kind.name].values()))
        plan = (*_open(kind, record), (("say", record[name]),))
        return SiteTask(goal=goal.format(**record), plan=plan, number=record[name])

    return draw


def ask_greatest(kind: Table, name: str, goal: str) -> Draw:
    """The record with the greatest number in a field, and that number; the list shows them."""

    def draw(books: Books, rng: random.Random) -> SiteTask:
        records = _with_distinct_numbers(kind, name, books, rng)
        best = max(records, key=lambda each: int(each[name]))
        return SiteTask(
            goal=goal,
            plan=(visit(kind.name), (("say", f"{kind.title(best)}: {best[name]}"),)),
            number=best[name],
            choice=kind.title(best),
            choices=list(map(kind.title, records)),
        )

    return draw


def ask_sum(kind: Table, by: str, name: str, goal: str) -> Draw:
    """The sum of a field over all records with one value in another; the list shows both."""

    def draw(books: Books, rng: random.Random) -> SiteTask:
        records = list(books[kind.name].values())
        value = rng.choice(records)[by]
        total = str(sum(int(each[name]) for each in records if each[by] == value))
        return SiteTask(
            goal=goal.format(value=value), plan=(visit(kind.name), (("say", total),)), number=total
        )

    return draw


def _with_distinct_numbers(kind: Table, name: str, books: Books, rng: random.Random) -> list[Record]:
    """All records, after their field was drawn anew so that none is like another."""
    records = list(books[kind.name].values())
    for record, value in zip(records, rng.sample(list(kind.fields[name]), len(records)), strict=True):
        record[name] = value
    return records


# ---- changes -------------------------------------------------------------------------------------------


def edit(
    kind: Table, name: str, goal: str, *, value: str = "", can_miss: bool = False, can_refuse: bool = False
) -> Draw:
    """One field of one record gets another value: `value`, or any other that it may have."""

    def draw(books: Books, rng: random.Random) -> SiteTask:
        if _misses(can_miss, rng):
            return _missing(kind, books, rng, goal, value=value or rng.choice(list(kind.fields[name])))
        number = rng.choice(list(books[kind.name]))
        record = books[kind.name][number]
        owner, user = kind.owner
        if owner:
            record[owner] = user
        new = value or _other(kind.fields[name], record[name], rng)
        if value:
            record[name] = _other(kind.fields[name], value, rng)
        if _misses(can_refuse, rng):
            record[owner] = _other(kind.fields[owner], user, rng)
            plan = (*_open(kind, record), _save(kind, **{name: new}), GIVE_UP)
            return SiteTask(goal=goal.format(**record, value=new), plan=plan, is_infeasible=True)
        expected = copy.deepcopy(books)
        expected[kind.name][number][name] = new
        plan = (*_open(kind, record), _save(kind, **{name: new}), SAY_DONE)
        return SiteTask(goal=goal.format(**record, value=new), plan=plan, books=expected)

    return draw


def edit_like(kind: Table, name: str, goal: str) -> Draw:
    """A field of one record gets the value that another record has there."""

    def draw(books: Books, rng: random.Random) -> SiteTask:
        number, model = rng.sample(list(books[kind.name]), 2)
        record, other = books[kind.name][number], books[kind.name][model]
        other[name] = _other(kind.fields[name], record[name], rng)
        expected = copy.deepcopy(books)
        expected[kind.name][number][name] = other[name]
        plan = (*_open(kind, other), *_open(kind, record), _save(kind, **{name: other[name]}), SAY_DONE)
        text = goal.format(**record, other=kind.title(other))
        return SiteTask(goal=text, plan=plan, books=expected)

    return draw


def edit_greatest(kind: Table, by: str, name: str, value: str, goal: str) -> Draw:
    """A field of the record with the greatest number in another."""

    def draw(books: Books, rng: random.Random) -> SiteTask:
        records = _with_distinct_numbers(kind, by, books, rng)
        place = max(range(len(records)), key=lambda each: int(records[each][by]))
        records[place][name] = _other(kind.fields[name], value, rng)
        expected = copy.deepcopy(books)
        list(expected[kind.name].values())[place][name] = value
        plan = (*_open(kind, records[place]), _save(kind, **{name: value}), SAY_DONE)
        return SiteTask(goal=goal, plan=plan, books=expected)

    return draw


def edit_all(kind: Table, by: str, name: str, goal: str, *, value: str = "") -> Draw:
    """A field of both records that have one value in another."""

    def draw(books: Books, rng: random.Random) -> SiteTask:
        old, numbers = _two_with(kind, by, books, rng)
        new = value or _other(kind.fields[name], old if by == name else "", rng)
        for number in numbers:
            if by != name:
                books[kind.name][number][name] = _other(kind.fields[name], new, rng)
        expected = copy.deepcopy(books)
        plan: list[tuple[Step, ...]] = []
        for number in numbers:
            expected[kind.name][number][name] = new
            plan += [*_open(kind, books[kind.name][number]), _save(kind, **{name: new})]
        return SiteTask(goal=goal.format(old=old, value=new), plan=(*plan, SAY_DONE), books=expected)

    return draw


def _two_with(kind: Table, by: str, books: Books, rng: random.Random) -> tuple[str, list[int]]:
    """(a value, the numbers of the two records that have it, after it was given to them alone)."""
    records, value = books[kind.name], rng.choice(list(kind.fields[by]))
    numbers = sorted(rng.sample(list(records), 2))
    for number, record in records.items():
        if number in numbers:
            record[by] = value
        elif record[by] == value:
            record[by] = _other(kind.fields[by], value, rng)
    return value, numbers


def create(kind: Table, goal: str) -> Draw:
    """A new record with values for all that its form asks for."""

    def draw(books: Books, rng: random.Random) -> SiteTask:
        values = {each: rng.choice(list(kind.fields[each])) for each in kind.new}
        values[kind.key] = _free_name(kind, books, rng)
        return _creation(kind, books, values, goal.format(**values), ())

    return draw


def create_like(kind: Table, name: str, source: Table, source_name: str, goal: str) -> Draw:
    """A new record, one value of which is that of a record in another table."""

    def draw(books: Books, rng: random.Random) -> SiteTask:
        other = rng.choice(list(books[source.name].values()))
        values = {each: rng.choice(list(kind.fields[each])) for each in kind.new}
        values |= {kind.key: _free_name(kind, books, rng), name: other[source_name]}
        text = goal.format(**values, other=source.title(other))
        return _creation(kind, books, values, text, _open(source, other))

    return draw


def _creation(
    kind: Table, books: Books, values: Mapping[str, str], goal: str, before: Sequence[Sequence[Step]]
) -> SiteTask:
    expected = copy.deepcopy(books)
    records = expected[kind.name]
    records[next_number(records)] = {
        each: values.get(each, kind.defaults.get(each, "")) for each in kind.fields
    }
    fill = (
        *(_write(kind, each, values[each]) for each in kind.new),
        ("click", "button", f"Create {kind.one}"),
    )
    plan = (*before, visit(kind.name), visit(f"New {kind.one}"), fill, SAY_DONE)
    return SiteTask(goal=goal, plan=plan, books=expected)


def delete(kind: Table, goal: str, *, can_miss: bool = False, can_refuse: bool = False) -> Draw:
    """One record; what belongs to it goes with it."""

    def draw(books: Books, rng: random.Random) -> SiteTask:
        if _misses(can_miss, rng):
            return _missing(kind, books, rng, goal)
        number = rng.choice(list(books[kind.name]))
        record = books[kind.name][number]
        owner, user = kind.owner
        if owner:
            record[owner] = user
        press: tuple[Step, ...] = (("click", "button", f"Delete {kind.one}"),)
        if _misses(can_refuse, rng):
            record[owner] = _other(kind.fields[owner], user, rng)
            plan = (*_open(kind, record), press, GIVE_UP)
            return SiteTask(goal=goal.format(**record), plan=plan, is_infeasible=True)
        expected = copy.deepcopy(books)
        _delete(kind, expected, number)
        plan = (*_open(kind, record), press, SAY_DONE)
        return SiteTask(goal=goal.format(**record), plan=plan, books=expected)

    return draw


def delete_all(kind: Table, by: str, goal: str) -> Draw:
    """Both records that have one value in a field."""

    def draw(books: Books, rng: random.Random) -> SiteTask:
        value, numbers = _two_with(kind, by, books, rng)
        owner, user = kind.owner
        for number in numbers:
            if owner:
                books[kind.name][number][owner] = user
        expected = copy.deepcopy(books)
        plan: list[tuple[Step, ...]] = []
        for number in numbers:
            _delete(kind, expected, number)
            plan += [
                *_open(kind, books[kind.name][number]),
                (("click", "button", f"Delete {kind.one}"),),
            ]
        return SiteTask(goal=goal.format(value=value), plan=(*plan, SAY_DONE), books=expected)

    return draw


def _delete(kind: Table, books: Books, number: int) -> None:
    if kind.parts is not None:
        for each in parts_of(books, kind, number):
            del books[kind.parts.name][each]
    del books[kind.name][number]


def add(kind: Table, goal: str, *, can_refuse: bool = False) -> Draw:
    """A part of one record, such as a reply to a topic."""

    def draw(books: Books, rng: random.Random) -> SiteTask:
        parts = kind.parts
        assert parts is not None
        number = rng.choice(list(books[kind.name]))
        record = books[kind.name][number]
        values = {each: rng.choice(list(parts.fields[each])) for each in parts.new}
        name, shut = kind.shut
        refuses = _misses(can_refuse, rng)
        if name:
            record[name] = shut if refuses else _other(kind.fields[name], shut, rng)
        fill = (
            *(_write(parts, *each) for each in values.items()),
            ("click", "button", f"Add {parts.one}"),
        )
        text = goal.format(**record, **{f"new{each}": value for each, value in values.items()})
        if refuses:
            return SiteTask(goal=text, plan=(*_open(kind, record), fill, GIVE_UP), is_infeasible=True)
        expected = copy.deepcopy(books)
        children = expected[parts.name]
        children[next_number(children)] = {
            PARENT: str(number),
            **{each: values.get(each, parts.defaults.get(each, "")) for each in parts.fields},
        }
        return SiteTask(goal=text, plan=(*_open(kind, record), fill, SAY_DONE), books=expected)

    return draw


def remove_all(kind: Table, by: str, goal: str) -> Draw:
    """Every part of one record that has one value in a field; there are two at least."""

    def draw(books: Books, rng: random.Random) -> SiteTask:
        parts = kind.parts
        assert parts is not None
        number = rng.choice(list(books[kind.name]))
        value = rng.choice(list(parts.fields[by]))
        for place in rng.sample(list(books[parts.name]), 2):
            books[parts.name][place] |= {PARENT: str(number), by: value}
        expected = copy.deepcopy(books)
        record = books[kind.name][number]
        presses: list[tuple[Step, ...]] = []
        for place, part in parts_of(books, kind, number).items():
            if part[by] == value:
                del expected[parts.name][place]
                presses.append((("click", "button", f"Delete {parts.one} {place}"),))
        plan = (*_open(kind, record), *presses, SAY_DONE)
        return SiteTask(goal=goal.format(**record, value=value), plan=plan, books=expected)

    return draw
