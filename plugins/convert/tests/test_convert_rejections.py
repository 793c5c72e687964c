"""`dovetail convert`: damaged models, existing directories, full disks, interruptions, memory."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conversions import convert, load_all, make_model

from dovetail.cli.frame import output_directory
from dovetail.errors import ConfigError, ModelError, WeightError
from dovetail_convert import shard_writer


def damage(model, name, content):
    (model / name).write_bytes(content)
    return model


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"", r"model\.safetensors is empty; download it again"),
        ("model.safetensors", b"\xff" * 64, r"model\.safetensors declares a header of \d+ bytes"),
        ("config.json", b"{", r"config\.json is not valid JSON"),
        ("config.json", b"{}", r"config\.json has no architectures"),
        ("generation_config.json", b"[]", r"generation_config\.json must contain a JSON object"),
        ("modules.json", b"{}", r"modules\.json must have a list"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith("json") else "",
)
def test_a_damaged_model_is_rejected_and_no_file_is_left(tmp_path, name, content, message):
    model = damage(make_model(tmp_path / "model"), name, content)
    with pytest.raises(ModelError, match=message):
        convert(model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_file_that_is_too_large_is_rejected(tmp_path):
    model = make_model(tmp_path / "model")
    with (model / "vocab.txt").open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(ModelError, match=r"vocab\.txt has \d+ bytes; the limit"):
        convert(model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_pipe_in_place_of_a_file_is_rejected(tmp_path):
    model = make_model(tmp_path / "model")
    os.mkfifo(model / "vocab.json")
    with pytest.raises(ModelError, match=r"vocab\.json is a FIFO"):
        convert(model, tmp_path / "out")


def test_a_truncated_shard_and_a_missing_shard_are_rejected(tmp_path):
    convert(make_model(tmp_path / "model"), tmp_path / "out", max_shard_size="300B")
    shard = sorted((tmp_path / "out").glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(WeightError, match=re.escape(shard.name)):
        convert(tmp_path / "out", tmp_path / "again")
    shard.unlink()
    with pytest.raises(WeightError, match=re.escape(shard.name)):
        convert(tmp_path / "out", tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_a_quantization_that_no_loader_reads_is_rejected(tmp_path):
    table = {"quant_method": "unknown"}
    model = make_model(tmp_path / "model", quantization_config=table)
    with pytest.raises(ModelError, match=r"quantized with 'unknown'.*No installed weight lo"):
        convert(model, tmp_path / "out")


def test_the_error_for_weights_in_a_gguf_file_only_names_the_file(tmp_path):
    pytest.importorskip("dovetail_gguf")
    model = make_model(tmp_path / "model")
    for path in model.glob("*.safetensors"):
        path.rename(model / "one.gguf")
    with pytest.raises(
        ModelError, match=r"no \*\.safetensors files; .*1 file \*\.gguf.*\n.*one\.gguf"
    ):
        convert(model, tmp_path / "out")


def test_an_existing_directory_is_kept_without_overwrite(tmp_path):
    model = make_model(tmp_path / "model")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match=r"--out=.*out already exists; .*, or --overwrite"):
        convert(model, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_overwrite_replaces_only_model_directories(tmp_path):
    model = make_model(tmp_path / "model", {"x": torch.ones(2)})
    out = tmp_path / "out"
    convert(make_model(tmp_path / "old"), out, max_shard_size="300B")
    (out / "old.txt").write_text("old", "utf-8")
    convert(model, out, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    (tmp_path / "empty").mkdir()
    convert(model, tmp_path / "empty", overwrite=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("text", "utf-8")
    with pytest.raises(ConfigError, match=r"--out=.*other contains files but no config\.json"):
        convert(model, tmp_path / "other", overwrite=True)
    with pytest.raises(ConfigError, match=r"--out=.*thesis\.txt is not a directory"):
        convert(model, tmp_path / "other" / "thesis.txt", overwrite=True)
    (tmp_path / "link").symlink_to(out)
    with pytest.raises(ConfigError, match=r"--out=.*link is not a directory"):
        convert(model, tmp_path / "link", overwrite=True)
    expected = ["empty", "link", "model", "old", "other", "out"]
    assert sorted(path.name for path in tmp_path.iterdir()) == expected


def test_a_failed_conversion_keeps_the_directory_that_it_would_replace(tmp_path, monkeypatch):
    model, out = make_model(tmp_path / "model"), tmp_path / "out"
    convert(make_model(tmp_path / "old", {"x": torch.ones(2)}), out)
    with pytest.raises(WeightError):
        convert(model, out, overwrite=True, dtype="float16")
    assert load_all(out)["x"].tolist() == [1, 1]
    rename = os.rename

    def fail(source, target):
        if Path(target) == out and "-old-" not in str(source):
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(output_directory.os, "rename", fail)
    with pytest.raises(ConfigError, match=r"--out=.*No space left"):
        convert(model, out, overwrite=True)
    assert load_all(out)["x"].tolist() == [1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "old", "out"]


@pytest.mark.parametrize("out", ["model", "."])
def test_the_model_itself_is_never_replaced(tmp_path, out):
    (tmp_path / "models").mkdir()
    model = make_model(tmp_path / "models" / "model")
    make_model(tmp_path / "models")
    with pytest.raises(ConfigError, match=r"--out=.* contains the model to convert"):
        convert(model, tmp_path / "models" / out, overwrite=True)
    assert load_all(model)


def test_a_directory_that_cannot_be_written_is_rejected(tmp_path, monkeypatch):
    model = make_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"--out=.*missing/out: .*missing is not a directory"):
        convert(model, tmp_path / "missing" / "out")
    monkeypatch.setattr(output_directory.os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=r"--out=.*is not a directory that can be written to"):
        convert(model, tmp_path / "out")


def test_a_full_disk_is_reported_before_and_while_writing(tmp_path, monkeypatch):
    model = make_model(tmp_path / "model")

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shard_writer.os, "write", fail)
        with pytest.raises(ConfigError, match=r"--out=.*out cannot be written: No space left"):
            convert(model, tmp_path / "out")
    usage = output_directory.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(output_directory.shutil, "disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(ConfigError, match=r"--out=.*MB are needed.*of free space"):
        convert(model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_too_many_files_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_writer, "MAX_SHARDS", 3)
    with pytest.raises(ConfigError, match=r"--max-shard-size: .* would have \d+ files .*at most 3"):
        convert(make_model(tmp_path / "model"), tmp_path / "out", max_shard_size="1B")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


INTERRUPTED = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
from dovetail.cli import main
from dovetail_convert import shard_writer

def slow(*_):
    print("writing", flush=True)
    time.sleep(60)

shard_writer._write_all = slow
sys.exit(main(["convert", "demo", "--out", sys.argv[1]]))
"""


@pytest.mark.costly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_conversion_leaves_no_files(tmp_path, number):
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "writing\n"
        assert len(list(tmp_path.iterdir())) == 1  # the temporary directory
        process.send_signal(number)
        assert process.wait(timeout=60) == 130
    assert not list(tmp_path.iterdir())


MEASURED = """
import resource, sys
from pathlib import Path
from dovetail_convert.convert_options import ConvertOptions
from dovetail_convert.run import run
from dovetail_torch.weights import checkpoint_tensors

checkpoint_tensors.MAX_MAPPED_BYTES = checkpoint_tensors.PIECE_VALUES = 1 << 20
run("demo", ConvertOptions(out=Path(sys.argv[2])), print)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(sys.argv[1], ConvertOptions(out=Path(sys.argv[3]), dtype=sys.argv[4]), print)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.costly
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_memory_use_does_not_depend_on_the_size_of_the_model(tmp_path, dtype):
    """Convert a model of 150 MB in one file, with lowered chunk sizes."""
    tensors = {f"w{index}": torch.zeros(5 << 20, dtype=torch.bfloat16) for index in range(15)}
    model = make_model(tmp_path / "model", tensors)
    del tensors
    arguments = [model, tmp_path / "first", tmp_path / "out", dtype]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
    )
    growth_mib = int(done.stdout.split()[-1]) / 1024
    assert growth_mib < 60


def test_a_loader_that_writes_too_few_or_too_many_values_is_reported(tmp_path):
    plan = [shard_writer.PlannedTensor(name=n, shape=(4,), dtype=torch.float32) for n in "ab"]
    writer = shard_writer.ShardWriter(tmp_path, plan, 100)
    writer.write("a", [torch.ones(3), torch.ones(1)])
    with pytest.raises(WeightError, match=r"weight b has 20 bytes, expected 16"):
        writer.write("b", [torch.ones(3), torch.ones(2)])
    with pytest.raises(WeightError, match=r"provided a twice"):
        writer.write("a", [torch.ones(4)])
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(WeightError, match=r"did not provide a and 1 more"):
        shard_writer.ShardWriter(other, plan, 100).finish()
