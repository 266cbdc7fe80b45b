"""`python -m rllm`: the command line where its script is not on the path."""

from rllm.cli.main import main

main()
