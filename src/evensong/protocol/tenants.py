"""Tenants: whose share of the service a request takes. Only a digest of the name travels, and nothing logs the name."""

from __future__ import annotations

import hashlib


def tenant_id(name: str) -> str:
    """16 hex digits that stand for a tenant's name; "" for those without one, who share one tenant."""
    if not name:
        return ""
    return hashlib.blake2b(name.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()
