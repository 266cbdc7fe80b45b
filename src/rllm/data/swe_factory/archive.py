"""A project's plain files as a git bundle with one commit, and bugs as diffs of it.

tree ──► one commit of a fixed author and date ──► NAME.bundle ;  changed files ──► a diff that makes the bug
"""

from collections.abc import Mapping
from pathlib import Path

from rllm.data.swe_factory.sources import git

IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "rllm"), ("EMAIL", "rllm@localhost"), ("DATE", "2000-01-01T00:00:00Z"))
}


class PlainRepository:
    """The files of a project as they are, in a repository beside them."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self._tree = tree
        self._folder = folder
        if not folder.is_dir():
            folder.mkdir()
            git("init", "--quiet", "--bare", "--initial-branch=main", ".", at=folder)
            (folder / "info").mkdir(exist_ok=True)
            # Files come out as they are stored, whatever .gitattributes of the project says.
            (folder / "info" / "attributes").write_text("* -text -filter -ident\n")
        self._git("add", "-A", "-f", ".")
        tree_id = self._git("write-tree").strip()
        self.commit = git("commit-tree", "-m", "base", tree_id, at=folder, **IDENTITY).strip()
        git("update-ref", "refs/heads/main", self.commit, at=folder)

    def _git(self, *words: str) -> str:
        return git(f"--git-dir={self._folder}", f"--work-tree={self._tree}", *words, at=self._tree)

    def bundle(self, target: Path) -> None:
        """Write the commit to a file that git reads as a repository; the same bytes every time."""
        git(
            "-c",
            # Several threads may make different packs of the same objects.
            "pack.threads=1",
            "bundle",
            "create",
            "--quiet",
            str(target),
            "HEAD",
            "main",
            at=self._folder,
        )

    def diffs(self, files: Mapping[str, str]) -> tuple[str, str]:
        """The diff that makes these texts of the plain files, and the one that takes it back."""
        index = {"GIT_INDEX_FILE": str(self._folder / "changed-index")}
        git("read-tree", self.commit, at=self._folder, **index)
        for path, text in sorted(files.items()):
            mode = git("ls-files", "--stage", "--", path, at=self._folder, **index).split(" ", 1)[0]
            git("update-index", "--cacheinfo", f"{mode},{self._blob(text)},{path}", at=self._folder, **index)
        tree_hash = git("write-tree", at=self._folder, **index).strip()
        words = ("diff", "--no-color", "--no-ext-diff", "--no-renames", "--full-index")
        forth = git(*words, self.commit, tree_hash, at=self._folder)
        back = git(*words, tree_hash, self.commit, at=self._folder)
        return forth, back

    def _blob(self, text: str) -> str:
        path = self._folder / "blob"
        path.write_bytes(text.encode("utf-8"))
        return git("hash-object", "-w", "--no-filters", str(path), at=self._folder).strip()
