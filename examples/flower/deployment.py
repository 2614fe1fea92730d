"""A Flower deployment on this machine: SuperLink and SuperNodes as processes, with TLS and authentication."""

from __future__ import annotations

import datetime
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HOST = "127.0.0.1"
START_S, STOP_S = 120.0, 10.0


class Deployment:
    """All that it starts, it ends; keys, certificates and logs are in `folder`.

    with Deployment(folder) as deployment:
        for number in range(4):
            deployment.register(number)
            deployment.start_node(number, "partition-id=0")
        deployment.run("path/of/the/app")
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._others: list[subprocess.Popen[bytes]] = []
        self._port = _free_port()
        self._environment = {
            **os.environ,
            "FLWR_HOME": str(self.folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "XDG_STATE_HOME": str(self.folder / "state"),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
        }

    def __enter__(self) -> Deployment:
        (self.folder / "flwr").mkdir(parents=True, exist_ok=True)
        _certificates(self.folder)
        (self.folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{HOST}:{self._port}"\n'
            f'root-certificates = "{self.folder / "ca.crt"}"\n'
        )
        try:
            link = self._start(
                "superlink",
                "flower-superlink",
                *("--ssl-ca-certfile", self.folder / "ca.crt"),
                *("--ssl-certfile", self.folder / "server.crt", "--ssl-keyfile", self.folder / "server.key"),
                *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
                *("--port", self._port),
            )
            self._others.append(link)
            self._wait_for_port(link)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def make_key(self, number: int) -> Path:
        """A SuperNode's private key; the public one is beside it, .pub."""
        path = self.folder / f"node{number}"
        key = ec.generate_private_key(ec.SECP384R1())
        private = (serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
        path.write_bytes(key.private_bytes(serialization.Encoding.PEM, *private))
        path.chmod(0o600)
        public = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        path.with_suffix(".pub").write_bytes(key.public_key().public_bytes(*public))
        return path

    def register(self, number: int) -> None:
        """Make a key and tell the SuperLink of it."""
        key = self.make_key(number)
        subprocess.run(
            ["flwr", "supernode", "register", str(key.with_suffix(".pub")), "here"],
            env=self._environment,
            check=True,
            capture_output=True,
            timeout=START_S,
        )

    def start_node(self, number: int, config: str = "") -> subprocess.Popen[bytes]:
        """Start the SuperNode of this key, again if it has ended."""
        if number in self.nodes:
            self.kill_node(number)
        node = self._start(
            f"supernode{number}",
            "flower-supernode",
            *("--root-certificates", self.folder / "ca.crt", "--superlink", f"{HOST}:{self._port}"),
            *("--port", _free_port(), "--auth-supernode-private-key", self.folder / f"node{number}"),
            *(("--node-config", config) if config else ()),
        )
        self.nodes[number] = node
        return node

    def start_run(self, app: Path, config: str = "") -> subprocess.Popen[bytes]:
        """Start a run of an app; its log is the process's output."""
        chosen = ["--run-config", config] if config else []
        command = ["flwr", "run", str(app), "here", "--stream", *chosen]
        process = subprocess.Popen(
            command,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._others.append(process)
        return process

    def kill_node(self, number: int) -> None:
        """SIGKILL a SuperNode and what it has started."""
        _signal(self.nodes[number], signal.SIGKILL)
        self.nodes.pop(number).wait()

    def log(self, name: str) -> str:
        """What a process has said: 'superlink' or 'supernode0'."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def stop(self) -> None:
        """End all that was started: politely, then not."""
        processes = [*self.nodes.values(), *reversed(self._others)]
        for process in processes:
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        while self._left() and time.monotonic() < deadline:
            time.sleep(0.1)
        for number in self._left():
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        for process in processes:
            _signal(process, signal.SIGKILL)  # whoever of its group is left
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self.nodes.clear()
        self._others.clear()

    def _left(self) -> list[int]:
        """Processes with our FLWR_HOME: what Flower starts in sessions of their own outlives its parent."""
        home = f"FLWR_HOME={self._environment['FLWR_HOME']}\0".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is another user's
                if home in (process / "environ").read_bytes():
                    found.append(int(process.name))
        return found

    def _start(self, name: str, *command: object) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [str(part) for part in command],
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_for_port(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex((HOST, self._port)) == 0:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"the SuperLink did not start:\n{self.log('superlink')}")


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)  # its own session: the process and what it has started


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _certificates(folder: Path) -> None:
    """An authority of our own, and the SuperLink's certificate, for a day."""
    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "laconic example")])
    server = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "SuperLink")])
    now = datetime.datetime.now(datetime.timezone.utc)

    def builder(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    signed = builder(authority, authority_key).add_extension(x509.BasicConstraints(True, None), critical=True)
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    signed = signed.add_extension(usage, critical=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    signed = signed.add_extension(identifier, critical=False)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    served = builder(server, server_key).add_extension(names, critical=False)
    served = served.add_extension(issuer, critical=False)
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(signed.sign(authority_key, hashes.SHA256()).public_bytes(pem))
    (folder / "server.crt").write_bytes(served.sign(authority_key, hashes.SHA256()).public_bytes(pem))
    key_format = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "server.key").write_bytes(server_key.private_bytes(pem, *key_format))
    (folder / "server.key").chmod(0o600)
