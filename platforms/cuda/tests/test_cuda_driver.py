"""Results of the driver's management library on shared, partitioned and unusual machines."""

import os

import pytest

from dovetail_cuda.driver import read_driver, read_free_bytes

NOT_SUPPORTED, NOT_FOUND = 3, 6
NO_PERMISSION = 4


class SharedMachine:
    """The management library of a machine with three cards. This process may use the second."""

    def __getattr__(self, name):
        return lambda *_: 0

    def nvmlDeviceGetCount_v2(self, number):  # noqa: N802 - the library's name
        number._obj.value = 3
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):  # noqa: N802
        handle._obj.value = index.value
        return 0 if index.value == 1 else NO_PERMISSION

    def nvmlDeviceGetUUID(self, handle, text, size):  # noqa: N802
        text.value = f"GPU-{handle.value}".encode()
        return 0


def test_devices_that_this_process_may_not_use_are_skipped():
    assert [card.uuid for card in read_driver(SharedMachine()).cards] == ["GPU-1"]


class DividedMachine(SharedMachine):
    """The management library of a machine whose second card has a partition MIG-7 of 5 GiB.

    memory_status: status of queries for the memory of a device.
    """

    memory_status = 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):  # noqa: N802
        handle._obj.value = 7
        return 0 if uuid.value == b"MIG-7" else NOT_FOUND

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle, device):  # noqa: N802
        assert handle.value == 7
        device._obj.value = 1
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):  # noqa: N802
        assert handle.value == 1, "only whole devices have a compute capability"
        major._obj.value = 9
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory):  # noqa: N802
        memory._obj.total = (5 if handle.value == 7 else 80) << 30
        memory._obj.free = 1 << 30
        return self.memory_status


def test_a_partition_reports_its_own_memory_and_the_compute_capability_of_its_card():
    (partition,) = read_driver(DividedMachine(), ["MIG-7", "MIG-8"]).partitions
    assert (partition.total_bytes, partition.capability) == (5 << 30, (9, 0))
    assert partition.uuid == "GPU-7"


def test_a_device_that_shares_host_memory_reports_host_memory():
    machine = DividedMachine()
    machine.memory_status = NOT_SUPPORTED
    (card,) = read_driver(machine).cards
    assert card.problem == ""
    assert card.total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("name", "free"), [("MIG-7", 1 << 30), ("MIG-8", None)])
def test_free_memory_is_read_without_a_context(name, free):
    assert read_free_bytes(name, DividedMachine()) == free
