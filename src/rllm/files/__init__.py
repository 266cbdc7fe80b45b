"""Files: whole or absent (`atomic`), locked (`locks`), under RLLM_HOME (`home`), by name (`named_places`)."""

from rllm.files.atomic import (
    StorageErrors,
    remove_leftovers,
    require_free_space,
    verify_manifest,
    write_atomic,
    write_directory_atomic,
)
from rllm.files.home import rllm_home

__all__ = [
    "StorageErrors",
    "remove_leftovers",
    "require_free_space",
    "rllm_home",
    "verify_manifest",
    "write_atomic",
    "write_directory_atomic",
]
