"""A node of a trainer on several machines: a process that dials the controller and starts ranks here when it is told to.

The controller's side is nodes.py. A rank gets a connection to the controller that the agent has opened, so the secret stays with the agent. Ranks end
with their agent, and the agent stops its ranks when the controller is gone.
"""

from __future__ import annotations

import hashlib
import socket
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.core.ports import free_port
from agentrl.core.secret_socket import Controller, dial, versions
from agentrl.engine.sglang.installation import gpus
from agentrl.train.megatron.rank_place import LocalRank


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a node says of itself."""

    number: int
    name: str
    host: str
    """an address at which the other nodes reach it"""
    gpus: int
    versions: dict[str, str]


class RankHello(NamedTuple):
    """First message of a rank's connection."""

    key: int


class NodeAgent:
    """The agent of node `number`."""

    def __init__(self, controller: Controller, number: int) -> None:
        """Dial the controller.

        Raises:
            OSError, WorkerError: it does not answer, or does not know the secret.
        """
        self._controller = controller
        self._connection = dial(*controller)
        host = _own_address(self._connection)
        hello = Hello(number=number, name=socket.gethostname(), host=host, gpus=len(gpus()), versions=versions())
        self._connection.send(hello)
        self._ranks: dict[int, LocalRank] = {}

    def serve(self) -> bool:
        """Do what the controller says until it ends the run; false: the controller is gone."""
        try:
            while True:
                try:
                    if not self._connection.poll(None):
                        return False
                    command, arguments = self._connection.recv()
                except (EOFError, OSError):
                    return False
                if command == "end":
                    return True
                try:
                    reply: tuple[str, Any] = "ok", getattr(self, command)(**arguments)
                except Exception:  # noqa: BLE001  the controller raises it
                    reply = "error", traceback.format_exc()
                self._connection.send(reply)
        except OSError:
            return False
        finally:
            for key in list(self._ranks):
                self.kill(key)
            self._connection.close()

    # -- commands ------------------------------------------------------------------------------------------------------

    def start(self, key: int, log: Path, threads: int) -> None:
        """Start a rank, which is `key` in further commands."""
        with dial(*self._controller) as connection:
            connection.send(RankHello(key))
            self._ranks[key] = LocalRank(connection.fileno(), log, threads)

    def ended(self, key: int, timeout_s: float) -> str | None:
        """See `RankProcess.ended`."""
        return self._ranks[key].ended(timeout_s) if key in self._ranks else "has been stopped"

    def kill(self, key: int) -> None:
        """See `RankProcess.kill`."""
        if key in self._ranks:
            self._ranks.pop(key).kill()

    def free_port(self) -> int:
        """A port of this node on which nothing listens."""
        return free_port()

    def sees(self, probe: Path, text: str) -> bool:
        """Whether a file is here and holds this."""
        try:
            return probe.read_text() == text
        except OSError:
            return False

    def digest(self, folder: Path) -> str:
        """See `folder_digest`."""
        return folder_digest(folder)


def folder_digest(folder: Path) -> str:
    """A word that differs for models that differ: names and sizes of the files, and config.json."""
    try:
        files = sorted((p.name, p.stat().st_size) for p in folder.iterdir() if p.suffix in (".json", ".safetensors"))
        return hashlib.sha256(repr(files).encode() + (folder / "config.json").read_bytes()).hexdigest()
    except OSError:
        return ""


def _own_address(connection: Connection) -> str:
    """The address of this machine on the way to the controller."""
    with socket.socket(fileno=connection.fileno()) as sock:
        try:
            return str(sock.getsockname()[0])
        finally:
            sock.detach()
