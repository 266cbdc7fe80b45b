"""Our sites of records: their rules over HTTP; and the tasks of all our sites, played in a real Chromium."""

import copy
import itertools
import random
import time
from urllib.parse import urlencode

import pytest

from rllm.environments.web import SiteRequest, SiteResponse
from rllm.environments.web.actions import WebAction
from rllm.environments.web.sites.forum import FORUM, MEMBERS, TOPICS
from rllm.environments.web.sites.issue_tracker import ISSUE_TRACKER
from rllm.environments.web.sites.office import CONTACTS, EVENTS, MAILS, OFFICE
from rllm.environments.web.sites.records import Books, RecordSite, draw_books
from rllm.environments.web.sites.shop_tasks import SHOP
from rllm.environments.web.sites.site_env import DIFFICULTIES, SiteKind, SiteTask
from rllm.eval.catalogue import benchmark_names

from .test_shop import solve_task

KINDS = (SHOP, FORUM, ISSUE_TRACKER, OFFICE)
TEMPLATES = [(kind, name) for kind in KINDS for name in kind.templates]


def tasks_of(kind: SiteKind, name: str, count: int = 40) -> list[tuple[object, SiteTask]]:
    return [kind.task(name, seed) for seed in range(count)]


def say(text: str) -> WebAction:
    return WebAction(name="send_msg_to_user", arguments={"text": text})


# ---- tasks ---------------------------------------------------------------------------------------------


def test_there_are_sixty_templates_in_three_difficulties_with_infeasible_ones_on_every_site() -> None:
    assert len(TEMPLATES) >= 60
    for kind in KINDS:
        assert {each.difficulty for each in kind.templates.values()} == set(DIFFICULTIES)
        assert {f"{kind.name}/{name}" for name in kind.templates} == {
            name for name in benchmark_names() if name.startswith(f"{kind.name}/")
        }
        shares = [sum(task.is_infeasible for _, task in tasks_of(kind, name)) / 40 for name in kind.templates]
        assert sum(0.1 < share < 0.5 for share in shares) >= 4
        assert all(share == 0 or 0.1 < share < 0.5 for share in shares)


def test_a_task_is_of_its_seed_and_is_either_a_question_a_change_or_infeasible(
    subtests: pytest.Subtests,
) -> None:
    for kind, name in TEMPLATES:
        with subtests.test(kind=kind.name, name=name):
            drawn = tasks_of(kind, name)
            assert tasks_of(kind, name, 5) == drawn[:5]
            assert len({(task.goal, str(books)) for books, task in drawn}) == 40
            for books, task in drawn:
                asks = bool(task.number or task.choice)
                assert (books != task.books) + asks + task.is_infeasible == 1, task.goal
                assert "{" not in task.goal


def test_to_do_nothing_or_always_the_same_earns_nothing_where_something_can_be_done(
    subtests: pytest.Subtests,
) -> None:
    for kind, name in TEMPLATES:
        with subtests.test(kind=kind.name, name=name):
            drawn = [(books, task) for books, task in tasks_of(kind, name) if not task.is_infeasible]
            constant = drawn[0][1].plan[-1][-1][1]
            for books, task in drawn[1:]:
                assert task.mistake(books, say("Done."))
                assert task.mistake(books, say(constant)), task.goal
                assert task.mistake(books, WebAction(name="report_infeasible", arguments={"reason": "no"}))


def test_a_site_is_drawn_in_less_than_twenty_milliseconds() -> None:
    start_s = time.process_time()
    for kind in KINDS:
        for name in kind.templates:
            books, _ = kind.task(name, 0)
            kind.serve(books)
    assert (time.process_time() - start_s) / len(TEMPLATES) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), TEMPLATES)
def test_every_template_is_solved_by_clicks(chromium: str, kind: SiteKind, name: str) -> None:
    """A feasible and, where there are such, an infeasible instance."""
    tasks = [(seed, kind.task(name, seed)[1].is_infeasible) for seed in range(100)]
    for wanted in (False, True):
        for seed, _ in itertools.islice((each for each in tasks if each[1] == wanted), 1):
            solve_task({"task_id": "t", "template": name, "seed": seed}, f"{kind.name}/all")


@pytest.mark.parametrize(
    ("world", "template"),
    [("web-forum", "remove-replies"), ("web-code", "set-licence"), ("web-office", "invite")],
)
def test_a_template_of_each_site_is_solved_by_clicks(chromium: str, world: str, template: str) -> None:
    solve_task({"task_id": "t", "template": template, "seed": 1}, f"{world}/all")


# ---- rules ---------------------------------------------------------------------------------------------


@pytest.fixture
def office() -> tuple[RecordSite, Books]:
    tables = (EVENTS, MAILS, CONTACTS)
    books = draw_books(tables, random.Random(5))
    return RecordSite(tables, books), books


def send(site: RecordSite, path: str, **form: str) -> SiteResponse:
    """GET, or POST where there is a form."""
    body = urlencode(form).encode()
    return site(SiteRequest(method="POST" if form else "GET", path=path, query="", headers={}, body=body))


def test_forms_make_change_and_delete_records(office: tuple[RecordSite, Books]) -> None:
    site, books = office
    assert send(site, "/Contacts/new", Name="Zoe Ray", Phone="1234", City="Turin").status == 303
    number = max(books["Contacts"])
    assert books["Contacts"][number] == {"Name": "Zoe Ray", "Phone": "1234", "City": "Turin"}
    assert send(site, f"/Contacts/{number}", Phone="77", City="Ghent").status == 303
    assert books["Contacts"][number] == {"Name": "Zoe Ray", "Phone": "77", "City": "Ghent"}
    assert send(site, f"/Contacts/{number}/delete", x="").status == 303
    assert number not in books["Contacts"]


def test_parts_are_added_to_and_leave_with_their_record(office: tuple[RecordSite, Books]) -> None:
    site, books = office
    number = next(n for n, each in books["Mails"].items() if each["Folder"] != "Junk")
    assert send(site, f"/Mails/{number}/add", Text="Yes.").status == 303
    part = max(books["Answers"])
    assert books["Answers"][part] == {"Of": str(number), "Text": "Yes."}
    other = next(n for n in books["Mails"] if n != number)
    assert send(site, f"/Mails/{other}/remove/{part}", x="").status == 400
    assert part in books["Answers"]
    assert send(site, f"/Mails/{number}/delete", x="").status == 303
    assert str(number) not in {each["Of"] for each in books["Answers"].values()}


@pytest.mark.parametrize(
    ("path", "form", "why"),
    [
        ("/Contacts/new", {"Name": "", "Phone": "1", "City": "Turin"}, "Name is empty"),
        ("/Contacts/new", {"Name": "x", "Phone": "1", "City": "Rome"}, "City cannot be Rome"),
        ("/Contacts/new", {"Name": "{taken}", "Phone": "1", "City": "Turin"}, "of this name"),
        ("/Mails/{junk}/add", {"Text": "Hello"}, "nothing can be added"),
        ("/Events/{foreign}/delete", {"x": ""}, "can change this event"),
        ("/Events/{foreign}", {"Day": "Monday", "Time": "9", "Room": "Oak"}, "can change this event"),
        ("/Events/1/drop", {"x": ""}, "no such form"),
    ],
)
def test_what_breaks_a_rule_is_shown_on_the_page_and_changes_nothing(
    office: tuple[RecordSite, Books], path: str, form: dict[str, str], why: str
) -> None:
    site, books = office
    books["Mails"][2]["Folder"], books["Events"][3]["Organizer"] = "Junk", "Bruno Diaz"
    before = copy.deepcopy(books)
    names = {"junk": 2, "foreign": 3, "taken": books["Contacts"][1]["Name"]}
    answer = send(site, path.format(**names), **{key: each.format(**names) for key, each in form.items()})
    assert answer.status == 400
    assert why in answer.body.decode()
    assert books == before


@pytest.mark.parametrize("path", ["/x", "/Events/99", "/Events/a", "/Mails/new", "/Events/1/2/3"])
def test_a_page_that_is_not_there_is_not_found(office: tuple[RecordSite, Books], path: str) -> None:
    assert send(office[0], path).status == 404
    assert send(office[0], path, x="").status in (400, 404)


def test_texts_of_records_stay_text() -> None:
    books = draw_books((TOPICS, MEMBERS), random.Random(1))
    books["Topics"][1]["Title"] = "<script>alert(1)</script>"
    site = RecordSite((TOPICS, MEMBERS), books)
    for path in ("/", "/Topics/1"):
        assert "<script>" not in send(site, path).body.decode()
