"""Command-line agents of others, run inside the sandbox of their task behind a session of the gateway."""
