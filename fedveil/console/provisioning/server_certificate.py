"""Issue a server key and certificate from the federation's CA, for a renewal or for new names."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedveil.console.flower import certificates
from fedveil.console.provisioning.federation_folder import FederationFile
from fedveil.errors import ConfigError


def read_certificate(file: Path) -> x509.Certificate:
    """Return a certificate from a federation's folder. Raises ConfigError if it cannot be read."""
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file}: expected a certificate made by fedveil provision, found none ({error}); restore it"
        ) from None


def issue_certificate(folder: Path, federation: FederationFile, ca_key: Path | None) -> None:
    """Write server.pem and server.key for the federation's server names.

    Args:
        ca_key: the CA's private key, if it is no longer in the folder.

    Raises:
        ConfigError: the key is missing or belongs to another CA, or the CA has expired.
    """
    file = ca_key or folder / "ca" / "ca.key"
    ca = read_certificate(folder / "ca" / "ca.crt")
    try:
        key = serialization.load_pem_private_key(file.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--ca-key: expected the CA's private key at {file}, found none ({error}); get it from its safe place"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
        raise ConfigError(f"--ca-key: expected the key of {folder / 'ca' / 'ca.crt'}, found a different key at {file}")
    if ca.not_valid_after_utc <= datetime.now(UTC):
        raise ConfigError(
            f"ca.crt: expected a CA that is still valid, found one that expired on {ca.not_valid_after_utc:%Y-%m-%d}; "
            "provision again; every site then needs the new ca.crt"
        )
    certificates.write_server(folder / "server", ca, key, federation.server_names, timedelta(days=federation.days))
