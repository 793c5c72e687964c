"""The strict fake attention backend detects batches with one wrong field."""

from dataclasses import replace

import pytest
import torch

from dovetail.interfaces import AttentionBatch
from dovetail_devkit.attention.batch import check_batch

SIZE = 4


def right_batch():
    """Return a batch of a decode, a chunk and a whole prompt.

    The second request has an unused block.
    """
    return AttentionBatch(
        query_start_R1=torch.tensor([0, 1, 4, 6], dtype=torch.int32),
        seq_lens_R=torch.tensor([5, 7, 2], dtype=torch.int32),
        block_table_RM=torch.tensor([[3, 1, 0], [5, 2, 6], [4, 0, 0]], dtype=torch.int32),
        slot_mapping_T=torch.tensor([4, 8, 9, 10, 16, 17]),
        query_lens=[1, 3, 2],
        seq_lens=[5, 7, 2],
    )


def changed(name, index, value):
    batch = right_batch()
    column = getattr(batch, name)
    if isinstance(column, torch.Tensor):
        column = column.clone()
    column[index] = value
    return replace(batch, **{name: column})


WRONG = {
    "wrong slot": changed("slot_mapping_T", 3, 11),
    "slot of another row": changed("slot_mapping_T", 0, 20),
    "stale table entry": changed("block_table_RM", (2, 2), 7),
    "one block in two places": changed("block_table_RM", (1, 2), 5),
    "wrong block": changed("block_table_RM", (0, 1), 2),
    "different lengths on host and device": changed("seq_lens", 1, 8),
    "wrong start": changed("query_start_R1", 2, 3),
    "wrong query length": changed("query_lens", 2, 1),
    "int64 lengths": replace(right_batch(), seq_lens_R=torch.tensor([5, 7, 2])),
    "int32 slots": replace(
        right_batch(), slot_mapping_T=right_batch().slot_mapping_T.to(torch.int32)
    ),
}


def test_a_valid_attention_batch_is_accepted():
    check_batch(right_batch(), SIZE)


@pytest.mark.parametrize("mistake", WRONG)
def test_an_attention_batch_with_an_invalid_field_is_rejected(mistake):
    with pytest.raises(AssertionError):
        check_batch(WRONG[mistake], SIZE)
