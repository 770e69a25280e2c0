"""AllowedHosts: the Host headers that the server accepts."""

import pytest

from rollick.serve.access_control import AllowedHosts


@pytest.mark.parametrize(
    "header", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.0.0.2", "[::1]:8000"]
)
def test_names_and_addresses_of_the_loopback_are_allowed(header: str):
    assert AllowedHosts.of("127.0.0.1").allows(header)


@pytest.mark.parametrize(
    "header", ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1"]
)
def test_names_that_could_be_rebound_are_rejected_on_the_loopback(header: str):
    assert not AllowedHosts.of("127.0.0.1").allows(header)


def test_on_all_interfaces_any_address_is_allowed_but_names_must_be_listed():
    hosts = AllowedHosts.of("0.0.0.0", ["Box.example"])
    assert hosts.allows("10.0.0.1:8000")
    assert hosts.allows("box.example")
    assert not hosts.allows("evil.example")
