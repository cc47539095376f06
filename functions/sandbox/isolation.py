"""Namespaces, file systems, limits and rights of a sandboxed program (namespaces(7), pivot_root(2), capabilities(7)).

    fork server     `prepare`    once: a mount namespace of its own, in it the root that programs will see, read-only
      supervisor                 a run each, outside; it watches, and kills
        outer       `enter`      new namespaces: user, mount, PID, network, IPC, UTS, cgroup; that root becomes its root
          init      `lock`       process 1 of the PID namespace; limits set, rights gone, system calls filtered
            program              process 2; when it ends init ends, and the kernel kills what is left

All of it works for root and for an ordinary user alike: root becomes nobody first, as limits do not bind root.
"""

import contextlib
import ctypes
import math
import os
import resource
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from functions.sandbox import seccomp
from functions.sandbox.program import Limits, SandboxError

LIBC = ctypes.CDLL(None, use_errno=True)
ROOT = "/sys"
"""Where the programs' root is put together: a directory that every Linux has and no program of ours needs. In the fork
server's own mount namespace; no disk sees it."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("null", "zero", "full", "random", "urandom")
NOBODY, INSIDE = 65534, 1000
OLDEST_KERNEL = (5, 14)
"""Since then RLIMIT_NPROC counts in each user namespace by itself."""

_NEWNS, _NEWUSER, _ALL = 0x20000, 0x10000000, 0x7E020000  # of unshare(2); not time
_RDONLY, _NOSUID, _NODEV, _BIND, _REC, _PRIVATE, _DETACH = 1, 2, 4, 4096, 16384, 1 << 18, 2
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38


def check_machine() -> None:
    """Raises SandboxError, one line, for a machine on which there is no sandbox."""
    system = os.uname()
    if sys.platform != "linux" or system.machine not in seccomp.DENIED:
        known = " or ".join(seccomp.DENIED)
        raise SandboxError(f"a sandbox wants Linux on {known}, not {sys.platform} on {system.machine}")
    release = tuple(int(n) for n in system.release.split("-")[0].split(".")[:2])
    if release < OLDEST_KERNEL:
        raise SandboxError(f"a sandbox wants Linux {'.'.join(map(str, OLDEST_KERNEL))} or newer, not {system.release}")


def prepare() -> None:
    """The programs' root, under ROOT. In the fork server, which from then on has a mount namespace of its own."""
    if LIBC.unshare(_NEWNS) != 0:  # no root, or one without CAP_SYS_ADMIN (a container's)
        _new_user_namespace(_NEWUSER | _NEWNS, os.getuid())
    with _named("mount"):
        _mount("none", "/", None, _REC | _PRIVATE)
        _mount("sandbox", ROOT, "tmpfs", _NOSUID, "mode=755,size=1m")
        for path in _visible():
            _show(path)
        for device in DEVICES:
            _show(f"/dev/{device}")
        for name in ("tmp", "proc", "etc"):
            os.makedirs(f"{ROOT}/{name}", exist_ok=True)
        os.symlink("/tmp", f"{ROOT}/dev/shm")
        Path(f"{ROOT}/etc/passwd").write_text(f"sandbox:x:{INSIDE}:{INSIDE}::/tmp:/bin/sh\n")
        Path(f"{ROOT}/etc/group").write_text(f"sandbox:x:{INSIDE}:\n")
        read_only = struct.pack("=QQQQ", _RDONLY | _NOSUID, 0, 0, 0)
        _call(LIBC.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, ROOT.encode(), _AT_RECURSIVE, read_only, len(read_only)))


def _visible() -> list[str]:
    """Of this machine: its system's programs and libraries, and this Python; no path below another."""
    found = [path for path in (*SYSTEM, sys.base_prefix, sys.prefix) if os.path.lexists(path)]
    return [path for path in dict.fromkeys(found) if not any(path.startswith(f"{other}/") for other in found)]


def _show(path: str) -> None:
    at = f"{ROOT}{path}"
    os.makedirs(os.path.dirname(at), exist_ok=True)
    if os.path.islink(path) and not path.startswith((sys.prefix, sys.base_prefix)):
        os.symlink(os.readlink(path), at)
        return
    if os.path.isdir(path):
        os.makedirs(at, exist_ok=True)
    else:
        Path(at).touch()
    _mount(path, at, None, _BIND | _REC)


def enter(limits: Limits) -> None:
    """Into new namespaces and the programs' root, with a /tmp of its own. Children will be in the new PID namespace."""
    if _is_root():
        with _named("become nobody"):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    _call(LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0))  # its own /proc/self is its own again
    os.chdir("/")
    _new_user_namespace(_ALL, INSIDE)
    with _named("change root"):
        _mount(ROOT, ROOT, None, _BIND | _REC)
        os.chdir(ROOT)
        _call(LIBC.syscall(_SYS_PIVOT_ROOT[os.uname().machine], b".", b"."))
        _call(LIBC.umount2(b".", _DETACH))
        os.chdir("/")
        inodes = limits.disk_mb * 64 + 256
        _mount("tmp", "/tmp", "tmpfs", _NOSUID | _NODEV, f"mode=700,size={limits.disk_mb}m,nr_inodes={inodes}")
        os.chdir("/tmp")


def _is_root() -> bool:
    """Of the machine; a rootless container's is an ordinary user to the kernel."""
    inside, outside, _ = map(int, Path("/proc/self/uid_map").read_text().split()[:3])
    return os.geteuid() == 0 and inside == outside


def _new_user_namespace(flags: int, inside: int) -> None:
    """The user that this process is is `inside` there."""
    uid, gid = os.getuid(), os.getgid()
    with _named("make a user namespace"):
        _call(LIBC.unshare(flags))
        for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {uid} 1"), ("gid_map", f"{inside} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def lock(limits: Limits) -> None:
    """Limits; no rights; a filter of system calls. For this process and all that it starts."""
    mb = 1 << 20
    bounds = {
        resource.RLIMIT_AS: limits.memory_mb * mb,
        resource.RLIMIT_CPU: math.ceil(limits.timeout_s) + 1,
        resource.RLIMIT_FSIZE: limits.disk_mb * mb,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: limits.processes + 2,  # the two above it
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
    }
    with _named("set limits"):
        for which, value in bounds.items():
            _, hard = resource.getrlimit(which)
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (value, value))
    with _named("give up rights"):
        _call(LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        for capability in range(64):
            if LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
                break  # past the last that the kernel knows
        header, nothing = struct.pack("=Ii", 0x20080522, 0), bytes(24)  # _LINUX_CAPABILITY_VERSION_3
        _call(LIBC.capset(header, nothing))
        seccomp.install(LIBC)


def die_with(parent_alive: int) -> None:
    """Ends with the process above (which may be in another PID namespace): `parent_alive` is the reading end of a pipe
    whose writing end only that process holds. After the last change of rights: they clear it."""
    _call(LIBC.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0))
    os.set_blocking(parent_alive, False)
    with contextlib.suppress(BlockingIOError):
        os.read(parent_alive, 1)
        os._exit(1)
    os.close(parent_alive)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    what = kind.encode() if kind is not None else None
    _call(LIBC.mount(source.encode(), target.encode(), what, ctypes.c_ulong(flags), options.encode()), target)


def _call(result: int, where: str = "") -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), where or None)


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f" at {error.filename}" if error.filename else ""
        raise SandboxError(f"this machine does not let a process {what}{where}: {error.strerror}") from error
