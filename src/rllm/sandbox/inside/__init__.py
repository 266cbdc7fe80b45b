"""The code that runs inside a sandbox: sent there as text, on the sandbox's own Python, with the standard
library alone."""
