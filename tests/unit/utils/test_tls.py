"""Certificates: those that work, and one clear line for those that do not."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest

from evensong.utils.tls import TLSError, server_context


def make_certificate(folder: Path, name: str = "own", *options: str) -> tuple[str, str]:
    """A self-signed certificate for this machine and its key, made by openssl; their paths."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "30"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate), *(options or ("-nodes",))]
    subprocess.run(command, check=True, capture_output=True)
    return str(certificate), str(key)


def test_a_certificate_and_its_key(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    context = server_context(certificate, key, None, 0)
    assert context is not None and context.verify_mode == ssl.CERT_NONE
    both = tmp_path / "both.pem"
    both.write_bytes(Path(key).read_bytes() + Path(certificate).read_bytes())
    assert server_context(str(both), None, None, 0) is not None
    strict = server_context(certificate, key, certificate, 2)
    assert strict is not None and strict.verify_mode == ssl.CERT_REQUIRED
    assert server_context(None, None, None, 0) is None


def test_what_cannot_be_used_is_said_in_one_line(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    _, other = make_certificate(tmp_path, "other")
    encrypted, secret = make_certificate(tmp_path, "secret", "-passout", "pass:abcd")
    text, missing = tmp_path / "text", str(tmp_path / "none")
    text.write_text("hello")
    for arguments, words in (
        ((missing, key, None, 0), f"--ssl-certfile '{missing}' cannot be read: No such file"),
        ((certificate, missing, None, 0), "--ssl-keyfile .* cannot be read"),
        ((str(tmp_path), key, None, 0), "Is a directory"),
        ((certificate, other, None, 0), "the key is not the certificate's"),
        ((encrypted, secret, None, 0), "encrypted"),
        ((certificate, None, None, 0), "cannot be used"),
        ((str(text), key, None, 0), "cannot be used"),
        ((certificate, key, str(text), 0), "--ssl-ca-certs .* cannot be used"),
        ((certificate, key, None, 2), "--ssl-cert-reqs needs --ssl-ca-certs"),
        ((None, key, None, 0), "--ssl-keyfile needs --ssl-certfile"),
        ((None, None, certificate, 0), "--ssl-ca-certs needs --ssl-certfile"),
        (("a\0b", key, None, 0), "cannot be read"),
    ):
        with pytest.raises(TLSError, match=words) as refused:
            server_context(*arguments)
        assert "\n" not in str(refused.value)
