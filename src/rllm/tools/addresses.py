"""Addresses that a model may have fetched: those of the public net, see `rllm.types.addresses`.

A name that cannot be resolved here is passed on: the service may know it. Where a page redirects to is seen
by the service alone.
"""

from rllm.errors import ConfigError
from rllm.tools.base import ToolError
from rllm.types.addresses import addresses_of_name, host_of, public_addresses


def require_public(url: str) -> None:
    """Raises ToolError for an address of this machine, of a private network, or of a cloud's metadata."""
    try:
        public_addresses(host_of(url), addresses_of_name)
    except ConfigError as error:
        raise ToolError(str(error)) from error
