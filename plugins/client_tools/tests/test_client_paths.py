"""Paths with a name that is too long for a file: the error names the option."""

import pytest

LONG = "x" * 300
NO_FOLDER = "is in a directory that does not exist"


@pytest.mark.costly
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trace", "log", "--perfetto", f"{LONG}/x"], NO_FOLDER),
        (["bench", "serve", "--json", f"{LONG}/x"], NO_FOLDER),
        (["run-batch", "-i", LONG, "-o", "out", "--url", "localhost"], "File name too long"),
        (["run-batch", "-i", "in", "-o", LONG, "--url", "localhost"], "File name too long"),
    ],
)
def test_a_path_that_cannot_exist_is_rejected(arguments, message, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_text("{}\n")
    code, _, error = run(*arguments)
    assert code == 2
    assert message in error


def test_a_workload_that_cannot_exist_is_rejected(null, run):
    with null.running(lambda body: None) as url:
        code, _, error = run("bench", "serve", "--url", url, "--workload", LONG)
    assert code == 2
    assert "is neither a file nor a trace" in error
