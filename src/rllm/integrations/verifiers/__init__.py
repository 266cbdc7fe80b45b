"""Environments of the library verifiers, and rLLM's environments for it; see docs/environments.md."""
