"""The system calls that a program in the sandbox does not get, as a seccomp filter in BPF.

Allowed is what ordinary programs use; refused with EPERM is what changes the machine, reaches into other
processes, makes namespaces, or holds memory that no limit counts. `clone3` says ENOSYS, because a filter
cannot look through its pointer: libraries then use `clone`, whose flags are looked at.
"""

import struct

EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97
NEW_NAMESPACES = 0x7E020000
"""Every CLONE_NEW flag of `clone`."""
SOCKET_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6: the last two end at the sandbox's own loopback."""

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000
"""Set in the numbers of x86_64's second table of calls, which is refused whole."""

# name: (x86_64, aarch64); None where the architecture has no such call
REFUSED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "personality": (135, 92),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "mlockall": (151, 230),
}
CLONE = (56, 220)
CLONE3 = (435, 435)
SOCKET = (41, 198)

LOAD, JUMP_EQUAL, JUMP_ANY_BIT, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER_AT, ARCHITECTURE_AT, ARGUMENT_0_AT = 0, 4, 16


def seccomp_filter(machine: str) -> bytes:
    """The filter for `machine` (`os.uname().machine`) as an array of `struct sock_filter`.

    Raises KeyError for a machine it does not know.
    """
    column = list(ARCHITECTURES).index(machine) if machine in ARCHITECTURES else None
    if column is None:
        raise KeyError(machine)
    lines = [
        # The numbers below are those of one architecture; a 32-bit program would mean other calls by them.
        _line(LOAD, ARCHITECTURE_AT),
        _line(JUMP_EQUAL, ARCHITECTURES[machine], 1, 0),
        _line(RETURN, KILL),
        _line(LOAD, NUMBER_AT),
    ]
    if machine == "x86_64":
        lines += [_line(JUMP_AT_LEAST, X32, 0, 1), _line(RETURN, ERRNO | ENOSYS)]
    for numbers in REFUSED.values():
        if numbers[column] is not None:
            lines += [_line(JUMP_EQUAL, numbers[column], 0, 1), _line(RETURN, ERRNO | EPERM)]
    lines += [_line(JUMP_EQUAL, CLONE3[column], 0, 1), _line(RETURN, ERRNO | ENOSYS)]
    lines += [
        _line(JUMP_EQUAL, CLONE[column], 0, 4),
        _line(LOAD, ARGUMENT_0_AT),
        _line(JUMP_ANY_BIT, NEW_NAMESPACES, 0, 1),
        _line(RETURN, ERRNO | EPERM),
        _line(RETURN, ALLOW),
    ]
    lines += [
        _line(JUMP_EQUAL, SOCKET[column], 0, len(SOCKET_FAMILIES) + 2),
        _line(LOAD, ARGUMENT_0_AT),
        *(
            _line(JUMP_EQUAL, family, len(SOCKET_FAMILIES) - place, 0)
            for place, family in enumerate(SOCKET_FAMILIES)
        ),
        _line(RETURN, ERRNO | EAFNOSUPPORT),
    ]
    return b"".join([*lines, _line(RETURN, ALLOW)])


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
