"""The issue tracker of a code host as tables of records: issues with comments, milestones, repositories."""

from functools import partial

from rllm.environments.web.sites.record_tasks import (
    add,
    ask,
    ask_greatest,
    ask_sum,
    create,
    create_like,
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

_EVERYBODY = (USER, *PEOPLE)
_FAULTS = ("crashes", "is slow", "hangs", "forgets its settings", "prints twice", "leaks memory")
_PARTS = ("The parser", "The cache", "Login", "Search", "The export", "The installer", "Sync", "The editor")
_REPOSITORIES = [
    f"{kind}-{thing}"
    for kind in ("tiny", "fast", "open", "blue", "spare", "early", "green")
    for thing in ("db", "web", "cli", "maps", "mail", "notes", "sound")
]
_TEXTS = ("I can confirm this.", "Fixed in the last release.", "Please send a log.", "I work on it.")

COMMENTS = Table(
    name="Comments",
    one="comment",
    fields={"Text": _TEXTS, "Author": _EVERYBODY},
    new=("Text",),
    defaults={"Author": USER},
)
ISSUES = Table(
    name="Issues",
    one="issue",
    fields={
        "Title": [f"{part} {fault}" for part in _PARTS for fault in _FAULTS],
        "State": ("open", "closed"),
        "Label": ("bug", "question", "feature", "docs"),
        "Assignee": _EVERYBODY,
        "Milestone": ("Alpha", "Beta", "Release"),
        "Points": [str(number) for number in range(10, 500)],
        "Conversation": ("open", "locked"),
    },
    columns=("State", "Label", "Points"),
    choices=("State", "Label", "Assignee", "Milestone", "Conversation"),
    editable=("Title", "State", "Label", "Assignee", "Milestone", "Conversation"),
    new=("Title", "Label", "Assignee", "Milestone"),
    defaults={"State": "open", "Points": "0", "Conversation": "open"},
    shut=("Conversation", "locked"),
    parts=COMMENTS,
)
REPOSITORIES = Table(
    name="Repositories",
    one="repository",
    num_records=6,
    fields={
        "Name": _REPOSITORIES,
        "Owner": _EVERYBODY,
        "Visibility": ("public", "private"),
        "Licence": ("MIT", "Apache-2.0", "GPL-3.0"),
        "Stars": [str(number) for number in range(20, 5000)],
    },
    columns=("Owner", "Stars"),
    choices=("Owner", "Visibility", "Licence"),
    editable=("Visibility", "Licence"),
    new=("Name", "Visibility", "Licence"),
    defaults={"Owner": USER, "Stars": "0"},
    is_deletable=True,
    owner=("Owner", USER),
)

ISSUE_TRACKER = record_kind(
    "web-code",
    (ISSUES, REPOSITORIES),
    easy={
        "stars": ask(REPOSITORIES, "Stars", "How many stars has the repository {Name}? Tell me the number."),
        "points": ask(
            ISSUES, "Points", 'How many points has the issue "{Title}"? Tell me the number.', can_miss=True
        ),
        "comment": add(ISSUES, 'Comment on the issue "{Title}": {newText}', can_refuse=True),
        "close-issue": edit(ISSUES, "State", 'Close the issue "{Title}".', value="closed"),
        "assign": edit(ISSUES, "Assignee", 'Assign the issue "{Title}" to {value}.', can_miss=True),
        "set-licence": edit(
            REPOSITORIES, "Licence", "Put the repository {Name} under the licence {value}.", can_refuse=True
        ),
    },
    medium={
        "new-issue": create(
            ISSUES,
            'Open an issue with the title "{Title}", the label {Label} and the milestone {Milestone}, '
            "assigned to {Assignee}.",
        ),
        "new-repository": create(
            REPOSITORIES, "Create a {Visibility} repository {Name} under the licence {Licence}."
        ),
        "most-stars": ask_greatest(
            REPOSITORIES, "Stars", "Which repository has the most stars, and how many are they?"
        ),
        "delete-repository": delete(REPOSITORIES, "Delete the repository {Name}.", can_refuse=True),
        "same-assignee": edit_like(
            ISSUES, "Assignee", 'Assign the issue "{Title}" to whoever has the issue "{other}".'
        ),
    },
    hard={
        "label-points": ask_sum(
            ISSUES, "Label", "Points", "How many points have all issues with the label {value} together?"
        ),
        "close-milestone": edit_all(
            ISSUES, "Milestone", "State", "Close every open issue of the milestone {old}.", value="closed"
        ),
        "relabel": edit_all(
            ISSUES, "Label", "Label", "Give every issue with the label {old} the label {value}."
        ),
        "lock-largest": edit_greatest(
            ISSUES,
            "Points",
            "Conversation",
            "locked",
            "Lock the conversation of the issue with the most points.",
        ),
        "remove-comments": remove_all(
            ISSUES, "Author", 'Delete all comments of {value} on the issue "{Title}", and no others.'
        ),
        "delete-licence": delete_all(
            REPOSITORIES, "Licence", "Delete every repository under the licence {value}."
        ),
        "same-licence": create_like(
            REPOSITORIES,
            "Licence",
            REPOSITORIES,
            "Licence",
            "Create a {Visibility} repository {Name} under the licence that {other} has.",
        ),
    },
)


class IssueTrackerEnv(SiteEnv):
    """One task in the issue tracker."""

    kind = ISSUE_TRACKER

    @staticmethod
    def from_dict(info: dict[str, object]) -> "SiteEnv":
        """A task made by the world `web-code`."""
        return IssueTrackerEnv.of_task(info)


world_of = partial(site_world, IssueTrackerEnv)
"""The world of a template, such as `close-issue`; of a difficulty; of `all`."""
