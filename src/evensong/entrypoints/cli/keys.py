"""API keys in the environment: one, or several with commas, as `--api-key` takes them."""

from __future__ import annotations

import os

API_KEY_VARIABLE = "EVENSONG_API_KEY"


def keys_in_environment() -> tuple[str, ...]:
    """The keys that the environment names; a server takes them all, a client bears the first."""
    keys = (key.strip() for key in os.environ.get(API_KEY_VARIABLE, "").split(","))
    return tuple(key for key in keys if key)
