"""General plugins: functions that other packages register under the entry-point group `evensong.general_plugins`."""

from __future__ import annotations

import os
from importlib.metadata import entry_points

from evensong.protocol.errors import ConfigError
from evensong.utils.logging import get_logger

GROUP = "evensong.general_plugins"
ASKED_FOR = "EVENSONG_PLUGINS"

logger = get_logger(__name__)


def load_general_plugins() -> list[str]:
    """Runs each plugin; returns the names of those that ran.

    One that fails is logged by name and skipped, unless $EVENSONG_PLUGINS (names, comma-separated) asks for it: then
    ConfigError. Where that variable is set, only those that it names are loaded.
    """
    text = os.environ.get(ASKED_FOR)
    asked = None if text is None else {name.strip() for name in text.split(",") if name.strip()}
    found = {point.name: point for point in entry_points(group=GROUP)}
    if asked and (missing := asked - set(found)):
        raise ConfigError(f"${ASKED_FOR} names plugins that are not installed: {', '.join(sorted(missing))}")
    loaded = []
    for name, point in found.items():
        if asked is not None and name not in asked:
            continue
        try:
            point.load()()
            loaded.append(name)
        except (Exception, SystemExit) as error:  # a plugin may not end its host either
            if asked is not None:
                raise ConfigError(f"the plugin {name} failed: {error}") from error
            logger.warning("plugin %s failed and is skipped: %s", name, error)
    return loaded
