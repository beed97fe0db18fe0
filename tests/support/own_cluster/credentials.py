"""Credentials of a cluster: one authority, certificates of the servers, tokens of the programs and kubeconfigs."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

VALIDITY = timedelta(days=2)
ADMINISTRATORS = "system:masters"


@dataclass(frozen=True)
class User:
    """A user of the API server. The names of the programs are those to which its own roles are bound."""

    name: str
    groups: Sequence[str] = ()
    token: str = field(default_factory=lambda: secrets.token_hex(16))


class Credentials:
    """Files of one directory. Keys are RSA: service account tokens are signed by it in every version."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = directory / "authority.crt"
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cluster of a test")])
        certificate_authority = x509.BasicConstraints(ca=True, path_length=None)
        self.authority.write_bytes(self._sign(self._name, self._key, certificate_authority))
        self.signing_key, self.signing_certificate = self.issue("service-accounts")

    def issue(self, name: str, *addresses: str, groups: Sequence[str] = ()) -> tuple[Path, Path]:
        """Write a key and a certificate for servers at these addresses, or for a client in these groups. Return their paths."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
        attributes += [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        names = [_build_name(address) for address in addresses or (name,)]
        key_path, path = (self.directory / f"{name}.{suffix}" for suffix in ("key", "crt"))
        path.write_bytes(self._sign(x509.Name(attributes), key, x509.SubjectAlternativeName(names)))
        key_path.touch(mode=0o600)
        key_path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()))
        return key_path, path

    def write_public_key(self) -> Path:
        """Write the public key of service account tokens. Return its path."""
        path = self.directory / "service-accounts.pub"
        certificate = x509.load_pem_x509_certificate(self.signing_certificate.read_bytes())
        path.write_bytes(certificate.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        return path

    def write_users(self, users: Sequence[User]) -> Path:
        """Write the file of tokens that the API server reads. Return its path."""
        path = self.directory / "tokens.csv"
        path.touch(mode=0o600)
        path.write_text("".join(f'{user.token},{user.name},{user.name},"{",".join(user.groups)}"\n' for user in users))
        return path

    def write_kubeconfig(self, name: str, server: str, token: str) -> Path:
        path = self.directory / f"{name}.kubeconfig"
        content = {
            "apiVersion": "v1", "kind": "Config", "current-context": "cluster", "preferences": {},
            "clusters": [{"name": "cluster", "cluster": {"server": server, "certificate-authority": str(self.authority)}}],
            "users": [{"name": "user", "user": {"token": token}}],
            "contexts": [{"name": "cluster", "context": {"cluster": "cluster", "user": "user"}}],
        }  # fmt: skip
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(content))
        return path

    def _sign(self, subject: x509.Name, key: rsa.RSAPrivateKey, extension: x509.ExtensionType) -> bytes:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(
            self._name, subject, key.public_key(), x509.random_serial_number(), now - timedelta(hours=1), now + VALIDITY
        )
        certificate = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return certificate.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _build_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(address))
    except ValueError:
        return x509.DNSName(address)
