"""The sampler's token history must not wait for an asynchronous device."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail_torch.sampling.history import TokenHistory


class Copies(TorchDispatchMode):
    """Counts copies of single numbers: on CUDA each such copy waits for the device."""

    def __init__(self):
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.copy_:
            self.found += args[1].dim() == 0
        return func(*args, **(kwargs or {}))


def test_adding_a_request_to_the_token_history_does_not_copy_scalars():
    history = TokenHistory(vocab_size=9, device=torch.device("cpu"), upload=torch.from_numpy)
    with Copies() as copies:
        history.join(3, [1, 2, 2], [5])
    assert copies.found == 0
    past = history.read(history.track([3]))
    assert past.lengths_R1.tolist() == [[4]]
    assert past.tokens_RL.tolist() == [[1, 2, 2, 5]]
    assert past.counts_RL.tolist() == [[0, 0, 0, 1]]
