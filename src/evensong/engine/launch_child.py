"""A launch's children: processes whose first orders are a Bootstrap."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from evensong.protocol.errors import EngineStartError
from evensong.protocol.handshake import Bootstrap
from evensong.utils.child import Child, NoChildError


def start_child(
    title: str,
    module: str,
    bootstrap: Bootstrap,
    on_exit: Callable[[Child], None],
    arguments: Sequence[str] = (),
    pass_fds: Sequence[int] = (),
) -> Child:
    """A child that runs `module`, in a session of its own. Raises EngineStartError when no process can be started."""
    try:
        return Child(title, module, msgspec.msgpack.encode(bootstrap), on_exit, arguments, pass_fds)
    except NoChildError as error:
        raise EngineStartError(str(error)) from error
