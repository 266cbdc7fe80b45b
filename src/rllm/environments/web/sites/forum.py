"""A forum as tables of records: topics with replies, and members; its templates."""

from functools import partial

from rllm.environments.web.sites.record_tasks import (
    add,
    ask,
    ask_greatest,
    ask_sum,
    create,
    delete,
    delete_all,
    edit,
    edit_all,
    edit_greatest,
    edit_like,
    record_kind,
    remove_all,
)
from rllm.environments.web.sites.records import Table
from rllm.environments.web.sites.shop import PEOPLE, USER
from rllm.environments.web.sites.site_env import SiteEnv, site_world

_THINGS = ("bread", "bicycles", "tomatoes", "old radios", "chess", "knots", "lamps", "bees", "maps", "boats")
_OPENINGS = ("How to begin with", "My best", "A question on", "Trouble with", "The history of", "Selling")
_BOARDS = ("Garden", "Kitchen", "Workshop", "Travel")
_TEXTS = ("I agree.", "Try it once more.", "That did not work for me.", "Thank you!", "See the first answer.")
_YES_NO = ("yes", "no")

REPLIES = Table(
    name="Replies",
    one="reply",
    fields={"Text": _TEXTS, "Author": (USER, *PEOPLE)},
    new=("Text",),
    defaults={"Author": USER},
)
TOPICS = Table(
    name="Topics",
    one="topic",
    fields={
        "Title": [f"{opening} {thing}" for opening in _OPENINGS for thing in _THINGS],
        "Board": _BOARDS,
        "Author": PEOPLE,
        "Votes": [str(number) for number in range(10, 1000)],
        "Pinned": _YES_NO,
        "Closed": _YES_NO,
    },
    columns=("Board", "Votes"),
    choices=("Board", "Pinned", "Closed"),
    editable=("Title", "Board", "Pinned", "Closed"),
    new=("Title", "Board"),
    defaults={"Author": USER, "Votes": "0", "Pinned": "no", "Closed": "no"},
    is_deletable=True,
    shut=("Closed", "yes"),
    parts=REPLIES,
)
MEMBERS = Table(
    name="Members",
    one="member",
    num_records=8,
    fields={
        "Name": [
            f"{name}{number}" for name in ("ada", "bo", "cleo", "dan", "eve") for number in range(11, 90)
        ],
        "Role": ("reader", "writer", "moderator"),
        "Points": [str(number) for number in range(100, 2000)],
        "Banned": _YES_NO,
    },
    columns=("Role", "Points"),
    choices=("Role", "Banned"),
    editable=("Role", "Banned"),
    is_deletable=True,
)

FORUM = record_kind(
    "web-forum",
    (TOPICS, MEMBERS),
    easy={
        "votes": ask(
            TOPICS, "Votes", 'How many votes has the topic "{Title}"? Tell me the number.', can_miss=True
        ),
        "points": ask(MEMBERS, "Points", "How many points has the member {Name}? Tell me the number."),
        "reply": add(TOPICS, 'Reply to the topic "{Title}": {newText}', can_refuse=True),
        "delete-topic": delete(TOPICS, 'Delete the topic "{Title}".', can_miss=True),
        "close-topic": edit(TOPICS, "Closed", 'Close the topic "{Title}".', value="yes"),
        "change-role": edit(MEMBERS, "Role", "Make the member {Name} a {value}."),
    },
    medium={
        "new-topic": create(TOPICS, 'Open a topic with the title "{Title}" in the board {Board}.'),
        "most-votes": ask_greatest(TOPICS, "Votes", "Which topic has the most votes, and how many are they?"),
        "move-topic": edit(TOPICS, "Board", 'Move the topic "{Title}" to the board {value}.', can_miss=True),
        "same-board": edit_like(TOPICS, "Board", 'Move the topic "{Title}" to the board where "{other}" is.'),
        "pin-best": edit_greatest(TOPICS, "Votes", "Pinned", "yes", "Pin the topic with the most votes."),
    },
    hard={
        "board-votes": ask_sum(
            TOPICS, "Board", "Votes", "How many votes have all topics of the board {value} together?"
        ),
        "move-board": edit_all(
            TOPICS, "Board", "Board", "Move every topic of the board {old} to the board {value}."
        ),
        "clear-board": delete_all(TOPICS, "Board", "Delete every topic of the board {value}."),
        "remove-replies": remove_all(
            TOPICS, "Author", 'Delete all replies of {value} to the topic "{Title}", and no others.'
        ),
        "ban-readers": edit_all(
            MEMBERS, "Role", "Banned", "Ban every member whose role is {old}.", value="yes"
        ),
    },
)


class ForumEnv(SiteEnv):
    """One task in the forum."""

    kind = FORUM

    @staticmethod
    def from_dict(info: dict[str, object]) -> "SiteEnv":
        """A task made by the world `web-forum`."""
        return ForumEnv.of_task(info)


world_of = partial(site_world, ForumEnv)
"""The world of a template, such as `reply`; of a difficulty; of `all`."""
