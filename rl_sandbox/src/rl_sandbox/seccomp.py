"""A seccomp filter for bubblewrap: system calls that a program does not need, and that share memory or the kernel's state.

Namespaces alone leave gaps: System V shared memory and `memfd_create` allocate memory that no resource limit counts, AF_VSOCK
sockets reach the host of a virtual machine from any network namespace, and user namespaces inside the sandbox open large parts
of the kernel. Numbers: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux 6.12.
"""

from __future__ import annotations

import errno
import struct

# name: (x86_64, aarch64); None if the architecture does not have it.
_DENIED: dict[str, tuple[int, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "shmget": (29, 194),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_AUDIT_ARCH = (0xC000003E, 0xC00000B7)
_X32 = 0x40000000

ARCHITECTURES = ("x86_64", "aarch64")
"""Values of `platform.machine()` that have a filter."""

_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16  # offsets in struct seccomp_data; arguments are little-endian


def program(machine: str) -> bytes:
    """The filter as an array of `struct sock_filter`.

    Args:
        machine: One of `ARCHITECTURES`.
    """
    column = ARCHITECTURES.index(machine)
    code = [
        _instruction(_LOAD, _ARCH_AT),
        _instruction(_EQUAL, _AUDIT_ARCH[column], 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER_AT),
    ]
    if machine == "x86_64":
        code += [_instruction(_AT_LEAST, _X32, 0, 1), _fail(errno.ENOSYS)]
    for numbers in _DENIED.values():
        number = numbers[column]
        if number is not None:
            code += [_instruction(_EQUAL, number, 0, 1), _fail(errno.EPERM)]
    # glibc falls back to clone, which can be checked: its flags are an argument, those of clone3 are in memory.
    code += [_instruction(_EQUAL, _CLONE3[column], 0, 1), _fail(errno.ENOSYS)]
    code += [
        _instruction(_EQUAL, _CLONE[column], 0, 4),
        _instruction(_LOAD, _FIRST_ARGUMENT_AT),
        _instruction(_ANY_BIT, _NEW_NAMESPACES, 0, 1),
        _fail(errno.EPERM),
        _instruction(_RETURN, _ALLOW),
    ]
    families = len(_FAMILIES)
    code += [
        _instruction(_EQUAL, _SOCKET[column], 0, families + 2),
        _instruction(_LOAD, _FIRST_ARGUMENT_AT),
        *(_instruction(_EQUAL, family, families - index, 0) for index, family in enumerate(_FAMILIES)),
        _fail(errno.EAFNOSUPPORT),
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(code)


def _instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def _fail(error: int) -> bytes:
    return _instruction(_RETURN, _ERRNO | error)
