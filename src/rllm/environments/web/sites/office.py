"""A calendar with mail as tables of records: events with guests, mails with answers, contacts."""

from functools import partial

from rllm.environments.web.sites.record_tasks import (
    add,
    ask,
    create,
    create_like,
    delete,
    delete_all,
    edit,
    edit_all,
    edit_like,
    record_kind,
    remove_all,
)
from rllm.environments.web.sites.records import Table
from rllm.environments.web.sites.shop import PEOPLE, USER
from rllm.environments.web.sites.site_env import SiteEnv, site_world

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
_HOURS = [f"{hour:02}:{minute:02}" for hour in range(8, 18) for minute in (0, 15, 30, 45)]
_ROOMS = ("Oak", "Elm", "Birch", "Maple")
_SUBJECTS = [
    f"{what} {whose}"
    for what in ("Invoice", "Minutes", "Tickets", "Plan", "Photos", "Contract", "Offer")
    for whose in ("of the fair", "of last week", "for the trip", "from Lyon", "for the office")
]
_MATTERS = ("with Mona", "with the bank", "on the budget", "about the fair", "with Lyon", "on the new rooms")
_ANSWERS = ("Thank you, received.", "I will call you.", "Please send it again.", "That is fine with me.")

GUESTS = Table(name="Guests", one="guest", fields={"Name": PEOPLE}, new=("Name",), choices=("Name",))
EVENTS = Table(
    name="Events",
    one="event",
    num_records=10,
    fields={
        "Title": [f"{what} {whom}" for what in ("Lunch", "Review", "Call", "Talk") for whom in _MATTERS],
        "Day": _DAYS,
        "Time": _HOURS,
        "Room": _ROOMS,
        "Organizer": (USER, *PEOPLE),
    },
    columns=("Day", "Time", "Room"),
    choices=("Day", "Room"),
    editable=("Day", "Time", "Room"),
    new=("Title", "Day", "Time", "Room"),
    defaults={"Organizer": USER},
    is_deletable=True,
    owner=("Organizer", USER),
    parts=GUESTS,
)
ANSWERS = Table(name="Answers", one="answer", fields={"Text": _ANSWERS}, new=("Text",))
MAILS = Table(
    name="Mails",
    one="mail",
    num_records=10,
    fields={
        "Subject": _SUBJECTS,
        "From": PEOPLE,
        "Folder": ("Inbox", "Archive", "Junk"),
        "Starred": ("yes", "no"),
        "Amount": [str(number) for number in range(100, 3000)],
    },
    columns=("From", "Folder"),
    choices=("Folder", "Starred"),
    editable=("Folder", "Starred"),
    is_deletable=True,
    shut=("Folder", "Junk"),
    parts=ANSWERS,
)
CONTACTS = Table(
    name="Contacts",
    one="contact",
    num_records=6,
    fields={
        "Name": [
            f"{first} {last}"
            for first in ("Mona", "Nils", "Olga", "Pia")
            for last in ("Fox", "Kim", "Roy", "Ito")
        ],
        "Phone": [str(number) for number in range(2000, 9999)],
        "City": ("Porto", "Turin", "Ghent", "Bergen"),
    },
    columns=("City",),
    choices=("City",),
    editable=("Phone", "City"),
    new=("Name", "Phone", "City"),
    is_deletable=True,
)

OFFICE = record_kind(
    "web-office",
    (EVENTS, MAILS, CONTACTS),
    easy={
        "phone": ask(CONTACTS, "Phone", "What is the phone number of {Name}?", can_miss=True),
        "amount": ask(MAILS, "Amount", 'Which amount does the mail "{Subject}" name? Tell me the number.'),
        "answer": add(MAILS, 'Answer the mail "{Subject}": {newText}', can_refuse=True),
        "archive": edit(MAILS, "Folder", 'Put the mail "{Subject}" into the archive.', value="Archive"),
        "change-phone": edit(CONTACTS, "Phone", "The phone number of {Name} is now {value}: change it."),
        "cancel-event": delete(EVENTS, 'Delete the event "{Title}".', can_refuse=True),
    },
    medium={
        "new-event": create(EVENTS, 'Put an event "{Title}" on {Day} at {Time} in the room {Room}.'),
        "new-contact": create(
            CONTACTS, "Add {Name} from {City} to my contacts, with the phone number {Phone}."
        ),
        "move-event": edit(EVENTS, "Day", 'Move the event "{Title}" to {value}.', can_refuse=True),
        "invite": add(EVENTS, 'Invite {newName} to the event "{Title}".'),
        "same-city": edit_like(
            CONTACTS, "City", "{Name} now lives in the city where {other} lives: change it."
        ),
    },
    hard={
        "delete-sender": delete_all(MAILS, "From", "Delete all mails from {value}."),
        "archive-sender": edit_all(
            MAILS, "From", "Folder", "Put all mails from {old} into the archive.", value="Archive"
        ),
        "star-folder": edit_all(
            MAILS, "Folder", "Starred", "Star every mail in the folder {old}.", value="yes"
        ),
        "uninvite": remove_all(EVENTS, "Name", 'Take every entry of {value} off the guests of "{Title}".'),
        "neighbour": create_like(
            CONTACTS,
            "City",
            CONTACTS,
            "City",
            "Add {Name} with the phone number {Phone}, from the city of {other}.",
        ),
    },
)


class OfficeEnv(SiteEnv):
    """One task in the calendar or the mail."""

    kind = OFFICE

    @staticmethod
    def from_dict(info: dict[str, object]) -> "SiteEnv":
        """A task made by the world `web-office`."""
        return OfficeEnv.of_task(info)


world_of = partial(site_world, OfficeEnv)
"""The world of a template, such as `answer`; of a difficulty; of `all`."""
