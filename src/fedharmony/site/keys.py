"""Keys and certificates, made with ``cryptography``, which comes with the extra ``flower``."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fedharmony.errors import CheckpointError, ConfigError

#: How long certificates are valid.
VALID = timedelta(days=825)


def _cryptography() -> Any:
    try:
        import cryptography.x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError:
        raise ConfigError(
            "Keys and certificates need the package cryptography, which comes with Flower: "
            "pip install 'fedharmony[flower]'."
        ) from None
    return cryptography.x509, hashes, serialization, ec, NameOID


def make_key(file: Path) -> Path:
    """A new key pair of a site: the private key for its owner alone, and ``file.pub``."""
    _, _, forms, ec, _ = _cryptography()
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        forms.Encoding.PEM, forms.PrivateFormat.OpenSSH, forms.NoEncryption()
    )
    public = key.public_key().public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)
    _write_secret(file, private)
    place = file.with_name(f"{file.name}.pub")
    place.write_bytes(public + b"\n")
    return place


def make_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """An authority of our own (``ca.crt``), and a server's certificate and key for some hosts.

    The authority's key is not kept: nobody can make another server that sites would trust.
    """
    x509, hashes, forms, ec, oid = _cryptography()
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC)

    def signed(subject: Any, key: Any, issuer: Any, by: Any, extensions: Sequence[Any]) -> Any:
        builder = x509.CertificateBuilder(
            issuer_name=issuer,
            subject_name=subject,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - timedelta(minutes=5),
            not_valid_after=now + VALID,
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(by, hashes.SHA256())

    def named(text: str) -> Any:
        return x509.Name([x509.NameAttribute(oid.COMMON_NAME, text)])

    authority, key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    ca = named("fedharmony federation")
    root = signed(ca, authority, ca, authority, [x509.BasicConstraints(ca=True, path_length=0)])
    names = x509.SubjectAlternativeName([_san(x509, host) for host in hosts])
    server = signed(named(hosts[0]), key, ca, authority, [names])
    private = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    _write_secret(folder / "server.key", private)
    for name, certificate in (("ca.crt", root), ("server.pem", server)):
        (folder / name).write_bytes(certificate.public_bytes(forms.Encoding.PEM))


def _san(x509: Any, host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_secret(file: Path, data: bytes) -> None:
    """Write a new file that only its owner can read; an old one is never replaced."""
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise CheckpointError(
            f"{file} exists already, and a key is never replaced: sites trust the old one. Choose "
            "another folder, or remove it yourself."
        ) from None
    with os.fdopen(handle, "wb") as stream:
        stream.write(data)
