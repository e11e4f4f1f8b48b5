"""TLS: the certificate that the server shows, and the one that it may ask of its callers.

Names and meaning are those of vLLM's flags (--ssl-keyfile, ...). What is wrong with the files is
said at the start, before the model is loaded.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TLSSettings:
    """Files in PEM. Raises ValueError, naming the flag, for what cannot work."""

    certfile: Path
    """The certificate, with those that lead to its authority; the key too if `keyfile` is None."""
    keyfile: Path | None = None
    ca_certs: Path | None = None
    """Authorities whose certificates callers may show."""
    cert_reqs: int = int(ssl.CERT_NONE)
    """0: callers show no certificate; 1: they may; 2: they must (ssl.CERT_NONE, ...)."""

    def __post_init__(self) -> None:
        _check_readable("--ssl-certfile", self.certfile)
        _check_readable("--ssl-keyfile", self.keyfile)
        _check_readable("--ssl-ca-certs", self.ca_certs)
        if self.cert_reqs not in (ssl.CERT_NONE, ssl.CERT_OPTIONAL, ssl.CERT_REQUIRED):
            raise ValueError(
                "--ssl-cert-reqs is 0 (callers show no certificate), 1 (they may) or 2 (they "
                f"must), got {self.cert_reqs}"
            )
        if self.cert_reqs != ssl.CERT_NONE and self.ca_certs is None:
            raise ValueError(
                f"--ssl-cert-reqs {self.cert_reqs} needs --ssl-ca-certs: the authorities whose "
                "certificates callers may show"
            )
        self._check_files()

    def uvicorn_options(self) -> dict[str, Any]:
        return {
            "ssl_certfile": str(self.certfile),
            "ssl_keyfile": None if self.keyfile is None else str(self.keyfile),
            "ssl_ca_certs": None if self.ca_certs is None else str(self.ca_certs),
            "ssl_cert_reqs": self.cert_reqs,
        }

    def _check_files(self) -> None:
        """Load them as uvicorn will."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load_chain(context)
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except ssl.SSLError as error:
                raise ValueError(
                    f"--ssl-ca-certs {self.ca_certs}: no certificate in PEM there ({_why(error)})"
                ) from None

    def _load_chain(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self.certfile, self.keyfile, password=_refuse_password)
        except _EncryptedKeyError:
            raise ValueError(
                f"--ssl-keyfile {self.keyfile or self.certfile}: the key has a password, which a "
                "server cannot type: write it without one (openssl pkey -in KEY -out PLAIN_KEY)"
            ) from None
        except ssl.SSLError as error:
            key = self.keyfile or "its key, which has to stand in the same file"
            raise ValueError(
                f"--ssl-certfile {self.certfile} and {key} make no pair of a certificate and its "
                f"key in PEM ({_why(error)})"
            ) from None


class _EncryptedKeyError(Exception):
    pass


def _refuse_password() -> str:
    """Without it OpenSSL would ask at the terminal."""
    raise _EncryptedKeyError


def _why(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()


def _check_readable(flag: str, path: Path | None) -> None:
    if path is None:
        return
    try:
        path.open("rb").close()
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error.strerror}") from None


def tls_settings(
    certfile: Path | None, keyfile: Path | None, ca_certs: Path | None, cert_reqs: int
) -> TLSSettings | None:
    """From the flags; None: plain HTTP. Raises ValueError for half of what TLS needs."""
    if certfile is not None:
        return TLSSettings(
            certfile=certfile, keyfile=keyfile, ca_certs=ca_certs, cert_reqs=cert_reqs
        )
    if keyfile is not None or ca_certs is not None or cert_reqs != ssl.CERT_NONE:
        raise ValueError("--ssl-certfile is missing: TLS needs a certificate and its key")
    return None
