"""Which hosts are this machine and no other. Looks at names only, asks no resolver."""

import ipaddress


def is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost"
    # An IPv6 socket names an IPv4 address in its mapped form.
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
