"""What bounds the host's memory, read from made-up roots of a file system."""

from pathlib import Path

import torch

from usp.host import Room, available_bytes, rooms, sent


def group(root: Path, path: str, limit: str, used: int, idle: int = 0) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\ninactive_file {idle}\nactive_file 3\n")


def machine(root: Path, cgroup: str) -> None:
    (root / "proc/sys/kernel/random").mkdir(parents=True)
    (root / "proc/self").mkdir()
    (root / "proc/sys/kernel/random/boot_id").write_text("abc\n")
    (root / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   20 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)


def test_nothing_is_known(tmp_path: Path) -> None:
    assert rooms(tmp_path) == []
    assert available_bytes(tmp_path) is None


def test_every_group_above_this_process(tmp_path: Path) -> None:
    """A limit may be set on any of them; what files take that may be dropped is free."""
    machine(tmp_path, "0::/slice/job/step\n")
    group(tmp_path, "", "max", 10**6)
    group(tmp_path, "slice", "9000", 4000, 1000)
    group(tmp_path, "slice/job", "max", 10)
    group(tmp_path, "slice/job/step", "5000", 500)
    found = rooms(tmp_path)
    assert [room.free for room in found] == [20 * 1024, 4500, 6000]
    assert found[0].name == "abc memory"
    assert len({room.name for room in found}) == 3
    assert available_bytes(tmp_path) == 4500
    group(tmp_path, "slice", "9000", 10000)
    assert available_bytes(tmp_path) == 0  # over the limit, for a moment


def test_the_older_kind_and_other_namespaces(tmp_path: Path) -> None:
    machine(tmp_path, "4:memory:/docker/one\n3:cpu,cpuacct:/docker/one\n0::/\n")
    folder = tmp_path / "sys/fs/cgroup/memory"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("3000")
    (folder / "memory.usage_in_bytes").write_text("1000")
    (folder / "memory.stat").write_text("total_inactive_file 50")
    assert [room.free for room in rooms(tmp_path)] == [20 * 1024, 2050]  # /docker/one is not to be seen
    (tmp_path / "proc/self/cgroup").write_text("0::/../../other\n")
    assert [room.free for room in rooms(tmp_path)] == [20 * 1024, 2050]


def test_here() -> None:
    names = [room.name for room in rooms()]
    assert len(set(names)) == len(names) > 0
    assert rooms()[0].name == names[0]
    assert isinstance(rooms()[0], Room)


def test_sent() -> None:
    t = torch.arange(3.0)
    assert torch.equal(sent(t, torch.device("cpu")), t)
    assert sent(t, torch.device("meta")).device.type == "meta"
