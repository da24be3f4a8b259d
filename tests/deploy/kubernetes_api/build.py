"""Kubernetes' servers, built from Debian's source package: no package that carries their binaries is to be had.

    python -m tests.deploy.kubernetes_api.build FOLDER       about ten minutes on two cores, once; FOLDER/bin keeps them

Debian 12 ships kubectl alone, but its source package `kubernetes` holds all of 1.20.2 with the modules that it needs,
and Debian's Go builds it. Invariant: fetches that one package from the mirror that apt already uses and nothing else,
leaves apt's sources and lists as they are, and an interrupted build leaves no program that looks complete.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
NEEDED = {"go": "golang-go", "etcd": "etcd-server"}
VERSION = "1.20.2"
FETCH_S, COMPILE_S = 600.0, 3600.0
# Whose types the server describes to kubectl: the staging modules, without those for examples and code generators.
DESCRIBED = (
    *("api", "apimachinery", "apiserver", "apiextensions-apiserver", "kube-aggregator", "metrics", "component-base"),
    *("kubelet", "kube-proxy", "kube-scheduler", "kube-controller-manager", "cloud-provider", "client-go"),
)
TAG = re.compile(r"^// ?\+k8s:openapi-gen=", re.MULTILINE)
NO_API = re.compile(r"/(testing|test|examples?|sample)")


def missing() -> list[str]:
    """Debian packages that have to be installed first."""
    return [package for program, package in NEEDED.items() if shutil.which(program) is None]


def built(folder: Path) -> bool:
    """Whether `folder` holds the programs."""
    return all((folder / "bin" / name).is_file() for name in PROGRAMS)


def build(folder: Path) -> None:
    """Fetch, compile, keep folder/bin. Raises RuntimeError with the end of what failed."""
    if built(folder):
        return
    work = folder / "build"
    source = work / "src/k8s.io/kubernetes"
    if not source.is_dir():
        _fetch(work, source)
    # GOPATH mode: module mode stops at go.mod, whose versions the package's vendor folder does not match.
    go = {"GOPATH": str(work), "GOCACHE": str(work / "cache"), "GO111MODULE": "off", "CGO_ENABLED": "0"}
    _describe_types(source, work, go)
    (folder / "bin").mkdir(exist_ok=True)
    for name in PROGRAMS:
        made = work / name
        flags = ("-tags", "providerless", "-ldflags", f"-s -w {_version()}")  # no cloud's libraries: half of the time
        _run(["go", "build", *flags, "-o", made, f"./cmd/{name}"], source, COMPILE_S, go)
        made.rename(folder / "bin" / name)
    shutil.rmtree(work)


def _fetch(work: Path, source: Path) -> None:
    """The unpacked source at `source`, by apt with a source list, lists and a cache of our own."""
    for part in ("apt/lists/partial", "apt/cache/archives/partial", "apt/unpacked"):
        (work / part).mkdir(parents=True, exist_ok=True)
    ask = ("indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Codename: bookworm", "Component: main")
    mirrors = sorted(set(_run(["apt-get", *ask], work, FETCH_S).split()))
    if not mirrors:
        raise RuntimeError("apt knows no mirror of Debian bookworm: run apt-get update on a Debian 12 machine")
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    sources = work / "apt/sources.list"
    sources.write_text(f"deb-src [signed-by={key}] {mirrors[0]} bookworm main\n", encoding="utf-8")
    settings = {
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": work / "apt/lists",
        "Dir::Cache": work / "apt/cache",
    }
    apt = ["apt-get", "-qq", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]
    _run([*apt, "update"], work / "apt", FETCH_S)
    _run([*apt, "source", "--download-only", "kubernetes"], work / "apt", FETCH_S)
    (archive,) = (work / "apt").glob(f"kubernetes_*{VERSION}.orig.tar.*")
    _run(["tar", "-xf", archive, "-C", work / "apt/unpacked", "--strip-components=1"], work, FETCH_S)
    source.parent.mkdir(parents=True, exist_ok=True)
    (work / "apt/unpacked").rename(source)
    shutil.rmtree(work / "apt")


def _describe_types(source: Path, work: Path, go: Mapping[str, str]) -> None:
    """Generate the description of all types, which the source package leaves out."""
    if (source / "pkg/generated/openapi/zz_generated.openapi.go").exists():
        return
    generator = work / "openapi-gen"
    _run(["go", "build", "-o", generator, "./vendor/k8s.io/kube-openapi/cmd/openapi-gen"], source, COMPILE_S, go)
    places = ("--output-package", "k8s.io/kubernetes/pkg/generated/openapi", "--output-file-base")
    header = ("--go-header-file", "hack/boilerplate/boilerplate.generatego.txt")
    report = ("--report-filename", str(work / "violations.txt"), "--logtostderr")
    packages = ",".join(sorted(set(_described(source))))
    command: list[str | Path] = [generator, "--input-dirs", packages, *places, "zz_generated.openapi", *header, *report]
    _run(command, source, COMPILE_S, go)


def _described(source: Path) -> Iterator[str]:
    """Go packages whose types carry the generator's tag."""
    staging = source / "staging/src/k8s.io"
    roots = [*((staging / name, staging, "k8s.io/kubernetes/vendor/k8s.io") for name in DESCRIBED)]
    for folder, above, prefix in (*roots, (source / "pkg", source, "k8s.io/kubernetes")):
        for file in folder.rglob("*.go"):
            package = f"{prefix}/{file.parent.relative_to(above)}"
            if TAG.search(file.read_text(encoding="utf-8")) and not NO_API.search(package):
                yield package


def _version() -> str:
    """Linker flags: what the programs say that they are."""
    major, minor, _ = VERSION.split(".")
    facts = {"gitVersion": f"v{VERSION}", "gitMajor": major, "gitMinor": minor}
    places = ("component-base/version", "client-go/pkg/version")
    return " ".join(
        f"-X k8s.io/kubernetes/vendor/k8s.io/{place}.{name}={value}"
        for place in places
        for name, value in facts.items()
    )


def _run(command: list[str | Path], cwd: Path, limit_s: float, environment: Mapping[str, str] | None = None) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)[:200]}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def main(where: str) -> int:
    """See the module."""
    if lacking := missing():
        sys.stderr.write(f"apt-get install --no-install-recommends {' '.join(lacking)}\n")
        return 2
    folder = Path(where).absolute()
    build(folder)
    sys.stdout.write(f"{folder}/bin\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
