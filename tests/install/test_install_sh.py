"""install.sh from end to end, with real virtual environments and a real pip, on tiny packages from a folder."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.install.conftest import Repo, path_of, report

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="install.bat is Windows' own")


def fake_python(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/usr/bin/env bash\n{script}\n", "utf-8")
    (folder / name).chmod(0o755)


@pytest.mark.slow
def test_sets_up_from_nothing_and_starts_the_app(
    installed: tuple[Repo, "subprocess.CompletedProcess[str]"],
) -> None:
    repo, first = installed
    printed = report(first)  # standard output is the program's alone, or this would be no JSON
    assert printed["arguments"] == [b"first".hex()]
    assert printed["prefix"] == str(repo.root / ".venv")
    assert printed["cwd"] == str(repo.root.parents[1]), "the program runs where the user is"
    assert "Tandem setup: installing PyTorch 2.13.0+cpu" in first.stderr
    assert json.loads(repo.stamp.read_text("utf-8"))["torch"] == "2.13.0+cpu"
    assert not (repo.root / ".venv/tmp").exists()


@pytest.mark.slow
def test_arguments_are_passed_unchanged(shared: Repo) -> None:
    arguments = [
        b"generate", b"a red boat", b"", b" ", b'"', b"'", b"it's \"so\"", b"*", b"[a-z]?", b"$HOME", b"`ls`", b"$(ls)",
        b"back\\slash", b"two\nlines", b"tab\t", b"!x", b"a&b|c;d", b"--flag=a b", b"--", b"-I", b"\xff",
        "ünï 红船".encode(),
    ]  # fmt: skip
    assert report(shared.run(*arguments))["arguments"] == [argument.hex() for argument in arguments]
    assert report(shared.run())["arguments"] == []


@pytest.mark.slow
def test_the_exit_code_is_that_of_the_program(shared: Repo) -> None:
    assert [shared.run("exit", str(code)).returncode for code in (0, 1, 130)] == [0, 1, 130]


@pytest.mark.slow
def test_standard_input_reaches_the_program_also_while_setting_up(repo: Repo) -> None:
    repo.stamp.unlink()
    assert repo.run("read", stdin="a prompt").stdout == "a prompt\n"


@pytest.mark.slow
def test_ctrl_c_reaches_the_program(shared: Repo) -> None:
    process = shared.start("wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)  # the program has taken install.sh's place
    assert process.communicate(timeout=10)[0] == "the program was interrupted\n"
    assert process.returncode == 130


@pytest.mark.slow
def test_second_run_calls_no_pip(repo: Repo) -> None:
    shutil.rmtree(repo.site_packages() / "pip")
    done = repo.run("again")
    report(done)
    assert done.stderr == ""


@pytest.mark.slow
def test_changed_requirements_are_installed(repo: Repo) -> None:
    repo.require("tinydep==2.0")
    done = repo.run(PYTHONDONTWRITEBYTECODE="1")
    assert report(done)["tinydep"] == 2
    assert list((repo.site_packages() / "tinydep" / "__pycache__").iterdir()), "packages are compiled"
    assert "PyTorch 2.13.0+cpu is already there" in done.stderr


@pytest.mark.slow
def test_test_installs_the_test_tools_and_runs_pytest_in_the_repository(repo: Repo, tmp_path: Path) -> None:
    done = repo.run("test", "--all", "-k", "a b", cwd=tmp_path)
    parallel = ["--numprocesses=3", "--dist=worksteal"]
    assert report(done) == {
        "pytest": [*parallel, "--all", "-k", "a b"],
        "cwd": str(repo.root),
        "writes_bytecode": True,
    }
    repo.require("tinydep==2.0")
    assert "requirements-dev.txt" in repo.run().stderr, "installed test tools are kept up to date"


@pytest.mark.slow
def test_tandem_is_compiled_where_python_may_not_write_bytecode(repo: Repo) -> None:
    package = repo.root / "runtime"
    package.mkdir()
    (package / "part.py").write_text("VALUE = 1\n")
    report(repo.run())
    assert not (package / "__pycache__").exists()
    report(repo.run(PYTHONDONTWRITEBYTECODE="1"))
    (compiled,) = (package / "__pycache__").iterdir()
    before = compiled.read_bytes()
    (package / "part.py").write_text("VALUE = 2\n")
    os.utime(package / "part.py", (2e9, 2e9))
    report(repo.run(PYTHONDONTWRITEBYTECODE="1"))
    after = compiled.read_bytes()
    assert after != before
    compiled.unlink()  # nothing has changed: it is not made again
    report(repo.run(PYTHONDONTWRITEBYTECODE="1"))
    assert not compiled.exists()
    assert report(repo.run("test", PYTHONDONTWRITEBYTECODE="1"))["writes_bytecode"]


def test_variables_of_other_pythons_do_not_reach_the_program(shared: Repo, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the module of another Python')")
    home, wrong = str(tmp_path / "none"), "x"
    done = shared.run("a", PYTHONPATH=str(tmp_path), PYTHONHOME=home, PYTHONHASHSEED=wrong, PYTHONUTF8=wrong)
    assert report(done)["arguments"] == [b"a".hex()]
    assert done.stderr == ""


def test_works_through_a_link(shared: Repo, tmp_path: Path) -> None:
    link = tmp_path / "tandem"
    link.symlink_to(os.path.relpath(shared.command, tmp_path))
    done = subprocess.run([link, "x"], capture_output=True, text=True, env=shared.environment, check=False)
    assert report(done)["prefix"] == str(shared.root / ".venv")


def test_it_can_be_run_with_sh(shared: Repo) -> None:
    done = subprocess.run(
        ["/bin/sh", shared.command, "a b"], capture_output=True, text=True, env=shared.environment, check=False
    )
    assert report(done)["arguments"] == [b"a b".hex()]


@pytest.mark.slow
def test_the_program_knows_how_it_was_started(shared: Repo) -> None:
    def program(command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", f"{command} x"],
            cwd=shared.root,
            capture_output=True,
            text=True,
            env=shared.environment,
            check=False,
        )
        return str(report(done)["program"])

    assert program("./install.sh") == "./install.sh"
    assert program("bash install.sh") == "bash install.sh"
    outside = program(f"cd / && {shlex.quote(str(shared.command))}")
    assert shlex.split(outside) == [str(shared.command)]


# Failures.


@pytest.mark.slow
def test_interrupted_install_is_repaired(repo: Repo) -> None:
    repo.stamp.unlink()
    (repo.site_packages() / "tinydep/part.py").unlink()  # pip was stopped before the last file...
    (repo.site_packages() / "tinydep-1.0.dist-info/RECORD").unlink()  # ...and before the list of them
    (repo.site_packages() / "~orch").mkdir()
    done = repo.run()
    assert report(done)["tinydep"] == 1
    assert "tinydep-1.0 is incomplete; installing it again" in done.stderr
    assert not (repo.site_packages() / "~orch").exists()


@pytest.mark.slow
def test_package_with_missing_files_is_repaired(repo: Repo) -> None:
    repo.stamp.unlink()
    (repo.site_packages() / "tinydep/part.py").unlink()
    assert report(repo.run())["tinydep"] == 1


@pytest.mark.slow
def test_a_killed_install_leaves_no_stamp_and_resumes(repo: Repo) -> None:
    repo.require("tinydep==2.0")
    process = repo.start()
    assert process.stderr is not None
    while "installing the packages" not in process.stderr.readline():
        assert process.poll() is None
    process.kill()
    process.communicate()
    assert not repo.stamp.exists()
    assert report(repo.run())["tinydep"] == 2  # waits for the pip left behind, which holds the lock


@pytest.mark.slow
def test_ctrl_c_while_installing_is_reported_and_the_next_run_resumes(repo: Repo) -> None:
    repo.require("tinydep==2.0")
    process = repo.start()
    assert process.stderr is not None
    while "installing the packages" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[1] == "Tandem setup: stopped; run the same command to continue\n"
    assert process.returncode == 130
    assert report(repo.run())["tinydep"] == 2


@pytest.mark.slow
def test_two_concurrent_runs_install_once(repo: Repo) -> None:
    repo.require("tinydep==2.0")
    both = [repo.start(), repo.start()]
    outputs = [process.communicate(timeout=240) for process in both]
    assert [json.loads(output)["tinydep"] for output, _ in outputs] == [2, 2]
    assert sum("ready after" in errors for _, errors in outputs) == 1


@pytest.mark.slow
def test_python_that_no_longer_runs_is_replaced(repo: Repo, tmp_path: Path) -> None:
    repo.python.unlink()
    repo.python.symlink_to("/no/such/python")
    shims = tmp_path / "shims"
    shims.mkdir()
    fake_python(shims, "python3.11", "exit 127")  # on PATH, but runs no more than the other: the next is taken
    done = repo.run(PATH=f"{shims}:{repo.environment['PATH']}")
    assert report(done)["tinydep"] == 1
    assert "making .venv again: its Python does not run" in done.stderr


@pytest.mark.slow
def test_half_made_environment_is_replaced(repo: Repo) -> None:
    repo.stamp.unlink()
    shutil.rmtree(repo.site_packages() / "pip")
    done = repo.run()
    assert report(done)["tinydep"] == 1
    assert "making .venv again: its pip does not run" in done.stderr


@pytest.mark.slow
def test_an_unreadable_stamp_is_ignored(repo: Repo) -> None:
    repo.stamp.write_text('{"files": {"requ', "utf-8")
    assert "ready after" in repo.run().stderr


@pytest.mark.slow
def test_a_stale_lock_file_does_not_block(repo: Repo) -> None:
    (repo.root / ".install.lock").write_text("99999\n", "utf-8")
    repo.stamp.unlink()
    done = repo.run()
    report(done)
    assert "another set-up" not in done.stderr


@pytest.mark.slow
def test_waits_for_another_set_up_and_uses_its_result(repo: Repo) -> None:
    import fcntl  # not on Windows

    stamp = repo.stamp.read_text("utf-8")
    repo.stamp.unlink()
    with (repo.root / ".install.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = repo.start()
        assert process.stderr is not None
        assert "another set-up is running" in process.stderr.readline()
        repo.stamp.write_text(stamp, "utf-8")
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert json.loads(output)["tinydep"] == 1
    assert errors == "", "the other one did the work"


@pytest.mark.slow
def test_pip_that_fails_gives_two_lines_and_exit_code_2(repo: Repo) -> None:
    repo.require("tinydep==3.0")
    done = repo.run()
    assert done.returncode == 2
    assert done.stdout == ""
    what, remedy = done.stderr.splitlines()[-2:]
    assert what.startswith("Tandem setup: could not install the packages: ")
    assert "tinydep==3.0" in what
    assert remedy == f"Tandem setup: run the same command again; if it fails again, read {repo.log}"
    assert "tinydep==3.0" in repo.log.read_text("utf-8")
    repo.require("tinydep==1.0")
    report(repo.run())


@pytest.mark.slow
def test_a_missing_network_is_reported(repo: Repo) -> None:
    repo.require("tinydep==3.0")
    del repo.environment["PIP_NO_INDEX"]
    done = repo.run(PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_RETRIES="1")
    assert done.returncode == 2
    what, remedy = done.stderr.splitlines()[-2:]
    assert what == "Tandem setup: could not install the packages: pip cannot reach the package index"
    assert "check the network" in remedy
    assert str(repo.log) in remedy


@pytest.mark.slow
def test_gpu_package_that_fails_is_a_warning(repo: Repo, tmp_path: Path) -> None:
    smi = tmp_path / "smi" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/usr/bin/env bash\necho 'GPU 0: Test (UUID: GPU-1)'\n", "utf-8")
    smi.chmod(0o755)
    path = f"{smi.parent}:{repo.environment['PATH']}"
    done = repo.run(PATH=path)
    report(done)
    assert "continuing without one of the packages in requirements-gpu.txt: could not install a-package" in done.stderr
    assert repo.run(PATH=path).stderr == ""


# The choice of Python.


def test_no_python_names_what_was_found(repo: Repo, tmp_path: Path) -> None:
    shutil.rmtree(repo.root / ".venv")
    path = path_of(tmp_path / "bin", ["bash", "env", "dirname", "readlink"])
    fake_python(Path(path), "python3", "echo 3.9.18")
    fake_python(Path(path), "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    done = repo.run(PATH=path)
    assert (done.returncode, done.stdout) == (2, "")
    what, remedy = done.stderr.splitlines()
    assert what.endswith(f"found: {path}/python3 (3.9.18)")
    assert "install Python 3.11" in remedy


def test_python_without_venv_names_the_package(repo: Repo, tmp_path: Path) -> None:
    shutil.rmtree(repo.root / ".venv")
    path = path_of(tmp_path / "bin", ["bash", "env", "dirname", "readlink"])
    fake_python(Path(path), "python3.11", "echo 3.11.2 without its venv module")
    done = repo.run(PATH=path)
    assert done.returncode == 2
    assert "python3-venv" in done.stderr.splitlines()[1]


def test_tandem_python_is_checked_and_used(shared: Repo) -> None:
    done = shared.run(TANDEM_PYTHON="/no/such/python")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].endswith(": /no/such/python")
    done = shared.run(TANDEM_PYTHON=sys.executable)
    report(done)
    assert done.stderr == "", "the same version: .venv stays"
