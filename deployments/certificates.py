"""The certificate of the API, for HTTP and gRPC: whether it can be used, and when it may be."""

from __future__ import annotations

import codecs
import ssl
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc

from cluster.http_config import HttpConfig


@dataclass(frozen=True)
class Certificate:
    """A certificate with its key, as its files hold them.

    Attributes:
        context: for HTTPS.
        for_grpc: for gRPC, which has a TLS library of its own.
        expires_at: see the function of that name.
    """

    context: ssl.SSLContext
    for_grpc: grpc.ServerCertificateConfiguration
    expires_at: float


def check_certificate(http: HttpConfig, *, for_grpc: bool = False) -> None:
    """Raise ValueError if the certificate or its key cannot be used, by the library of gRPC too if asked."""
    if http.tls_certificate is not None:
        read_certificate(http, for_grpc=for_grpc)


def read_certificate(http: HttpConfig, *, for_grpc: bool = False) -> Certificate:
    """What the files that `http` names hold.

    Raises:
        ValueError: if it cannot be used, by the library of gRPC too if asked.
        OSError: if the files change while they are read.
    """
    assert http.tls_certificate is not None
    assert http.tls_key is not None  # the configuration sees to it
    _check_pem(http.tls_certificate, "CERTIFICATE-----", "http.tls_certificate", "certificate")
    _check_pem(http.tls_key, "PRIVATE KEY-----", "http.tls_key", "private key")
    both = f"http.tls_certificate {http.tls_certificate} and http.tls_key {http.tls_key}"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(http.tls_certificate, http.tls_key, password=lambda: _refused(http.tls_key))
    except OSError as error:  # SSLError is one
        raise ValueError(f"{both} cannot be used together: {error}") from None
    if http.tls_client_ca is not None:
        _ask_clients(context, http.tls_client_ca)
    configuration = _grpc_configuration(http.tls_key, http.tls_certificate, http.tls_client_ca)
    if for_grpc and not _suits_grpc(configuration):
        raise ValueError(
            f"{both} cannot be used by gRPC, which has a TLS library of its own: write the certificate with "
            "`openssl x509`, and have an RSA key, or one of the curve P-256 or P-384"
        )
    return Certificate(context, configuration, expires_at(http))


def _ask_clients(context: ssl.SSLContext, authorities: Path) -> None:
    """Let the context take only clients with certificates that one of the authorities has signed."""
    _check_pem(authorities, "CERTIFICATE-----", "http.tls_client_ca", "certificate")
    try:
        context.load_verify_locations(authorities)
    except OSError as error:
        raise ValueError(f"http.tls_client_ca {authorities} cannot be used: {error}") from None
    context.verify_mode = ssl.CERT_REQUIRED


def _check_pem(path: Path, mark: str, field: str, what: str) -> None:
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        raise ValueError(f"there is no {path}") from None
    except OSError as error:  # often a key that only root may read
        raise ValueError(f"{field}: cannot read {path}: {error.strerror}") from None
    if mark not in text:
        raise ValueError(f"{field}: {path} holds no {what} in PEM")


def _refused(path: Path | None) -> str:
    """Nobody is there to be asked for a pass phrase."""
    raise ValueError(f"http.tls_key: {path} is encrypted; it must be a key without a pass phrase")


def _suits_grpc(configuration: grpc.ServerCertificateConfiguration) -> bool:
    credentials = grpc.dynamic_ssl_server_credentials(configuration, lambda: configuration)
    server = grpc.server(ThreadPoolExecutor(1))
    try:
        server.add_secure_port("127.0.0.1:0", credentials)
    except RuntimeError:
        return False
    return True


def _grpc_configuration(
    key: Path, chain: Path, authorities: Path | None
) -> grpc.ServerCertificateConfiguration:
    def text(path: Path) -> bytes:
        # Editors of Windows put a mark before the text, which OpenSSL passes over, and not gRPC's library.
        return path.read_bytes().removeprefix(codecs.BOM_UTF8)

    return grpc.ssl_server_certificate_configuration(
        [(text(key), text(chain))], None if authorities is None else text(authorities)
    )


def certificate_warnings(http: HttpConfig) -> list[str]:
    """What is wrong with the times of the certificate and of those that come with it in its file."""
    if http.tls_certificate is None:
        return []
    now, warnings = datetime.now(UTC), []
    for number, (begins, ends) in enumerate(validities(http.tls_certificate), 1):
        which = "the certificate" if number == 1 else f"certificate {number} of the file"
        if now >= ends:
            what = f"expired on {ends:%Y-%m-%d at %H:%M} UTC"
        elif now < begins:
            what = f"is not valid before {begins:%Y-%m-%d at %H:%M} UTC, by this machine's clock"
        else:
            continue
        warnings.append(
            f"http.tls_certificate {http.tls_certificate}: {which} {what}. Clients that check it do not "
            "connect: renew it"
        )
    return warnings


def expires_at(http: HttpConfig) -> float:
    """When the first of the certificate and those that come with it expires, in Unix time; 0 without TLS."""
    ends = [] if http.tls_certificate is None else [end for _, end in validities(http.tls_certificate)]
    return min(ends).timestamp() if ends else 0.0


def validities(path: Path) -> list[tuple[datetime, datetime]]:
    """From when to when each certificate of a PEM file is valid, in the file's order.

    None is told where one is not written as it should be, which OpenSSL may take all the same.
    """
    from cryptography import x509  # 40 ms of a start, which most servers have no certificate for

    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError:
        return []
    return [(one.not_valid_before_utc, one.not_valid_after_utc) for one in found]
