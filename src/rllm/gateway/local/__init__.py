"""Calls answered by a client that takes and gives ids, in this process."""

from rllm.gateway.local.policy import LocalPolicy as LocalPolicy
