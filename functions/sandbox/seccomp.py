"""The system calls that a sandboxed program may not make: a filter of classic BPF (seccomp(2), seccomp_unload in
libseccomp's words; the field offsets are those of `struct seccomp_data`).

Namespaces take away what there is to reach; the filter takes away the ways to get new ones, and parts of the kernel
that namespaces do not divide: nested user namespaces, other processes' memory, sockets that are not Unix's (vsock
reaches a virtual machine's host from any network namespace), io_uring, BPF, keys, and memory that no limit counts
(memfd, System V). Some 50 numbers for each of two machines are less than a binding to libseccomp asks of an image.
"""

import ctypes
import errno
import os
import socket
import struct

# fmt: off
_BOTH = {"pidfd_getfd": 438, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
         "fspick": 433, "mount_setattr": 442, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
         "memfd_secret": 447, "quotactl_fd": 443, "process_madvise": 440}
DENIED = {
    "x86_64": _BOTH | {
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "mount": 165, "umount2": 166,
        "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308, "bpf": 321, "perf_event_open": 298,
        "keyctl": 250, "add_key": 248, "request_key": 249, "userfaultfd": 323, "memfd_create": 319, "shmget": 29,
        "shmat": 30, "shmctl": 31, "msgget": 68, "semget": 64, "name_to_handle_at": 303, "open_by_handle_at": 304,
        "kexec_load": 246, "kexec_file_load": 320, "init_module": 175, "finit_module": 313, "delete_module": 176,
        "personality": 135, "fanotify_init": 300, "modify_ldt": 154, "iopl": 172, "ioperm": 173, "syslog": 103,
        "move_pages": 279, "migrate_pages": 256, "vmsplice": 278,
    },
    "aarch64": _BOTH | {
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "mount": 40, "umount2": 39,
        "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268, "bpf": 280, "perf_event_open": 241,
        "keyctl": 219, "add_key": 217, "request_key": 218, "userfaultfd": 282, "memfd_create": 279, "shmget": 194,
        "shmat": 196, "shmctl": 195, "msgget": 186, "semget": 190, "name_to_handle_at": 264, "open_by_handle_at": 265,
        "kexec_load": 104, "kexec_file_load": 294, "init_module": 105, "finit_module": 273, "delete_module": 106,
        "personality": 92, "fanotify_init": 262, "syslog": 116, "move_pages": 239, "migrate_pages": 238,
        "vmsplice": 75,
    },
}
"""linux: arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h."""
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE, _CLONE3, _SOCKET = {"x86_64": 56, "aarch64": 220}, 435, {"x86_64": 41, "aarch64": 198}
# fmt: on
_NAMESPACES = 0x7E020080
"""CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
_X32 = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_PR_SET_SECCOMP, _FILTER = 22, 2


def program(machine: str) -> bytes:
    """The filter, as an array of `struct sock_filter`. KeyError for a machine whose numbers are not known here."""
    deny, missing = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    code = [(_LOAD, 0, 0, _MACHINE), (_EQUAL, 1, 0, _AUDIT[machine]), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    if machine == "x86_64":
        code += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, deny)]
    for number in DENIED[machine].values():
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, deny)]
    code += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, missing)]  # its flags lie in memory: libc falls back to clone
    code += [(_EQUAL, 0, 4, _CLONE[machine]), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_ANY_BIT, 0, 1, _NAMESPACES),
             (_RETURN, 0, 0, deny), (_RETURN, 0, 0, _ALLOW)]  # fmt: skip
    code += [(_EQUAL, 0, 4, _SOCKET[machine]), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 1, 0, socket.AF_UNIX),
             (_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]  # fmt: skip
    code += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *line) for line in code)


def install(libc: ctypes.CDLL) -> None:
    """From now on, for this process and all that it starts; wants no_new_privs. Raises OSError."""
    lines = program(os.uname().machine)
    held = ctypes.create_string_buffer(lines, len(lines))
    header = struct.pack("@HP", len(lines) // 8, ctypes.addressof(held))
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.create_string_buffer(header, len(header)), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot filter system calls (seccomp)")
