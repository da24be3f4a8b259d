"""A base image made from the packages that are installed on this Debian 12 machine, for tests without a registry.

Invariant: the archive holds files of the named packages and of what they depend on, nothing of a user's, and is never
pushed anywhere: it carries this machine's package versions and certificates.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

PACKAGES = (
    *("base-files", "base-passwd", "bash", "dash", "coreutils", "libc-bin", "grep", "sed", "findutils", "tar", "gzip"),
    *(
        "login",
        "passwd",
        "util-linux",
        "ca-certificates",
        "python3.11-minimal",
        "python3",
        "python3-venv",
        "libgomp1",
        "libnuma1",
    ),
    *("redis-server", "redis-tools"),
)
LEFT_OUT = {"debconf", "dpkg", "perl-base", "ucf", "init-system-helpers", "sysvinit-utils", "lsb-base", "tzdata"}
LEFT_OUT |= {"python3-lib2to3", "adduser"}
NOT_NEEDED = re.compile(r"/usr/share/(doc|man|locale|info|lintian|bash-completion)/")
USERS = b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
GROUPS = b"root:x:0:\nnogroup:x:65534:\n"


def write_base(out: IO[bytes], packages: Iterable[str] = PACKAGES) -> int:
    """Write the root file system as a tar to `out`; returns the number of packages. Raises LookupError."""
    names = _closure(packages)
    listing = _output("dpkg-query", "-L", *names).splitlines()
    paths = {_real(Path(line)) for line in listing if line.startswith("/") and _wanted(line)}
    paths |= {cache for path in paths for cache in _bytecode(path)} | {Path("/etc/ssl/certs/ca-certificates.crt")}
    archive = _Archive(out)
    for name in ("bin", "sbin", "lib", "lib64"):
        archive.link(f"/{name}", f"usr/{name}")
    for folder, mode in (("/tmp", 0o1777), ("/var/tmp", 0o1777), ("/proc", 0o755), ("/sys", 0o755), ("/dev", 0o755)):
        archive.folder(Path(folder), mode)
    for folder in ("/root", "/home"):
        archive.folder(Path(folder), 0o755)
    for path in sorted(paths):
        archive.copy(path)
    for target, name in (("python3", "python"), ("dash", "sh"), ("mawk", "awk")):
        archive.link(f"/usr/bin/{name}", target)
    archive.file("/etc/passwd", USERS)
    archive.file("/etc/group", GROUPS)
    archive.file("/etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files dns\n")
    archive.close()
    return len(names)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def _closure(packages: Iterable[str]) -> list[str]:
    """`packages` and what they need, from dpkg's Depends and Pre-Depends."""
    needs: dict[str, list[list[str]]] = {}
    installed = set()
    form = "${Package}\t${db:Status-Status}\t${Depends}, ${Pre-Depends}\t${Provides}\n"
    for line in _output("dpkg-query", "-W", "-f", form).splitlines():
        package, status, depends, provides = line.split("\t")
        if status != "installed":
            continue
        installed.add(package)
        needs[package] = [[_name(a) for a in part.split("|")] for part in depends.split(",") if part.strip()]
        for virtual in filter(str.strip, provides.split(",")):
            needs.setdefault(_name(virtual), [[package]])
    seen: set[str] = set()
    todo = list(packages)
    while todo:
        package = todo.pop()
        if package in seen or package in LEFT_OUT:
            continue
        if package not in needs:
            raise LookupError(f"{package} is not installed: apt-get install --no-install-recommends {package}")
        seen.add(package)
        found = (next((a for a in alternatives if a in needs), None) for alternatives in needs[package])
        todo += [package for package in found if package]
    return sorted(seen & installed)


def _name(dependency: str) -> str:
    return re.split(r"[ (:]", dependency.strip())[0]


def _wanted(line: str) -> bool:
    top = {"/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32", "/."}
    # Debian's marker EXTERNALLY-MANAGED makes plain pip fail where python:3.11-slim's works.
    return line not in top and not NOT_NEEDED.match(line) and not line.endswith("EXTERNALLY-MANAGED")


def _real(path: Path) -> Path:
    """Merged /usr: each file by its real folder."""
    return Path(os.path.realpath(path.parent)) / path.name if os.path.lexists(path) else path


def _bytecode(path: Path) -> list[Path]:
    """dpkg lists none; without it a read-only container compiles at every start."""
    if path.suffix != ".py":
        return []
    cache = path.parent / "__pycache__"
    return [p for p in (cache, cache / f"{path.stem}.cpython-311.pyc") if p.exists()]


class _Archive:
    def __init__(self, out: IO[bytes]) -> None:
        self._tar = tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT)  # noqa: SIM115 - closed by `close`
        self._done: set[Path] = set()

    def close(self) -> None:
        self._tar.close()

    def copy(self, path: Path) -> None:
        if path in self._done or not os.path.lexists(path):
            return
        self._parents(path)
        self._tar.add(path, arcname=str(path).lstrip("/"), recursive=False)
        self._done.add(path)

    def folder(self, path: Path, mode: int) -> None:
        self._put(path, tarfile.DIRTYPE, mode)

    def link(self, name: str, target: str) -> None:
        if Path(name) not in self._done:
            self._put(Path(name), tarfile.SYMTYPE, 0o777, target=target)

    def file(self, name: str, data: bytes) -> None:
        self._put(Path(name), tarfile.REGTYPE, 0o644, data=data)

    def _parents(self, path: Path) -> None:
        if path.parent not in self._done and path.parent != Path("/"):
            self._parents(path.parent)
            self._put(path.parent, tarfile.DIRTYPE, 0o755)

    def _put(self, path: Path, kind: bytes, mode: int, target: str = "", data: bytes = b"") -> None:
        self._parents(path)
        info = tarfile.TarInfo(str(path).lstrip("/"))
        info.type, info.mode, info.linkname, info.size = kind, mode, target, len(data)
        self._tar.addfile(info, io.BytesIO(data) if data else None)
        self._done.add(path)
