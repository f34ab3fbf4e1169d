"""A worker that stands for a name: what it says of each address, and what is refused."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from kvflash.errors import ConfigError
from kvflash.frontend.app import main
from kvflash.frontend.args import parse_args
from kvflash.roster.dns_spec import DnsWorkers

FOUR, SIX = ip_address("10.0.0.7"), ip_address("fd00::7")


def test_every_address_is_a_worker_of_its_own():
    found = DnsWorkers.parse(
        "dns+http://vllm.default.svc:8000,events=tcp://*:5557,replay=tcp://*:5657,dp=2,role=prefill"
    )
    assert (found.label, found.name) == ("dns+http://vllm.default.svc:8000", "vllm.default.svc")
    assert found.records == ("A", "AAAA")
    assert found.spec(FOUR) == (
        "http://10.0.0.7:8000,events=tcp://10.0.0.7:5557,replay=tcp://10.0.0.7:5657,dp=2,"
        "role=prefill"
    )
    assert found.spec(SIX) == (
        "http://[fd00::7]:8000,events=tcp://[fd00::7]:5557,replay=tcp://[fd00::7]:5657,dp=2,"
        "role=prefill"
    )


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("dns+http://engines", "http://10.0.0.7"),
        ("dns+http://engines.:8000/", "http://10.0.0.7:8000"),
        ("dns+http://engines:8000/base/", "http://10.0.0.7:8000/base"),
        (
            " dns+http://engines:8000 , events = tcp://*:1 ",
            "http://10.0.0.7:8000,events=tcp://10.0.0.7:1",
        ),
    ],
)
def test_forms_of_the_url(text: str, spec: str):
    assert DnsWorkers.parse(text).spec(FOUR) == spec


def test_one_family_can_be_asked_for_alone():
    assert DnsWorkers.parse("dns+http://e:8000,ip=4").records == ("A",)
    found = DnsWorkers.parse("dns+http://e:8000,ip=6")
    assert found.records == ("AAAA",)
    assert found.spec(SIX) == "http://[fd00::7]:8000"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("dns+https://e:8000", "worker url must be dns+http://name:port, got 'dns+https://e:8000'"),
        ("dns+http://", "worker url must be dns+http://name:port, got 'dns+http://'"),
        ("dns+http://:8000", "worker url must be dns+http://name:port"),
        ("dns+http://me@e:8000", "worker url must be dns+http://name:port"),
        ("dns+http://e:x", "worker url must be http://host:port or https://host:port"),
        ("dns+http://{host}:1", "is not a URL"),
        ("dns+http://10.0.0.1:8000", "10.0.0.1:8000 is an address and needs no lookup"),
        ("dns+http://[fd00::1]:8000", "is an address and needs no lookup"),
        (f"dns+http://{'a' * 64}:8000", "is not a DNS name"),
        ("dns+http://e:8000,id=7", "id=7 names one worker, and e may stand for many"),
        ("dns+http://e:8000,ip=5", "ip must be 4 or 6, got '5'"),
        ("dns+http://e:8000,events=tcp://e:1", "events must be tcp://*:port"),
        ("dns+http://e:8000,events=ipc://e", "got 'ipc://e'"),
        ("dns+http://e:8000,events=tcp://*:0", "events must be tcp://host:port"),
        ("dns+http://e:8000,replay=tcp://*:1", "replay= but no events="),
        ("dns+http://e:8000,evnts=tcp://*:1", 'unknown key "evnts"'),
        ("dns+http://e:8000,dp=0", "dp must be a number in 1..=1024"),
        ("dns+http://e:8000,dp", '"dp" is not key=value'),
    ],
)
def test_refusals_name_the_field_and_what_came(text: str, wanted: str):
    with pytest.raises(ConfigError) as caught:
        DnsWorkers.parse(text)
    assert wanted in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--worker", "dns+http://e:8000,id=1"], "--worker 'dns+http://e:8000,id=1': id=1 names"),
        (
            ["--worker", "dns+http://e:8000", "--prefill-worker", "dns+http://e:8000/"],
            "--prefill-worker 'dns+http://e:8000/': dns+http://e:8000 is given twice",
        ),
        (
            ["--worker", "http://e:8000", "--worker-dns-server", "10.0.0.10"],
            "--worker-dns-server needs a --worker that begins with dns+: kvflash looks up only",
        ),
    ],
)
def test_the_process_ends_with_the_flag_at_fault(
    flags: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
):
    assert main(flags) == 2
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--worker-dns-interval-secs", "0"], "must be a number in 0.1..=3600, got '0'"),
        (["--worker-dns-server", "ns:53"], "must be ADDRESS or ADDRESS:PORT of a name server"),
        (["--worker-dns-server", "10.0.0.1:0"], "got '10.0.0.1:0'"),
    ],
)
def test_flags_that_can_not_be_meant(
    flags: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        parse_args(flags)
    assert ended.value.code == 2
    assert wanted in capsys.readouterr().err


def test_name_servers():
    def server(text: str) -> tuple[str, int] | None:
        flags = ["--decode-worker", "dns+http://e", "--worker-dns-server", text]
        return parse_args(flags).worker_dns_server

    assert server("10.0.0.10") == ("10.0.0.10", 53)
    assert server("10.0.0.10:8600") == ("10.0.0.10", 8600)
    assert server("[fd00::a]:5353") == ("fd00::a", 5353)
    assert server("fd00::a") == ("fd00::a", 53)
    assert parse_args([]).worker_dns_server is None
    assert parse_args([]).worker_dns_interval_secs == 5
