"""Results of the driver's management library on shared machines."""

from dovetail_cuda.driver import read_driver

NO_PERMISSION = 4


class SharedMachine:
    """The management library of a machine with three cards; this process may use the second."""

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


def test_cards_of_other_users_are_skipped():
    assert [card.uuid for card in read_driver(SharedMachine()).cards] == ["GPU-1"]
