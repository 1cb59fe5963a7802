"""Rate limiting as a service: other programs check over HTTP. See docs/service.md."""

from ..core.callers import Caller

__all__ = ["Caller"]
