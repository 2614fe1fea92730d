"""A lab's network as input of `ip` and `tc`.

Host k has one interface, eth0, with address 10.77.0.k+1. Its other end is port vk in the network's namespace,
where a bridge or a relay joins all ports. Token buckets at both ends limit packets; netem makes delay, jitter
and loss at the port.
"""

from __future__ import annotations

from laconic.tools.lab.inside.keeper import FIRST
from laconic.tools.lab.link import Link

INTERFACE = "eth0"
MOST_HOSTS = 64
DISABLE_IPV6 = "/proc/sys/net/ipv6/conf/all/disable_ipv6"  # IPv6 traffic would be counted
QUEUE_MS = 400  # queue of a token bucket
BURST_S = 1e-3  # at full rate, so a late timer loses nothing
LEAST_BURST = 32_000
PACKETS = 100_000  # queue of netem


def address(host: int) -> str:
    """Return a host's address.

    >>> address(0)
    '10.77.0.1'
    """
    return f"10.77.0.{host + 1}"


def names(hosts: int) -> str:
    """Return /etc/hosts; torch warns without the second form."""
    lines = ["127.0.0.1 localhost"]
    for form in ("", "::ffff:"):
        lines += (f"{form}{address(host)} host{host}" for host in range(hosts))
    return "\n".join(lines) + "\n"


def mac_address(host: int) -> str:
    return f"02:00:00:00:00:{host + 1:02x}"


def hub_lines(hosts: int, *, bridged: bool) -> str:
    lines = ["link add br0 type bridge mcast_snooping 0", "link set br0 up"] if bridged else []
    for host in range(hosts):
        far = f"name {INTERFACE} address {mac_address(host)} netns /proc/1/fd/{FIRST + host}"
        lines.append(f"link add v{host} type veth peer {far}")
        lines.append(f"link set v{host} {'master br0 ' if bridged else ''}up")
    return "\n".join(lines) + "\n"


def host_lines(host: int) -> str:
    return f"link set lo up\naddr add {address(host)}/24 dev {INTERFACE}\nlink set {INTERFACE} mtu 1500 up\n"


def up_lines(link: Link) -> str:
    return f"qdisc replace dev {INTERFACE} root {bucket(link.bits_up)}\n"


def down_lines(host: int, link: Link, *, netem: bool) -> str:
    if not netem:
        return f"qdisc replace dev v{host} root {bucket(link.bits_down)}\n"
    late = f"delay {link.delay_s * 1e6:.0f}us {link.jitter_s * 1e6:.0f}us loss {100 * link.loss_share:g}%"
    return (
        f"qdisc replace dev v{host} root handle 1: netem {late} limit {PACKETS}\n"
        f"qdisc replace dev v{host} parent 1:1 {bucket(link.bits_down)}\n"
    )


def bucket(bits: float | None) -> str:
    """Return a token bucket, or an unlimited queue.

    >>> bucket(1e9)
    'tbf rate 1000000000bit burst 125000b latency 400ms'
    """
    if bits is None:
        return "pfifo limit 10000"
    burst = max(LEAST_BURST, bits / 8 * BURST_S)
    return f"tbf rate {bits:.0f}bit burst {burst:.0f}b latency {QUEUE_MS}ms"
