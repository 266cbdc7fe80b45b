"""Tasks of Inspect AI; see docs/environments.md."""
