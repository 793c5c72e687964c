"""Columns are packed and copied to a device and back, in order and without being overwritten."""

import numpy as np
import pytest
import torch

from dovetail.result import ModelRunnerOutput
from dovetail_devkit.harnesses.late_device import LateDevice
from dovetail_torch.runner.late_output import FetchRing
from dovetail_torch.runner.staging import Staging

HOST = torch.device("cpu")
COLUMNS = (
    np.arange(5, dtype=np.int32),
    np.arange(6.0).reshape(2, 3),
    np.zeros((4, 0), np.int64),
    np.array([7], np.uint8),
    np.arange(3, dtype=np.float32)[::-1],
)


def test_staged_columns_arrive_on_the_device_unchanged():
    staging = Staging(HOST, LateDevice())
    for _ in range(3):
        sent = staging.send(COLUMNS)
        for column, tensor in zip(COLUMNS, sent, strict=True):
            assert np.array_equal(tensor.numpy(), column)
            assert tensor.dtype.itemsize == column.itemsize
            assert not tensor.numel() or (tensor.data_ptr() - sent[0].data_ptr()) % 16 == 0


def test_a_staging_slot_is_reused_only_after_its_copies():
    device = LateDevice()
    staging = Staging(HOST, device, num_slots=2, slot_bytes=64)
    taken = []
    for number in range(12):  # two packets per slot
        taken.append(staging.upload(np.full(8, number, np.int32)))
    assert device.num_waits == 4  # six slots were used, the first two without a wait
    assert [int(item[0]) for item in taken] == list(range(12))


def test_a_packet_that_is_larger_than_a_staging_slot_is_sent_in_parts():
    device = LateDevice()
    staging = Staging(HOST, device, num_slots=2, slot_bytes=64)
    staging.upload(np.arange(4))
    many, few = staging.send((np.arange(100), np.arange(3)))
    assert many.tolist() == list(range(100)) and few.tolist() == [0, 1, 2]
    assert [len(slot) for slot in device.pinned] == [64, 64]
    assert staging.upload(np.arange(8)).tolist() == list(range(8))


def result_of(tensors):
    return ModelRunnerOutput(
        step_id=int(tensors[0][0]), num_sampled=[], token_ids=tensors[1].tolist()
    )


def test_results_are_kept_until_they_are_requested():
    ring = FetchRing(LateDevice(), 64, num_slots=2)
    late = [
        ring.fetch((torch.tensor([step]), torch.arange(step, dtype=torch.int32)), result_of)
        for step in range(5)
    ]
    assert [item.done() for item in late] == [True, True, True, False, False]
    for step, item in reversed(list(enumerate(late))):
        assert item.result().step_id == step
        assert item.result(timeout=0).token_ids == list(range(step))


def test_a_result_that_is_larger_than_its_staging_slot_gets_a_larger_slot():
    ring = FetchRing(LateDevice(), 64, num_slots=1)
    many = torch.arange(5000)
    assert ring.fetch((many[:1], many), result_of).result().token_ids == many.tolist()


def test_settle_waits_for_all_outstanding_copies_to_the_host():
    ring = FetchRing(LateDevice(), 64)
    late = [ring.fetch((torch.tensor([n]), torch.zeros(1)), result_of) for n in range(3)]
    ring.settle()
    assert all(item.done() for item in late)


@pytest.mark.parametrize("kind", [np.int16, np.bool_])
def test_unknown_dtypes_are_rejected(kind):
    with pytest.raises(KeyError):
        Staging(HOST, LateDevice()).upload(np.zeros(1, kind))
