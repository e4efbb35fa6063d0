"""Nodes on this machine as if they were machines: each has its own network, host name, /tmp and /dev/shm.

Only root can create them. The folder of the repository and `shared` are the same on all nodes, as on a network file system.
"""

import os
import shlex
import shutil
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

SCRIPTS = Path(sys.executable).parent
TOKEN = "0123456789abcdef0123456789abcdef"
PORT = 6379


class NetworkNodes:
    """A Ray on several simulated nodes.

    Attributes:
        addresses: One per node; the first runs Ray's head.
        shared: A folder that all nodes see.
    """

    def __init__(self, count, shared, *, cpus=1):
        self.shared, self._cpus = Path(shared), cpus
        self._name = f"rl{uuid.uuid4().hex[:6]}"
        self._keepers = []
        subnet = 16 + int(self._name[2:4], 16) % 200
        self.addresses = [f"10.{subnet}.7.{number + 1}" for number in range(count)]
        _run("ip", "link", "add", self._name, "type", "bridge")
        try:
            _run("ip", "link", "set", self._name, "up")
            for number, address in enumerate(self.addresses):
                self._add(number, address)
        except BaseException:
            self.close()
            raise

    def _add(self, number, address):
        # The process says when it is in its namespaces, and holds them until the end.
        keeper = subprocess.Popen(
            ["unshare", "-n", "-m", "-u", "sh", "-c", f"hostname node{number + 1}; echo; exec sleep infinity"],
            stdout=subprocess.PIPE,
        )
        keeper.stdout.readline()
        self._keepers.append(keeper)
        link = f"{self._name}{number}"
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(keeper.pid))
        _run("ip", "link", "set", link, "master", self._name, "up")
        for command in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            self.run(number, "ip", *command.split())
        # The shared folder may itself be below /tmp.
        hold, own = f"/mnt/{self._name}", shlex.quote(str(self.shared))
        steps = [
            f"mount -t tmpfs tmpfs /mnt; mkdir {hold}; mount --bind {own} {hold}",
            "mount -t tmpfs tmpfs /tmp; mount -t tmpfs tmpfs /dev/shm",
            f"mkdir -p {own}; mount --move {hold} {own}",
        ]
        self.run(number, "sh", "-ec", "; ".join(steps))

    def command(self, number, *words):
        """The command line that runs a command on a node."""
        enter = ["nsenter", "-t", str(self._keepers[number].pid), "-n", "-m", "-u"]
        return [*enter, "env", "-C", str(self.shared), *map(str, words)]

    def run(self, number, *words, **settings):
        """Runs a command on a node to its end."""
        return _run(*self.command(number, *words), **settings)

    def outside(self, *words):
        """Runs a command on a machine of the same network that is not a node; returns when it has ended."""
        address = self.addresses[0].rsplit(".", 1)[0] + ".200"
        _run("ip", "addr", "add", f"{address}/24", "dev", self._name)
        try:
            return subprocess.run(words, env=self.environment(), cwd=self.shared, capture_output=True, text=True, check=False)
        finally:
            _run("ip", "addr", "del", f"{address}/24", "dev", self._name)

    def environment(self, **others):
        """Environment variables of a process that uses this Ray; Ray's niceness of 15 would starve its workers here."""
        ray = {"RAY_ADDRESS": f"{self.addresses[0]}:{PORT}", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        return {**os.environ, **ray, "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", **others}

    def start_ray(self, number, *options, **environment):
        """Starts Ray on a node, the head on the first."""
        role = (
            ["--head", f"--port={PORT}", "--include-dashboard=false"]
            if number == 0
            else [f"--address={self.addresses[0]}:{PORT}"]
        )
        start = [SCRIPTS / "ray", "start", *role, f"--node-ip-address={self.addresses[number]}", f"--num-cpus={self._cpus}"]
        own = self.environment(**environment)
        own.pop("RAY_ADDRESS")
        command = self.command(number, *start, "--object-store-memory=100000000", *options)
        for _ in range(4):  # Ray gives up after 30 seconds, which a busy machine may need
            done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=300, check=False)
            if done.returncode == 0:
                return
            self._end_processes(number)
        raise AssertionError(done.stderr)

    def processes(self, number):
        """All processes of a node except the one that holds its namespaces."""
        keeper = self._keepers[number].pid
        network = os.readlink(f"/proc/{keeper}/ns/net")
        return [p for p in psutil.process_iter() if p.pid != keeper and _network_of(p.pid) == network]

    def kill(self, number):
        """Ends a node as a power failure does: all its processes at once, and its network."""
        _run("ip", "link", "set", f"{self._name}{number}", "down")
        self._end_processes(number)

    def revive(self, number):
        """Starts a node again that was killed, with its Ray."""
        _run("ip", "link", "set", f"{self._name}{number}", "up")
        self.start_ray(number)

    def actors(self, number):
        """The processes of Ray's actors on a node."""
        return [process for process in self.processes(number) if process.name().startswith(("ray::ActorHost", "ray::rank"))]

    def close(self):
        """Ends all processes of the nodes, and removes the nodes."""
        for number, keeper in enumerate(self._keepers):
            self._end_processes(number)
            keeper.kill()
            keeper.wait()
        _run("ip", "link", "del", self._name)

    def _end_processes(self, number):
        while left := [process for process in self.processes(number) if process.status() != psutil.STATUS_ZOMBIE]:
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=5)


def make_nodes(count, shared, **settings):
    """Nodes; skips the test if this machine does not allow to create them."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "mount") if shutil.which(tool) is None]
    if missing or os.geteuid():
        pytest.skip(f"simulated nodes need root and the commands unshare, nsenter, ip and mount; missing: {missing or 'root'}")
    name = f"rlt{os.getpid()}"
    for trial in (["unshare", "-n", "-m", "-u", "true"], ["ip", "link", "add", name, "type", "bridge"]):
        done = subprocess.run(trial, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"simulated nodes cannot be created here: {' '.join(trial)}: {done.stderr.strip()}")
    _run("ip", "link", "del", name)
    return NetworkNodes(count, shared, **settings)


def _network_of(pid):
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def _run(*words, **settings):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False, **settings)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done
