"""Which Host headers name the server."""

import pytest

from rollick.serve.guard import Hosts


@pytest.mark.parametrize(
    "header", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.0.0.2", "[::1]:8000"]
)
def test_the_loopback_has_many_names(header: str):
    assert Hosts.of("127.0.0.1").allow(header)


@pytest.mark.parametrize(
    "header", ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1"]
)
def test_names_that_could_be_rebound_are_refused_on_the_loopback(header: str):
    assert not Hosts.of("127.0.0.1").allow(header)


def test_on_all_interfaces_any_address_will_do_but_names_must_be_told():
    hosts = Hosts.of("0.0.0.0", ["Box.example"])
    assert hosts.allow("10.0.0.1:8000")
    assert hosts.allow("box.example")
    assert not hosts.allow("evil.example")
