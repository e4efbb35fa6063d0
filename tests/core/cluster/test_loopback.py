"""A cluster on one machine is reachable only from this machine, and its files only by this user."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import ray

from rl_core.cluster import RayVirtualCluster, RayWorkerGroup, WorkerContext
from rl_core.rendezvous import interfaces
from rl_core.rendezvous.interfaces import interface_variables, is_loopback

pytestmark = pytest.mark.usefixtures("local_ray")


class Collective:
    """Joins a process group, and a second one like that of the weight transport."""

    def __init__(self, context: WorkerContext) -> None:
        import torch.distributed as dist

        from rl_backends_base.parallel import join_process_group

        join_process_group(context, "gloo", timeout=timedelta(seconds=60))
        self.context, self.dist = context, dist

    def join_weights(self, ip: str, port: int) -> None:
        from rl_core.weights.collective import WeightCollective

        self.weights = WeightCollective(ip, port, self.context.world_size, rank=self.context.rank, device="cpu", timeout_s=60.0)
        self.weights.join()

    def total(self) -> float:
        import torch

        ones = torch.ones(())
        self.dist.all_reduce(ones)
        return float(ones)


def _listening() -> dict[str, str]:
    """Each address that this process or one that it started listens on, with the process's name."""
    found = {}
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        for connection in process.net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN:
                found[f"{connection.laddr.ip}:{connection.laddr.port}"] = process.name()
    return found


def _reachable_from_outside(address: str) -> bool:
    ip = ipaddress.ip_address(address.rpartition(":")[0])
    return not (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


@pytest.mark.slow
def test_local_cluster_listens_on_the_loopback_interface_only():
    with (
        RayVirtualCluster([2], use_gpus=False, cpus_per_bundle=0.5) as cluster,
        RayWorkerGroup(cluster, Collective, name="collective") as group,
    ):
        group.run_all("join_weights", *cluster.get_master_address_and_port())
        assert group.run_all("total") == [2.0, 2.0]
        listening = _listening()
        assert {"gcs_server", "raylet"} <= set(listening.values())
        workers = sum(name.startswith("ray::Act") for name in listening.values())
        assert workers >= 6, listening  # each rank's own server of Ray and gloo twice, and rank 0's two stores
        assert {address: name for address, name in listening.items() if _reachable_from_outside(address)} == {}


def test_ray_folder_is_open_to_its_user_only():
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    [own] = [folder for folder in session.parents if folder.name.startswith("rlcore-ray-")]
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert own.stat().st_uid == os.getuid()


def test_local_ray_starts_no_dashboard_and_no_autoscaler():
    with RayVirtualCluster([1], use_gpus=False):
        children = psutil.Process().children(recursive=True)
        started = [" ".join(child.cmdline()) for child in children if child.status() != psutil.STATUS_ZOMBIE]
    assert any("raylet" in command for command in started)
    assert [command for command in started if "dashboard.py" in command or "autoscaler" in command] == []


def test_interface_variables_keep_what_the_user_set(monkeypatch):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    variables = interface_variables("127.0.0.1")
    assert variables["GLOO_SOCKET_IFNAME"] == "eth7"
    assert {address.address for address in psutil.net_if_addrs()[variables["NCCL_SOCKET_IFNAME"]]} >= {"127.0.0.1"}


def test_gloo_uses_the_interface_towards_the_other_nodes(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    outside = {
        one.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family == socket.AF_INET and not is_loopback(one.address)
    }
    if not outside:
        pytest.skip("this machine has no interface except loopback")
    for address, name in outside.items():
        assert interface_variables(address) == {"GLOO_SOCKET_IFNAME": name}


@pytest.mark.parametrize(("address", "expected"), [("127.0.0.1", True), ("::1", True), ("10.0.0.1", False), ("node7", False)])
def test_loopback_addresses_are_recognized(address, expected):
    assert is_loopback(address) is expected


def test_two_live_processes_never_return_the_same_free_port(monkeypatch):
    """A port is bound only after its number has travelled to the processes that meet there."""
    monkeypatch.setattr(interfaces, "_LOW", 9_990)
    monkeypatch.setattr(interfaces, "_HIGH", 9_992)
    script = (
        "from rl_core.rendezvous import interfaces\n"
        "interfaces._LOW, interfaces._HIGH = 9_990, 9_992\n"
        "print(interfaces.free_port('127.0.0.1'), flush=True)\n"
        "input()\n"
    )
    for _ in range(4):  # either port is as likely
        with subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            taken = int(other.stdout.readline())
            assert interfaces.free_port("127.0.0.1") != taken
            interfaces._returned.clear()
            other.stdin.close()
