"""The limits of this process's cgroup are found with version 1, version 2 and nested cgroups."""

from dovetail.machine import CgroupLimits, read_cgroup_limits, read_cores, read_memory

GIB = 1 << 30


def escaped(path):
    return str(path).replace(" ", "\\040")


def make_proc(tmp_path, own, mounts):
    """Write a fake /proc directory. mounts: tuples of root, mount point, filesystem and options."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text("".join(f"{line}\n" for line in own))
    lines = [
        f"{n} 1 0:{n} {root} {escaped(point)} rw - {kind} {kind} {options}"
        for n, (root, point, kind, options) in enumerate(mounts)
    ]
    (proc / "mountinfo").write_text("\n".join(["20 1 8:1 / / rw - ext4 /dev/sda rw", *lines]))
    return proc


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_cgroup_v2_limits_are_the_lowest_limits_of_the_cgroup_and_its_parents(tmp_path):
    top = tmp_path / "cgroup directory"
    write(top)
    write(top / "a", cpu__max="50000 100000", memory__max=3 * GIB)
    write(top / "a/b", cpu__max="max 100000", memory__max=2 * GIB)
    write(top / "a/b/c", cpu__max="300000 100000", memory__max="max")
    write(top / "other", cpu__max="10000 100000", memory__max=GIB)
    proc = make_proc(tmp_path, ["0::/a/b/c"], [("/", top, "cgroup2", "rw")])
    assert read_cgroup_limits(proc) == CgroupLimits(cpu_quota=0.5, memory_bytes=2 * GIB)


def test_cgroup_v1_limits_are_read_from_the_hierarchy_of_each_controller(tmp_path):
    cpu, memory = tmp_path / "cpu", tmp_path / "memory"
    write(cpu, cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    write(cpu / "task", cpu__cfs_quota_us=150000, cpu__cfs_period_us=100000)
    write(memory, memory__limit_in_bytes=9223372036854771712)
    write(memory / "jobs", memory__limit_in_bytes=GIB)
    write(memory / "jobs/1", memory__limit_in_bytes=4 * GIB)
    proc = make_proc(
        tmp_path,
        ["3:memory:/jobs/1", "2:cpu,cpuacct:/task", "1:name=systemd:/x", "0::/"],
        [("/", cpu, "cgroup", "rw,cpu,cpuacct"), ("/", memory, "cgroup", "rw,memory")],
    )
    assert read_cgroup_limits(proc) == CgroupLimits(cpu_quota=1.5, memory_bytes=GIB)


def test_limits_are_read_if_the_cgroup_of_a_container_is_mounted_as_the_root(tmp_path):
    cpu = tmp_path / "cpu"
    write(cpu, cpu__cfs_quota_us=20000, cpu__cfs_period_us=100000)
    mounts = [("/docker/1f", cpu, "cgroup", "rw,cpu")]
    proc = make_proc(tmp_path, ["2:cpu:/docker/1f"], mounts)
    assert read_cgroup_limits(proc).cpu_quota == 0.2


def test_a_cgroup_outside_the_mount_has_the_limits_of_the_mount_point(tmp_path):
    top = tmp_path / "top"
    write(top, cpu__max="200000 100000")
    write(tmp_path, cpu__max="10000 100000")
    proc = make_proc(tmp_path, ["0::/../.."], [("/", top, "cgroup2", "rw")])
    assert read_cgroup_limits(proc).cpu_quota == 2.0


def test_no_limit_is_reported_without_cgroups_or_with_damaged_cgroup_files(tmp_path):
    nothing = CgroupLimits(cpu_quota=None, memory_bytes=None)
    assert read_cgroup_limits(tmp_path / "missing") == nothing
    top = tmp_path / "top"
    write(top, cpu__max="100000 0", memory__max="-5 x")
    proc = make_proc(tmp_path, ["0::/", "damaged"], [("/", top, "cgroup2", "rw")])
    assert read_cgroup_limits(proc) == nothing


def test_the_machine_report_contains_the_cgroup_limits(monkeypatch):
    limits = CgroupLimits(cpu_quota=0.25, memory_bytes=GIB)
    monkeypatch.setattr("dovetail.machine.read_cgroup_limits", lambda: limits)
    assert read_cores().quota == 0.25
    assert read_memory()["limit"] == GIB
