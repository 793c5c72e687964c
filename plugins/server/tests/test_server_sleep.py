"""The routes /sleep and /wake_up, with an engine on the fake device."""

import pytest

pytest.importorskip("dovetail_torch")
FAKE = "dovetail_torch.fake_device"
ENGINE = {
    "--model": "demo",
    "--max-model-len": "128",
    "--platform": f"{FAKE}.platform:FakeDevicePlatform",
    "--worker-cls": f"{FAKE}.worker:FakeDeviceWorker",
    "--attention-backend": f"{FAKE}.attention:NoWaitAttentionBackend",
    "--dtype": "float32",
    "--num-gpu-blocks-override": "40",
    "--max-num-seqs": "4",
    "--max-num-batched-tokens": "64",
    "--admin-key": "operator",
}
ADMIN = {"Authorization": "Bearer operator"}


@pytest.fixture(scope="module")
def sleepy(serving):
    options = [word for pair in ENGINE.items() for word in pair]
    with serving(*options, "--enable-sleep-mode", "--enforce-eager") as running:
        yield running.wait_until_ready()


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("level", [1, 2])
def test_the_server_generates_the_same_text_after_sleep(sleepy, level):
    expected = sleepy.complete(prompt="reverse: fox, two").json["choices"][0]["text"]
    assert sleepy.post("/sleep", {"level": level}, **ADMIN).json == {"sleeping": True}
    again = sleepy.post("/sleep", {}, **ADMIN)
    assert again.status == 400 and "already asleep" in again.error["message"]
    half = sleepy.post("/wake_up", {"tags": ["weights"]}, **ADMIN)
    assert half.json == {"sleeping": True}
    assert sleepy.post("/wake_up", {}, **ADMIN).json == {"sleeping": False}
    assert sleepy.complete(prompt="reverse: fox, two").json["choices"][0]["text"] == expected


@pytest.mark.costly
@pytest.mark.parametrize("tags", ["weights", ["gpu"], [1], {"weights": 1}, [["weights"]]])
def test_invalid_sleep_tags_are_rejected(sleepy, tags):
    reply = sleepy.post("/wake_up", {"tags": tags}, **ADMIN)
    assert reply.status == 400 and reply.error["param"] == "tags"
