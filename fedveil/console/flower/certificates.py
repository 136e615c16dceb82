"""A federation's keys: its own CA, the SuperLink's TLS certificate, and a node key for each site."""

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedveil.errors import ConfigError

VALID = timedelta(days=30)
_OTHER_FORMS = {b"BEGIN EC PRIVATE KEY": "a SEC1 key (PEM)", b"BEGIN PRIVATE KEY": "a PKCS#8 key (PEM)"}


def write_tls(folder: Path) -> None:
    """Write ca.crt, server.pem and server.key. The CA's private key is never written, so it can sign nothing else."""
    ca, ca_key = new_ca("FedVeil CA", VALID)
    write_certificate(folder / "ca.crt", ca)
    write_server(folder, ca, ca_key, ["localhost", "127.0.0.1"], VALID)


def new_ca(name: str, valid: timedelta) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Create a certificate authority that may sign server certificates but no other authorities."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(_name(name), _name(name), key.public_key(), valid)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate, key


def write_server(
    folder: Path, ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey, names: Sequence[str], valid: timedelta
) -> None:
    """Write server.pem and server.key for a server with these `names`. The certificate never outlives the CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(_name("superlink"), ca.subject, key.public_key(), valid, ca.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    write_private(folder / "server.key", key, serialization.PrivateFormat.PKCS8)
    write_certificate(folder / "server.pem", certificate)


def write_certificate(path: Path, certificate: x509.Certificate) -> None:
    """Write the certificate as PEM."""
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def write_node_key(path: Path) -> None:
    """Write a P-384 key pair in OpenSSH format to `path` and `path`.pub (Flower refuses Ed25519)."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_private(path, key, serialization.PrivateFormat.OpenSSH)
    path.with_name(path.name + ".pub").write_text(public_text(key.public_key()) + "\n")


def require_node_key(file: Path) -> None:
    """Raise ConfigError for a private key that Flower does not accept; the error names the key type and the fix."""
    data = file.read_bytes()
    try:
        key = serialization.load_ssh_private_key(data, None)
        kind = "" if _is_p384(key) else "another kind of key"
    except TypeError:
        kind = "a key with a passphrase"
    except (ValueError, UnsupportedAlgorithm):
        kind = next((words for mark, words in _OTHER_FORMS.items() if mark in data), "something else")
        kind = kind if kind == "something else" or _is_node_key(data) else "another kind of key"
    if kind:
        mend = f"convert it with ssh-keygen -p -N '' -f {file}" if kind in _OTHER_FORMS.values() else "choose another"
        raise ConfigError(
            f"{file}: expected a P-384 key in OpenSSH format without a passphrase, found {kind}; {mend}, or make a "
            "new one with fedveil site init"
        )


def _is_node_key(data: bytes) -> bool:
    """Return whether the data is a P-384 key in another PEM format, which can be converted."""
    try:
        return _is_p384(serialization.load_pem_private_key(data, None))
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return False


def _is_p384(key: object) -> bool:
    return isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name == "secp384r1"


def public_text(key: ec.EllipticCurvePublicKey) -> str:
    """Return a public key in OpenSSH format, without a comment."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def write_private(path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    """Write the key as PEM without a passphrase, readable only by its owner."""
    text = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(text)


def write_secret(path: Path) -> Path:
    """Write 64 random hex digits, readable only by the file's owner; each call draws a new secret."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return path


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    valid: timedelta,
    until: datetime | None = None,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    end = now + valid
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(min(end, until) if until else end)
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
