"""``kvflash keys``: a file of keys that services read."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvflash.command import main
from kvflash.keys import append_line, entries


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "keys"
    monkeypatch.setenv("KVFLASH_KEYS_FILE", str(path))
    return path


def _add(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["keys", "add", *argv]) == 0
    captured = capsys.readouterr()
    assert f"added {argv[0]} to " in captured.err and "its key, shown only once:" in captured.err
    return captured.out.strip()


def test_a_key_is_printed_once_and_kept_as_a_hash(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ann = _add(capsys, "ann", "--role", "admin")
    options = ["--rpm", "60", "--tenant", "blue", "--isolate", "--allow", "nvext|priority"]
    bob = _add(capsys, "bob", "--role", "client", *options)
    assert path.stat().st_mode & 0o777 == 0o600
    assert ann != bob
    assert ann not in path.read_text()
    (_, first), (_, second) = entries(path.read_text())
    assert second.endswith(":client:tenant=blue,rpm=60,isolate=true,allow=nvext|priority")
    salts = []
    for line, key in ((first, ann), (second, bob)):
        kind, salt, digest = line.split(":")[1].split("$")
        assert kind == "sha256"
        assert hashlib.sha256(bytes.fromhex(salt) + key.encode()).hexdigest() == digest
        salts.append(salt)
    # One salt, one hash for each request.
    assert salts[0] == salts[1]

    assert main(["keys", "list"]) == 0
    listed = capsys.readouterr().out
    assert "bob  client  tenant=blue,rpm=60" in listed
    assert "sha256" not in listed


def test_a_missing_file_is_named_once(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = os.strerror(errno.ENOENT)
    assert main(["keys", "list"]) == 1
    told = f"--keys-file {path}: can't be read: {gone}; kvflash keys add makes it\n"
    assert capsys.readouterr().err == f"kvflash keys: error: {told}"
    assert main(["keys", "remove", "x"]) == 2
    told = f"--keys-file {path}: can't be changed: {gone}\n"
    assert capsys.readouterr().err == f"kvflash keys: error: {told}"


def test_a_removed_key_leaves_comments_and_others(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _add(capsys, "ann", "--role", "admin")
    path.write_text("# operators\n" + path.read_text())
    path.chmod(0o640)
    _add(capsys, "ann2", "--role", "metrics")
    assert main(["keys", "remove", "ann"]) == 0
    assert path.read_text().startswith("# operators\nann2:")
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(path.parent.iterdir()) == [path]
    assert main(["keys", "remove", "ann"]) == 1
    assert "has no key 'ann'; its keys are: ann2" in capsys.readouterr().err
    before = path.read_text()
    assert main(["keys", "add", "ann2", "--role", "admin"]) == 2
    assert f"{path} already has a key 'ann2'" in capsys.readouterr().err
    assert path.read_text() == before


def test_a_change_keeps_the_owner_and_a_symbolic_link(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _add(capsys, "ann", "--role", "admin")
    folder = path.parent / "elsewhere"
    folder.mkdir()
    target = path.rename(folder / "keys")
    path.symlink_to(target)
    owner = (
        (65534, 65534) if os.geteuid() == 0 else (os.geteuid(), [os.getegid(), *os.getgroups()][-1])
    )
    os.chown(target, *owner)
    _add(capsys, "bob", "--role", "client")
    assert main(["keys", "remove", "ann"]) == 0
    assert path.readlink() == target
    assert [name for name, _ in entries(target.read_text())] == ["bob"]
    status = target.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (*owner, 0o600)
    assert list(folder.iterdir()) == [target]


def test_a_change_that_would_take_the_file_away_from_its_owner_is_refused(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _add(capsys, "ann", "--role", "admin")
    before = path.read_text()

    def refuse(*_: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert main(["keys", "add", "bob", "--role", "client"]) == 2
    owner = f"{path.stat().st_uid}:{path.stat().st_gid}"
    assert f"can't keep its owner {owner}; run this as" in capsys.readouterr().err
    assert path.read_text() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_group_that_cannot_be_kept_matters_only_if_it_has_access(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _add(capsys, "ann", "--role", "admin")

    def refuse(*_: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    path.chmod(0o604)
    _add(capsys, "bob", "--role", "client")
    assert path.stat().st_mode & 0o777 == 0o604
    path.chmod(0o640)
    before = path.read_text()
    assert main(["keys", "add", "eve", "--role", "client"]) == 2
    group = path.stat().st_gid
    assert f"can't keep its group {group}; run this as a member" in capsys.readouterr().err
    assert path.read_text() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_file_of_something_else_is_not_listed(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text("port = 8000\n")
    assert main(["keys", "list"]) == 2
    captured = capsys.readouterr()
    assert "line 1: must be id:HASH:ROLE" in captured.err and not captured.out


@pytest.mark.parametrize(
    ("argv", "blamed", "told"),
    [
        (["a b", "--role", "admin"], "ID", "id must be 1 to 64 letters"),
        (["#ann", "--role", "admin"], "ID", "id must be 1 to 64 letters"),
        (
            ["ann", "--role", "client", "--allow", "all"],
            "--allow",
            "option allow takes kv_transfer",
        ),
        (["ann", "--role", "admin", "--rpm", "5"], "--rpm", "option rpm is only for clients"),
        (["a:b", "--role", "client"], "ID", "an id must be without a colon, got 'a:b'"),
        (
            ["ann", "--role", "client", "--rpm", "5", "--tenant", "a b", "--certificate"],
            "--tenant",
            "option tenant must be 1 to 64 letters",
        ),
    ],
)
def test_what_a_service_would_refuse_is_not_written(
    path: Path, argv: list[str], blamed: str, told: str, *, capsys: pytest.CaptureFixture[str]
) -> None:
    _add(capsys, "bob", "--role", "client")
    before = path.read_text()
    assert main(["keys", "add", *argv]) == 2
    said = capsys.readouterr().err
    begun = f"kvflash keys: error: {blamed} is not valid, and {path} is unchanged: "
    assert said.startswith(begun + told)
    assert path.read_text() == before


def test_a_file_that_is_wrong_already_is_blamed(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text("# keys\nport = 8000\n")
    assert main(["keys", "add", "ann", "--role", "admin"]) == 2
    told = f"error: --keys-file {path}: line 2: must be id:HASH:ROLE"
    assert told in capsys.readouterr().err
    assert main(["keys", "list"]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [["add", "bob", "--role", "client"], ["remove", "ann"], ["list"]],
    ids=lambda one: one[0],
)
def test_a_file_that_services_refuse_is_not_changed(
    path: Path, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _add(capsys, "ann", "--role", "admin")
    path.chmod(0o666)
    before = path.read_text()
    assert main(["keys", *argv]) == 2
    told = f"error: --keys-file {path}: every user may write to it (mode 666), so services refuse"
    assert told in capsys.readouterr().err
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["add", "ann"], "add needs --role"),
        (["add"], "need the id of a key"),
        (["list", "ann"], "need the id of a key"),
        (["remove", "ann", "--rpm", "5"], "--rpm works only with add"),
        (["make", "ann"], "the action must be one of add, list, remove"),
    ],
)
def test_bad_usage(
    path: Path, argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["keys", *argv])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
    assert not path.exists()


def test_writers_at_once_lose_nothing(path: Path) -> None:
    ids = [f"k{at}" for at in range(24)]

    def line(key_id: str) -> str:
        return f"{key_id}:sha256${'00' * 16}${hashlib.sha256(key_id.encode()).hexdigest()}:metrics"

    def write(key_id: str) -> None:
        append_line(path, lambda _text: line(key_id))

    threads = [threading.Thread(target=write, args=(one,)) for one in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one for one, _ in entries(path.read_text())) == sorted(ids)


@pytest.mark.parametrize("where", [">/dev/full", ">&-", "2>/dev/full"])
def test_a_key_that_could_not_be_shown_is_removed_again(
    path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    _add(capsys, "bob", "--role", "client")
    before = path.read_text()
    command = f'exec "$0" -m kvflash keys add ann --role client {where}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable],
        check=False, capture_output=True, text=True,
        env=os.environ | {"KVFLASH_KEYS_FILE": str(path)},
    )  # fmt: skip
    assert done.returncode == 1
    if where != "2>/dev/full":
        assert "removed ann again: its key could not be shown" in done.stderr
    assert path.read_text() == before
