"""Certificate authority and server certificate of an emulated API server."""

import ipaddress
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

VALIDITY = timedelta(days=2)
SERVER_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")


@dataclass
class ServerCertificate:
    """Server certificate for the loopback address and for the address of the API server inside Pods."""

    authority_pem: bytes
    context: ssl.SSLContext


def _sign(subject: str, key: ec.EllipticCurvePrivateKey, issuer: str) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + VALIDITY)
    )


def create_server_certificate(directory: Path, addresses: tuple[str, ...]) -> ServerCertificate:
    """Create an authority and a certificate for the names of an API server, and write the server's chain to `directory`."""
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    key_usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    authority = (
        _sign("emulated-ca", authority_key, "emulated-ca")
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(key_usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    names: list[x509.GeneralName] = [x509.DNSName(name) for name in SERVER_NAMES]
    names += [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    certificate = (
        _sign("kube-apiserver", key, "emulated-ca")
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(identifier, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    authority_pem = authority.public_bytes(serialization.Encoding.PEM)
    private_pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    chain = directory / "apiserver.pem"
    chain.write_bytes(private_pem + certificate.public_bytes(serialization.Encoding.PEM) + authority_pem)
    chain.chmod(0o600)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    return ServerCertificate(authority_pem, context)
