"""HTTPS: a server with a certificate of the test's own authority, and files that cannot work."""

from __future__ import annotations

import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

trustme = pytest.importorskip("trustme")

from flexinfer.cli.app import app
from flexinfer.server.http.tls import TLSSettings, tls_settings
from helpers.serving import MODEL, ServerProcess


class Files:
    """An authority, a server's certificate and key, a caller's certificate."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        host = authority.issue_cert("localhost", "127.0.0.1")
        self.ca, self.cert, self.key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
        authority.cert_pem.write_to_path(self.ca)
        host.private_key_pem.write_to_path(self.key)
        for blob in host.cert_chain_pems:
            blob.write_to_path(self.cert, append=True)
        self.caller = folder / "caller.pem"
        authority.issue_cert("caller@example.org").private_key_and_cert_chain_pem.write_to_path(
            self.caller
        )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


class TLSServer(ServerProcess):
    """Ready once its log says where it is: only callers with a certificate can ask it."""

    def wait_until_serving(self, context: ssl.SSLContext) -> TLSServer:
        while not (found := re.search(r"Serving \S+ at (https://\S+)", self.log.read_text())):
            assert self.process.poll() is None, self.log.read_text()
        self.url = found[1]
        with httpx.Client(verify=context, timeout=60) as client:
            while True:
                assert self.process.poll() is None, self.log.read_text()
                try:
                    assert client.get(f"{self.url}/ready").status_code == 200
                    return self
                except httpx.ConnectError as error:
                    if "refused" not in str(error):
                        raise


@pytest.fixture(scope="module")
def server(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TLSServer]:
    """Asks for a certificate of its callers, too."""
    arguments = ("--ssl-certfile", str(files.cert), "--ssl-keyfile", str(files.key))
    callers = ("--ssl-ca-certs", str(files.ca), "--ssl-cert-reqs", "1")
    log = tmp_path_factory.mktemp("tls-server") / "log"
    with TLSServer(log, *arguments, *callers, "--kv-cache-memory-bytes", "32MiB") as process:
        yield process.wait_until_serving(ssl.create_default_context(cafile=files.ca))


def test_a_caller_that_trusts_the_authority_gets_an_answer(server: TLSServer, files: Files) -> None:
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.caller)
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 2}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, verify=context, timeout=60)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] <= 2


def test_plain_http_gets_no_answer(server: TLSServer) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https://", "http://") + "/health", timeout=60)


@pytest.mark.parametrize("command", [("inspect",), ("top", "--once"), ("chat",)])
def test_commands_say_what_to_do_about_a_certificate_they_do_not_trust(
    server: TLSServer, command: tuple[str, ...]
) -> None:
    result = CliRunner().invoke(app, [*command, "--url", server.url], input="Hello\n")
    assert result.exit_code == 2
    assert "is not trusted here" in result.stderr
    assert "SSL_CERT_FILE" in result.stderr


def test_commands_talk_to_a_server_whose_authority_they_trust(
    server: TLSServer, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(files.ca))
    result = CliRunner().invoke(app, ["chat", "--url", server.url], input="Hello\n")
    assert result.exit_code == 0, result.stderr


# What is wrong is said, with the flag, before anything is loaded.


def refusal(**given: object) -> str:
    with pytest.raises(ValueError, match="--ssl-") as caught:
        TLSSettings(**given)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_missing_file_is_named(files: Files) -> None:
    text = refusal(certfile=files.cert, keyfile=Path("/no/key.pem"))
    assert "--ssl-keyfile /no/key.pem cannot be read: No such file" in text


def test_a_key_alone_is_half_of_what_tls_needs(files: Files) -> None:
    with pytest.raises(ValueError, match="--ssl-certfile is missing"):
        tls_settings(None, files.key, None, 0)


def test_a_certificate_without_its_key_is_refused(files: Files) -> None:
    assert "in the same file" in refusal(certfile=files.cert)


def test_a_key_of_another_certificate_is_refused(files: Files, tmp_path: Path) -> None:
    other = Files(tmp_path)
    text = refusal(certfile=files.cert, keyfile=other.key)
    assert "key values mismatch" in text


def test_a_key_with_a_password_is_refused_and_not_asked_for(files: Files, tmp_path: Path) -> None:
    locked = tmp_path / "locked.pem"
    command = ["openssl", "pkey", "-in", str(files.key), "-aes256", "-passout", "pass:secret"]
    try:
        subprocess.run([*command, "-out", str(locked)], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl here")
    assert "has a password" in refusal(certfile=files.cert, keyfile=locked)


def test_certificates_of_callers_need_an_authority(files: Files) -> None:
    given = {"certfile": files.cert, "keyfile": files.key}
    assert "needs --ssl-ca-certs" in refusal(**given, cert_reqs=2)
    assert "0 (callers show no certificate)" in refusal(**given, cert_reqs=3)
    assert "no certificate in PEM" in refusal(**given, ca_certs=files.key)


def test_the_command_ends_with_one_line(files: Files) -> None:
    """In a process of its own: `serve` sets up the logs of all of its process."""
    none = str(files.ca.parent / "none")
    command = [sys.executable, "-m", "flexinfer.cli", "serve", "--ssl-certfile", none]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert f"--ssl-certfile {none} cannot be read" in " ".join(result.stderr.split())
