"""Rollout workers on the nodes of a Ray cluster. Extra `ray`; see docs/cluster.md.

kind ──► session: the driver ──► pool: workers and their weights ──► engine: leases out, episodes back
"""

from rllm.integrations.ray.kind import RAY

__all__ = ("RAY",)
