"""rLLM's environments behind an OpenEnv server; see docs/environments.md."""
