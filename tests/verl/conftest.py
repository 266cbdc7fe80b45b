"""What needs verl: `make test-verl` runs it in an environment of its own; elsewhere nothing is collected."""

import importlib.util

if importlib.util.find_spec("verl") is None:
    collect_ignore_glob = ["*"]
