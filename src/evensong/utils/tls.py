"""The server's side of TLS."""

from __future__ import annotations

import ssl
from pathlib import Path


class TLSError(Exception):
    """Certificates or keys that cannot be used; the message is one line for a person."""


def server_context(
    certfile: str | None, keyfile: str | None, ca_certs: str | None, cert_reqs: int
) -> ssl.SSLContext | None:
    """What a server needs to speak TLS; None where no certificate is given.

    `cert_reqs` is 0, 1 or 2: clients' certificates are not asked for, checked if sent, or required. Raises TLSError.
    """
    if certfile is None:
        for flag, value in (("--ssl-keyfile", keyfile), ("--ssl-ca-certs", ca_certs), ("--ssl-cert-reqs", cert_reqs)):
            if value:
                raise TLSError(f"{flag} needs --ssl-certfile")
        return None
    if cert_reqs and ca_certs is None:
        raise TLSError("--ssl-cert-reqs needs --ssl-ca-certs")
    for flag, name in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile), ("--ssl-ca-certs", ca_certs)):
        if name is not None:
            _check_readable(flag, name)
    if b"ENCRYPTED" in Path(keyfile or certfile).read_bytes():
        raise TLSError(f"the key in {keyfile or certfile} is encrypted; the server needs one without a password")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile)
    except (ssl.SSLError, ValueError, OSError) as error:
        raise TLSError(f"--ssl-certfile {certfile} {_and(keyfile)}cannot be used: {_reason(error)}") from error
    if ca_certs is not None:
        try:
            context.load_verify_locations(ca_certs)
        except (ssl.SSLError, ValueError, OSError) as error:
            raise TLSError(f"--ssl-ca-certs {ca_certs} cannot be used: {_reason(error)}") from error
    context.verify_mode = ssl.VerifyMode(cert_reqs)
    return context


def _check_readable(flag: str, name: str) -> None:
    try:
        with Path(name).open("rb") as file:
            file.read(1)
    except (OSError, ValueError) as error:
        raise TLSError(f"{flag} {name!r} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _and(keyfile: str | None) -> str:
    return "" if keyfile is None else f"with --ssl-keyfile {keyfile} "


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    known = {
        "KEY_VALUES_MISMATCH": "the key is not the certificate's",
        "None": "it must hold a certificate and its key in PEM",
    }
    return known.get(str(reason), str(reason))
