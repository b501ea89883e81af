"""How commands that ask a server connect to it over TLS."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping

from deployments.command_failure import fail

#: A certificate to show to servers that ask for one, in PEM, and its key where that is not in the same file.
CERTIFICATE_VARIABLE, KEY_FILE_VARIABLE = "FLOTILLA_CLIENT_CERTIFICATE", "FLOTILLA_CLIENT_KEY"


def client_context(environment: Mapping[str, str] = os.environ) -> ssl.SSLContext:
    """Trusts whom the system does, or `SSL_CERT_FILE`; shows the certificate of the environment, if any.

    A certificate that cannot be used ends the command.
    """
    context = ssl.create_default_context()
    certificate, key = environment.get(CERTIFICATE_VARIABLE), environment.get(KEY_FILE_VARIABLE)
    if key and not certificate:
        fail(f"{KEY_FILE_VARIABLE} is set without {CERTIFICATE_VARIABLE}, of which it is the key")
    if certificate:
        try:
            # A key with a password would be asked for on the terminal, where there may be nobody.
            context.load_cert_chain(certificate, key or None, password="")
        except (OSError, ValueError) as error:
            names = f"{CERTIFICATE_VARIABLE} {certificate}" + (f", {KEY_FILE_VARIABLE} {key}" if key else "")
            fail(f"{names}: cannot be used as a certificate and its key: {error}")
    return context
