"""Certificates of a certificate authority that exists for one test."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of a server and of the authority that issued its certificate."""

    authority: Path
    certificate: Path
    key: Path


def create_certificates(directory: Path, *domains: str) -> TlsFiles:
    """Create an authority and a server certificate for `domains`, which may be IP addresses."""
    now = datetime.now(UTC)
    authority_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Authority of a test")])

    def sign(name: x509.Name, key: ec.EllipticCurvePrivateKey, *extensions: tuple[x509.ExtensionType, bool]) -> bytes:
        builder = x509.CertificateBuilder(
            issuer, name, key.public_key(), x509.random_serial_number(), now - timedelta(days=1), now + timedelta(days=1)
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(authority_key, hashes.SHA256()).public_bytes(Encoding.PEM)

    files = TlsFiles(directory / "authority.pem", directory / "server.pem", directory / "server.key")
    files.authority.write_bytes(sign(issuer, authority_key, (x509.BasicConstraints(ca=True, path_length=None), True)))
    names = x509.SubjectAlternativeName([_build_name(domain) for domain in domains])
    files.certificate.write_bytes(
        sign(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, domains[0])]), server_key, (names, False),
            (x509.BasicConstraints(ca=False, path_length=None), True),
        )
    )  # fmt: skip
    files.key.write_bytes(server_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return files


def _build_name(domain: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(domain))
    except ValueError:
        return x509.DNSName(domain)
