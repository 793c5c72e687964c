"""`bench/peers/engine_ikllamacpp.py` with a library that a class in Python replaces."""

import ctypes
from ctypes import c_int8, c_int32

import pytest
from peers import engine_ikllamacpp
from peers.engine_ikllamacpp import IkLlamaCppEngine

VOCAB = 50


class FakeLibrary:
    """Predicts, for each token, its successor. Records calls and the entries of batches."""

    def __init__(self):
        self.calls, self.entries = [], []
        self.sampled = {}

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, *arguments))

    def bridge_load(self, *arguments):
        self.calls.append(("bridge_load", *arguments))
        return 1

    def bridge_create_context(self, *arguments):
        self.calls.append(("bridge_create_context", *arguments))
        return 2

    def llama_n_vocab(self, model):
        return VOCAB

    def bridge_decode(self, context, num_tokens, tokens, positions, rows, samples):
        kinds = (c_int32, c_int32, c_int32, c_int8)
        columns = [
            (kind * num_tokens).from_address(address)
            for kind, address in zip(kinds, (tokens, positions, rows, samples), strict=True)
        ]
        batch = list(zip(*columns, strict=True))
        self.entries += [entry[:3] for entry in batch]
        self.sampled = {i: token for i, (token, *_, sample) in enumerate(batch) if sample}
        return 0

    def llama_get_logits_ith(self, context, index):
        logits = (ctypes.c_float * VOCAB)()
        logits[self.sampled[index] + 1] = 1.0
        return ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))


@pytest.fixture
def library(monkeypatch):
    library = FakeLibrary()
    monkeypatch.setattr(engine_ikllamacpp, "_library", lambda path: library)
    return library


def test_each_token_of_ik_llama_cpp_has_its_position_and_the_stream_of_its_request(library):
    engine = IkLlamaCppEngine()
    engine.load("m.gguf", "int4", 2, {"bridge": "/b.so", "merge_qkv": False})
    assert ("bridge_load", b"m.gguf", True, False) in library.calls
    prompts, output_lens = [[10, 20], [30]], [2, 3]
    engine.prepare(prompts, output_lens)
    assert ("bridge_create_context", 1, 2, 256, 2, True, -1) in library.calls
    library.calls.clear()
    library.entries.clear()
    assert engine.generate(prompts, output_lens) == [[21, 22], [31, 32, 33]]
    assert library.calls == [("llama_kv_cache_clear", 2)]
    assert library.entries == [
        (10, 0, 0),
        (20, 1, 0),
        (30, 0, 1),
        (21, 2, 0),
        (31, 1, 1),
        (32, 2, 1),
    ]


def test_a_kept_prefix_of_ik_llama_cpp_is_not_computed_again(library):
    engine = IkLlamaCppEngine()
    engine.load("m.gguf", "int4", 2, {"keep_prefix": True})
    engine.prepare([[10, 20]], [2])
    engine.generate([[10, 20]], [1])
    library.calls.clear()
    library.entries.clear()
    assert engine.generate([[10, 20]], [2]) == [[21, 22]]
    assert library.calls == [("llama_kv_cache_seq_rm", 2, 0, 1, -1)]
    assert library.entries == [(20, 1, 0), (21, 2, 0)]


def test_an_unknown_option_of_ik_llama_cpp_is_rejected(library):
    with pytest.raises(ValueError, match="n_gpu_layers"):
        IkLlamaCppEngine().load("m.gguf", "int4", 2, {"n_gpu_layers": 1})


def test_the_error_for_a_missing_bridge_names_its_file():
    with pytest.raises(OSError, match=r"no_bridge\.so"):
        IkLlamaCppEngine().load("m.gguf", "int4", 2, {"bridge": "/no_bridge.so"})
