"""Run the steps of the Dockerfile in a Debian tree, and check the result as a container would run it.

    sudo python tools/check_container.py [--target cpu] [--base TREE] [--bind PATH]… [--build-arg NAME=VALUE]…

No container runtime is needed: `debootstrap` makes the tree of `FROM debian:…`, RUN steps run in a chroot, and COPY
follows .dockerignore. Then the image's user, in namespaces of its own (mounts, processes, a network without
interfaces), with a read-only root, a `Cache` and a `/tmp`:

1. can write to `Cache` and the folders for temporary files only,
2. plans and makes a video with the shipped model,
3. is refused a server without a password or a key,
4. serves the API: HEALTHCHECK, a key, a video, and an end by SIGTERM with exit code 0,
5. serves the web app with a password.

Needs Linux, root, `debootstrap` and util-linux; a few minutes and 6 GB below --work for the CPU target.
"""

import argparse
import contextlib
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE, IGNORED = ROOT / "Dockerfile", ROOT / ".dockerignore"
SUITES = {"12": "bookworm"}
MIRROR = "http://deb.debian.org/debian"
# Every Debian has these for all users.
TEMPORARY = {"/tmp", "/var/tmp", "/run/lock"}
_START_SECONDS, _VIDEO_SECONDS, _STOP_SECONDS = 120, 300, 30

# Makes a video through the API and prints its first bytes; run inside.
_CLIENT = """
import json, sys, time, urllib.error, urllib.request
def ask(path, body=None, key=sys.argv[1]):
    headers = {"Content-Type": "application/json"} | ({"Authorization": "Bearer " + key} if key else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request("http://127.0.0.1:7860" + path, data, headers)
    return urllib.request.urlopen(request, timeout=60).read()
try:
    ask("/v1/videos", key="")
    sys.exit("a request without a key was answered")
except urllib.error.HTTPError as error:
    assert error.code == 401, error.code
made = json.loads(ask("/v1/videos", {"prompt": "a red boat at sunset", "steps": 4, "seed": 1}))
while made["status"] in ("queued", "in_progress"):
    time.sleep(0.5)
    made = json.loads(ask("/v1/videos/" + made["id"]))
assert made["status"] == "completed", made
content = ask("/v1/videos/" + made["id"] + "/content")
assert content[4:8] == b"ftyp", content[:20]
print(len(content))
"""
# Checks that the page asks for a password; run inside.
_PAGE = """
import urllib.error, urllib.request
address = "http://127.0.0.1:7860/"
page = urllib.request.urlopen(address, timeout=60).read()
assert b"</html>" in page, page[:200]
try:
    urllib.request.urlopen(address + "v1/videos", timeout=60)
    raise SystemExit("a request without a password or key was answered")
except urllib.error.HTTPError as error:
    assert error.code == 401, error.code
"""


class CheckError(Exception):
    """A step of the Dockerfile, or a check, has failed."""


@dataclass
class Stage:
    """One stage of a Dockerfile: its base, and its instructions as pairs of a keyword and the rest."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def stages(text: str) -> dict[str, Stage]:
    """Return the stages of a Dockerfile by name.

    Raises:
        CheckError: for an instruction before FROM, or a stage without a name.
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    found: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if not line.strip():
            continue
        keyword, _, rest = line.strip().partition(" ")
        if keyword == "FROM":
            named = re.fullmatch(r"(\S+) AS (\S+)", rest)
            if named is None:
                raise CheckError(f"FROM without a name: {rest}")
            stage = found[named[2]] = Stage(named[2], named[1])
        elif stage is None:
            raise CheckError(f"{keyword} before FROM")
        else:
            stage.steps.append((keyword, rest.strip()))
    return found


def chain(found: Mapping[str, Stage], target: str) -> list[Stage]:
    """Return the stages that a target consists of, the first one first."""
    return [*(chain(found, found[target].base) if found[target].base in found else []), found[target]]


def copies(stage: Stage) -> Iterator[tuple[str | None, list[str], str]]:
    """Yield for each COPY of a stage: the stage that it copies from, the sources, and the destination."""
    for keyword, rest in stage.steps:
        if keyword == "COPY":
            yield copy_of(rest)


def copy_of(rest: str) -> tuple[str | None, list[str], str]:
    """Return the stage that a COPY copies from, `None` for the context; its sources; and its destination."""
    words = rest.split()
    origin = words.pop(0).removeprefix("--from=") if words[0].startswith("--from=") else None
    return origin, words[:-1], words[-1]


def variables(rest: str) -> dict[str, str]:
    """Return the variables that an ENV sets."""
    return dict(word.split("=", 1) for word in shlex.split(rest))


def is_ignored(path: str, patterns: Sequence[str]) -> bool:
    """Return whether .dockerignore leaves a path of the context out; the last pattern that matches decides."""
    ignored = False
    parents = [path, *(str(parent) for parent in Path(path).parents if str(parent) != ".")]
    for pattern in patterns:
        negated, plain = pattern.startswith("!"), pattern.lstrip("!").strip("/")
        anywhere = plain.removeprefix("**/")
        if any(
            (fnmatch.fnmatchcase(one, plain) and one.count("/") == plain.count("/"))
            or (anywhere != plain and fnmatch.fnmatchcase(one.rpartition("/")[2], anywhere))
            for one in parents
        ):
            ignored = not negated
    return ignored


def ignore_patterns(text: str) -> list[str]:
    """Return the patterns of a .dockerignore."""
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


@dataclass
class Image:
    """A tree and how it is run.

    Attributes:
        environment: of ENV.
        binds: paths of this machine that RUN steps see.
    """

    tree: Path
    binds: Sequence[Path] = ()
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "root"
    entry: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    volume: str | None = None

    def inside(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        cache: Path | None = None,
        network: bool = False,
    ) -> list[str]:
        """Return a command that runs another one in the tree, in new namespaces.

        Args:
            cache: mounted as the volume, with a read-only root.
            network: whether it has the network of this machine.
        """
        tree, quoted = self.tree, shlex.quote(str(self.tree))
        mounts = [f"mount --bind {quoted} {quoted}", f"cd {quoted}"]
        if network:
            for path in (Path("/etc/resolv.conf"), *self.binds):
                mounts.append(f"mount --bind -o ro {shlex.quote(str(path))} {_mount_point(tree, path)}")
        if cache is not None:
            assert self.volume is not None
            mounts += [
                f"mount -o remount,bind,ro {quoted}",
                f"mount --bind {shlex.quote(str(cache))} .{self.volume}",
                "mount -t tmpfs -o mode=1777 tmpfs ./tmp",
            ]
        mounts += ["mount --rbind /dev ./dev", "mount -t proc proc ./proc"]
        (tree / "etc" / "hosts").write_text("127.0.0.1 localhost\n", encoding="ascii")  # as container runtimes do
        if not network:
            mounts.append("ip link set lo up")
        mounts.append('exec chroot --userspec="$1" . /usr/bin/env -i -C "$2" "${@:3}"')
        values = [f"{name}={value}" for name, value in environment.items()]
        unshare = ["unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child"]
        return [
            *unshare,
            *([] if network else ["--net"]),
            *("bash", "-ec", "\n".join(mounts), "bash", self._ids(), self.folder, *values, *command),
        ]

    def _ids(self) -> str:
        if self.user == "root":
            return "0:0"
        accounts = (self.tree / "etc" / "passwd").read_text(encoding="utf-8")
        fields = next(line.split(":") for line in accounts.splitlines() if line.startswith(f"{self.user}:"))
        return f"{fields[2]}:{fields[3]}"


def _mount_point(tree: Path, path: Path) -> str:
    """Make a mount point for a path of this machine; return it relative to the tree."""
    inside = tree / path.relative_to("/")
    inside.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        inside.mkdir(exist_ok=True)
    else:
        inside.touch()
    return shlex.quote(f".{path}")


class Builder:
    """Makes the trees of stages below a folder, each once."""

    def __init__(
        self, work: Path, base: Path | None, binds: Sequence[Path], arguments: Mapping[str, str], keep: bool
    ) -> None:
        self._work = work
        self._keep = keep
        self._base = base
        self._binds = binds
        self._arguments = arguments
        self._stages = stages(DOCKERFILE.read_text(encoding="utf-8"))
        self._ignored = ignore_patterns(IGNORED.read_text(encoding="utf-8"))
        self._built: dict[str, Image] = {}

    def build(self, name: str) -> Image:
        """Return the image of a stage."""
        if name in self._built:
            return self._built[name]
        stage = self._stages[name]
        tree = self._work / name
        kept = self._keep and tree.exists()
        if stage.base in self._stages:
            before = self.build(stage.base)
            if not kept:
                run("cp", "--archive", "--reflink=auto", str(before.tree), str(tree))
            image = Image(tree, self._binds, dict(before.environment), before.folder, before.user)
            image.entry, image.command = before.entry, before.command
            image.health, image.volume = before.health, before.volume
        else:
            if not kept:
                self._debootstrap(stage.base, tree)
            image = Image(tree, self._binds, {"PATH": os.defpath + ":/usr/sbin:/sbin"})
        arguments: dict[str, str] = {}
        for keyword, rest in stage.steps:
            if kept and keyword in {"COPY", "RUN"}:
                continue
            say(f"{name}: {keyword} {rest[:100]}")
            self._step(image, keyword, rest, arguments)
        self._built[name] = image
        return image

    def _debootstrap(self, base: str, tree: Path) -> None:
        found = re.fullmatch(r"debian:(\d+)\.\d+-slim", base)
        if found is None or found[1] not in SUITES:
            raise CheckError(f"FROM {base}: only Debian {' and '.join(SUITES)} is known")
        if self._base is not None:
            run("cp", "--archive", "--reflink=auto", str(self._base), str(tree))
        else:
            say(f"debootstrap {SUITES[found[1]]}")
            run("debootstrap", "--variant=minbase", SUITES[found[1]], str(tree), MIRROR)

    def _step(self, image: Image, keyword: str, rest: str, arguments: dict[str, str]) -> None:
        match keyword:
            case "ENV":
                image.environment |= variables(rest)
            case "ARG":
                name, _, default = rest.partition("=")
                arguments[name] = self._arguments.get(name, default)
            case "WORKDIR":
                image.folder = rest
                (image.tree / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER":
                image.user = rest
            case "VOLUME":
                image.volume = rest
            case "ENTRYPOINT":
                image.entry = json.loads(rest)
            case "CMD":
                image.command = json.loads(rest)
            case "HEALTHCHECK":
                image.health = json.loads(rest.partition("CMD ")[2])
            case "EXPOSE":
                pass
            case "COPY":
                self._copy(image, rest)
            case "RUN":
                # pip's and apt's settings of this machine, which a build would have as arguments.
                given = {name: value for name, value in self._arguments.items() if name not in arguments}
                run(*image.inside(["/bin/sh", "-c", rest], given | image.environment | arguments, network=True))
            case _:
                raise CheckError(f"{keyword} is not known")

    def _copy(self, image: Image, rest: str) -> None:
        origin, sources, destination = copy_of(rest)
        into = image.tree / Path(image.folder, destination).relative_to("/")
        for source in sources:
            if origin is not None:
                run("cp", "--archive", "--reflink=auto", str(self.build(origin).tree / source.lstrip("/")), str(into))
                continue
            found = ROOT / source
            if is_ignored(source, self._ignored) or not found.exists():
                raise CheckError(f"COPY {source}: it does not exist, or .dockerignore leaves it out")
            files = [path for path in found.rglob("*") if path.is_file()] if found.is_dir() else [found]
            for path in files:
                if is_ignored(path.relative_to(ROOT).as_posix(), self._ignored):
                    continue
                copy = into / path.relative_to(found if found.is_dir() else ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, copy)
                os.chown(copy, 0, 0)


def run(*command: str) -> None:
    """Run a command.

    Raises:
        CheckError: if it fails.
    """
    if subprocess.run(command, check=False, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode != 0:
        raise CheckError(f"failed: {shlex.join(command)[-300:]}")


def say(text: str) -> None:
    """Print a line for people."""
    sys.stderr.write(f"== {text}\n")
    sys.stderr.flush()


class Container:
    """Runs commands of an image as its user, with a read-only root and one cache folder."""

    def __init__(self, image: Image, cache: Path) -> None:
        self._image = image
        self._cache = cache

    def output(self, *words: str, entry: bool = True, code: int = 0, **environment: str) -> str:
        """Run the image with a command; return its standard output and, if it is to fail, standard error.

        Raises:
            CheckError: if its exit code is another than `code`.
        """
        done = subprocess.run(
            self._command(words, environment, entry),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != code:
            raise CheckError(f"{words}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return done.stdout if code == 0 else done.stderr

    @contextlib.contextmanager
    def serving(self, *words: str, **environment: str) -> Iterator[int]:
        """Run a server within a `with` block, which is ended by SIGTERM; yields its process ID on this machine.

        Raises:
            CheckError: if HEALTHCHECK does not succeed, or if it does not end in time with exit code 0.
        """
        with subprocess.Popen(self._command(words, environment, True), stdin=subprocess.DEVNULL) as outer:
            try:
                end = time.monotonic() + _START_SECONDS
                children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
                while not (inner := children.read_text(encoding="ascii").split()):
                    time.sleep(0.05)
                pid = int(inner[0])
                while True:
                    with contextlib.suppress(CheckError):
                        self.execute(pid, self._image.health)
                        break
                    if outer.poll() is not None or time.monotonic() > end:
                        raise CheckError("HEALTHCHECK did not succeed")
                    time.sleep(0.5)
                yield pid
                began = time.monotonic()
                os.kill(pid, signal.SIGTERM)
                code = outer.wait(_STOP_SECONDS)
                say(f"ended by SIGTERM after {time.monotonic() - began:.1f} s with exit code {code}")
                if code != 0:
                    raise CheckError(f"exit code {code} after SIGTERM")
            except subprocess.TimeoutExpired as error:
                raise CheckError(f"still runs {_STOP_SECONDS} s after SIGTERM") from error
            finally:
                outer.kill()

    def execute(self, pid: int, command: Sequence[str]) -> str:
        """Run a command in the namespaces of a running server; return its output.

        Raises:
            CheckError: if it fails.
        """
        user, _, group = self._image._ids().partition(":")
        values = [f"{name}={value}" for name, value in self._image.environment.items()]
        enter = ["nsenter", f"--target={pid}", "--all", "--root", f"--setuid={user}", f"--setgid={group}"]
        done = subprocess.run(
            [*enter, "/usr/bin/env", "-i", *values, *command], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise CheckError(f"{command}: {done.stderr[-2000:]}")
        return done.stdout

    def _command(self, words: Sequence[str], environment: Mapping[str, str], entry: bool) -> list[str]:
        command = [*self._image.entry, *words] if entry else list(words)
        return self._image.inside(command, {**self._image.environment, **environment}, self._cache)


def check(image: Image, work: Path) -> None:
    """Check an image.

    Raises:
        CheckError: at the first check that fails.
    """
    if image.user == "root" or image.volume is None or not image.health or not image.entry:
        raise CheckError("USER, VOLUME, HEALTHCHECK and ENTRYPOINT are needed")
    cache = Path(tempfile.mkdtemp(prefix="volume-", dir=work)) / "Cache"
    # A new volume has the content and owner of the image's folder.
    run("cp", "--archive", str(image.tree / image.volume.lstrip("/")), str(cache))
    container = Container(image, cache)

    find = ["find", "/", "-xdev", "(", "-type", "d", "-o", "-type", "f", ")", "-writable"]
    unlocked = image.inside(find, image.environment, network=True)
    listed = subprocess.run(unlocked, capture_output=True, text=True, check=False).stdout.split()
    writable = {path for path in listed if not path.startswith(("/proc/", "/dev/"))}
    say(f"writable: {' '.join(sorted(writable))}")
    if writable - TEMPORARY != {image.volume}:
        raise CheckError(f"the image's user can write to {sorted(writable - TEMPORARY - {image.volume})}")

    plan = json.loads(container.output("plan", "a red boat at sunset", "--json").splitlines()[-1])
    backends = {name: part["backend"] for name, part in plan["plan"]["components"].items()}
    say(f"plan: {backends}")
    made = json.loads(container.output("generate", "a red boat at sunset", "--steps", "4", "--json").splitlines()[-1])
    video = cache / Path(made["video"]).relative_to(image.volume)
    say(f"generate: {video.stat().st_size} bytes, timings {made['timings']}")

    for words in (image.command, ["serve", "--host", "0.0.0.0"]):
        refused = container.output(*words, code=2)
        if refused.count("\n") != 2:
            raise CheckError(f"{words}: {refused}")
        say(f"refused without a password or key: {refused.splitlines()[0]}")
    key = json.loads(container.output("serve", "keys", "add", "check", "--json").splitlines()[-1])["key"]
    with container.serving("serve", "--host", "0.0.0.0") as pid:
        say("serve: HEALTHCHECK succeeded")
        size = container.execute(pid, ["timeout", str(_VIDEO_SECONDS), "python", "-c", _CLIENT, key])
        say(f"serve: a video of {size.strip()} bytes")
    with container.serving(*image.command, TANDEM_AUTH="me:secret") as pid:
        container.execute(pid, ["timeout", str(_START_SECONDS), "python", "-c", _PAGE])
        say("web app: asks for the password")


def main() -> int:
    """Build a target and check it; return the exit code."""
    parser = argparse.ArgumentParser(description="Run the steps of the Dockerfile in a chroot and check the result.")
    parser.add_argument("--target", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--work", type=Path, help="folder for trees (default: a temporary one, deleted at the end)")
    parser.add_argument("--keep", action="store_true", help="use the stages that --work has from an earlier run")
    parser.add_argument("--base", type=Path, help="a tree that debootstrap has made, to copy instead")
    parser.add_argument("--bind", type=Path, action="append", default=[], help="path that RUN steps see, read-only")
    parser.add_argument("--build-arg", action="append", default=[], help="NAME=VALUE, such as PIP_INDEX_URL=…")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.stderr.write("This needs root, for chroot and mounts.\nRun it with sudo, or in a virtual machine.\n")
        return 2
    with contextlib.ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-container-")))
        work.mkdir(parents=True, exist_ok=True)
        arguments = dict(one.split("=", 1) for one in options.build_arg)
        try:
            began = time.monotonic()
            image = Builder(work, options.base, options.bind, arguments, options.keep).build(options.target)
            run("du", "--summarize", "--human-readable", str(image.tree))
            say(f"built after {time.monotonic() - began:.0f} s")
            check(image, work)
        except CheckError as error:
            sys.stderr.write(f"{error}\n")
            return 1
    say("all checks passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
