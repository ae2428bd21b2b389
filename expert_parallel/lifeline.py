"""A connection to the next rank, kept open for the length of a run: the system closes it when that rank's process ends.

Knows sockets and the store; knows nothing of what a rank does. A process that is killed tells nobody, but its kernel
does: whoever is connected to it reads an end. No process needs to find time for it, so a rank that is merely busy, say
in a long call into C code, is never taken for dead. For a machine that vanishes with its kernel, the system's own
probes of a silent connection give it up.

    rank 0  ->  rank 1  ->  ...  ->  rank N - 1  ->  rank 0        each listens, and is connected to by the one before
"""

from __future__ import annotations

import socket

from expert_parallel.group import Ranks

_CONNECT_S = 10.0
_PROBE_AFTER_S, _PROBE_EVERY_S, _PROBES = 5, 5, 3
"""A machine that does not answer is given up after 20 seconds."""


class Lifeline:
    """Every rank makes one together with the others. `unwatched`: why the next rank cannot be watched; mostly None.

    Nobody accepts the connection: it is complete once the listener's system has answered, and ends with the listener.
    """

    def __init__(self, ranks: Ranks) -> None:
        values = ranks.values
        self.next_rank = (values.rank + 1) % values.world_size
        self.unwatched: str | None = None
        own_host = _own_address(values.master_addr, values.master_port)
        family = socket.AF_INET6 if ":" in own_host else socket.AF_INET
        self._listener = socket.create_server((own_host, 0), family=family, backlog=1)
        ranks.store.set(f"lifeline/{values.rank}", f"{own_host} {self._listener.getsockname()[1]}")
        ranks.meet("lifelines")
        host, port = ranks.store.get(f"lifeline/{self.next_rank}").decode().split()
        self._connection: socket.socket | None = None
        try:
            self._connection = _connect(host, int(port))
        except OSError as error:
            self.unwatched = f"rank {self.next_rank} at {host}:{port}: {error}"
        ranks.meet("lifelines held")  # who leaves sooner would not have been watched

    def next_has_ended(self) -> bool:
        """Whether the next rank's process is gone, or has closed its end. Does not wait."""
        if self._connection is None:
            return False
        try:
            return not self._connection.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Whoever watches this rank sees it end. Closing twice is fine."""
        self._listener.close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _connect(host: str, port: int) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=_CONNECT_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _PROBE_AFTER_S),
        (socket.TCP_KEEPINTVL, _PROBE_EVERY_S),
        (socket.TCP_KEEPCNT, _PROBES),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setblocking(False)
    return connection


def _own_address(master_addr: str, master_port: int) -> str:
    """By which address this machine reaches the master; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(master_addr, master_port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
