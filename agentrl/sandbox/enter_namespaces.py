"""Builds the namespaces of a sandbox, then executes the guest in them. Passed to `python -ISc` as text; standard library only.

Mounts: a read-only root that holds the system's programs and libraries and the Python that runs this, a few devices, the processes of the sandbox,
and a work folder in memory. No network but the loopback device, which is down. Processes outside are neither seen nor reached.
Started by root, the guest runs as a user id that nobody else has; started by another user, in a user namespace.
"""

import contextlib
import ctypes
import json
import os
import random
import signal
import sys
from typing import Any

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
NOATIME, NODIRATIME, RELATIME = 1024, 2048, 1 << 21
PDEATHSIG, CAPBSET_DROP, NO_NEW_PRIVS = 1, 24, 38
SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/localtime",
)
DEVICES = ("null", "zero", "full", "random", "urandom")
FIRST_UID = 1 << 30
libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def _mount(source: "str | None", target: str, kind: "str | None", flags: int, data: "str | None" = None) -> None:
    encoded = [None if v is None else v.encode() for v in (source, target, kind)]
    _check(libc.mount(*encoded, ctypes.c_ulong(flags), None if data is None else data.encode()), f"mount {target}")


def _bind(source: str, root: str, flags: int) -> None:
    """Bind a file or a folder at the same path below `root`; links are copied."""
    target = root + source
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source) and os.path.dirname(source) == "/":
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _mount(source, target, None, BIND | REC)
    present = os.statvfs(target).f_flag  # a user namespace may not clear them
    kept = {
        os.ST_NOSUID: NOSUID,
        os.ST_NODEV: NODEV,
        os.ST_NOEXEC: NOEXEC,
        os.ST_NOATIME: NOATIME,
        os.ST_NODIRATIME: NODIRATIME,
        os.ST_RELATIME: RELATIME,
    }
    flags |= sum(flag for bit, flag in kept.items() if present & bit and not flags & flag)
    _mount(None, target, None, BIND | REMOUNT | flags)


def _build_root(root: str, settings: "dict[str, Any]") -> None:
    _mount(None, "/", None, REC | PRIVATE)
    _mount("tmpfs", root, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    for path in dict.fromkeys((*SYSTEM, *settings["readable"])):
        if os.path.lexists(path) and not any(path.startswith(f"{above}/") for above in SYSTEM):
            _bind(path, root, RDONLY | NOSUID | NODEV)
    for device in DEVICES:
        _bind(f"/dev/{device}", root, NOSUID | NOEXEC)
    for folder in ("/work", "/proc"):
        os.mkdir(root + folder)
    os.symlink("work/tmp", root + "/tmp")
    disk, processes = settings["disk_bytes"], settings["files"]
    _mount("tmpfs", root + "/work", "tmpfs", NOSUID | NODEV, f"size={disk},nr_inodes={processes},mode=777")


def _enter_root(root: str, as_root: bool) -> None:
    if not as_root:
        with contextlib.suppress(OSError), open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")  # in this user namespace and those below it
    with contextlib.suppress(OSError):  # where parts of /proc are hidden, as in some containers, there is none inside
        _mount("proc", root + "/proc", "proc", RDONLY | NOSUID | NODEV | NOEXEC)
    _mount(None, root, None, REMOUNT | BIND | RDONLY | NOSUID | NODEV)
    os.chdir(root)
    pivot = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
    _check(libc.syscall(pivot, b".", b"."), "pivot_root")
    _check(libc.umount2(b".", 2), "umount")
    os.chdir("/")


def _drop_privileges(as_root: bool) -> None:
    uid = 0
    if as_root:
        uid = FIRST_UID + random.SystemRandom().randrange(1 << 29)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
    for capability in range(64):
        libc.prctl(CAPBSET_DROP, capability, 0, 0, 0)
    if as_root:
        os.setresuid(uid, uid, uid)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    none = (ctypes.c_uint32 * 6)()
    capset = {"x86_64": 126, "aarch64": 91}[os.uname().machine]
    _check(libc.syscall(capset, ctypes.byref(header), ctypes.byref(none)), "capset")
    _check(libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    libc.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # after the change of user, which clears it


def main() -> None:
    """Arguments: settings as JSON, and the source of the guest program."""
    settings, guest = json.loads(sys.argv[1]), sys.argv[2]
    libc.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    as_root, uid, gid = os.geteuid() == 0 and settings["as_root"], os.geteuid(), os.getegid()
    _check(libc.unshare(NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET | (0 if as_root else NEWUSER)), "unshare")
    if not as_root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    root = settings["root"]
    _build_root(root, settings)
    child = os.fork()
    if child:
        os._exit(min(255, abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))))
    _enter_root(root, as_root)
    _drop_privileges(as_root)
    environment = {"PATH": settings["path"], "HOME": "/work", "TMPDIR": "/work/tmp", "LANG": "C.UTF-8"}
    os.execve(settings["python"], [settings["python"], "-ISc", guest, json.dumps(settings)], environment)


if __name__ == "__main__":
    main()
