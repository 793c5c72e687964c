"""A tensor_parallel_size that does not fit the model's sizes is rejected early."""

import pytest

from dovetail.config.tensor_parallel import check_tensor_parallel
from dovetail.errors import ConfigError

SIZES = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 112,
    "vocab_size": 257,
}


@pytest.mark.parametrize(
    ("changes", "num_workers", "words"),
    [
        (
            {},
            3,
            (
                "num_attention_heads=6 with num_key_value_heads=2",
                "Use 1, 2, 6 (for all sizes of the model: 1, 2)",
            ),
        ),
        ({}, 6, ("intermediate_size=112", "Use 1, 2, 4, 7")),
        ({}, 8, ("num_attention_heads=6",)),
        ({"num_attention_heads": 32, "num_key_value_heads": 8}, 64, ("num_attention_heads=32",)),
        (
            {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 5},
            4,
            ("vocab_size=5",),
        ),
        (
            {"intermediate_size": 33},
            2,
            ("intermediate_size=33", "Use 1, 3, 11, 33 (for all sizes of the model: 1)"),
        ),
    ],
)
def test_the_error_for_an_indivisible_model_size_names_the_valid_worker_counts(
    changes, num_workers, words
):
    for config in (SIZES | changes, {"text_config": SIZES | changes}):
        with pytest.raises(ConfigError) as caught:
            check_tensor_parallel(num_workers, config)
        for word in (f"tensor_parallel_size={num_workers} is not possible", *words):
            assert word in str(caught.value)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_model_sizes_divisible_by_the_number_of_workers_are_accepted(num_workers):
    check_tensor_parallel(num_workers, SIZES)
    check_tensor_parallel(4, SIZES | {"num_attention_heads": 8})  # key heads can be replicated
    check_tensor_parallel(7, {"num_attention_heads": [8, 9], "n_head": 5})
